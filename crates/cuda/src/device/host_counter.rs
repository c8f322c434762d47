//! A counter in host memory that kernels increment.
#![allow(unsafe_code)]

use crate::abi::DeviceAddress;
use crate::device::page_locked;
use crate::error::CudaError;
use core::mem::MaybeUninit;
use core::ptr::NonNull;
use core::sync::atomic::{AtomicU32, Ordering};
use cudarc::driver::{CudaContext, PinnedHostSlice, sys};
use std::sync::Arc;

/// A counter in page-locked host memory. Kernels of one GPU increment it, and the host reads it without a copy.
#[derive(Debug)]
pub(crate) struct HostCounter {
    /// Owns the word.
    _memory: PinnedHostSlice<u8>,
    word: NonNull<AtomicU32>,
    address: DeviceAddress<u32>,
}

// SAFETY: the word is that of `_memory`, which any thread may read. The host accesses it by atomic loads only.
unsafe impl Send for HostCounter {}
// SAFETY: as above.
unsafe impl Sync for HostCounter {}

impl HostCounter {
    /// Allocates a counter of zero.
    pub(crate) fn new(context: &Arc<CudaContext>) -> Result<Self, CudaError> {
        let failed = CudaError::driver("allocate a counter in page-locked memory");
        let mut memory = page_locked(size_of::<AtomicU32>(), context)?;
        let word = NonNull::new(memory.as_mut_ptr().map_err(&failed)?.cast::<AtomicU32>());
        let word = word.ok_or(CudaError::Corrupt { what: "page-locked memory without an address" })?;
        let mut address = MaybeUninit::uninit();
        // SAFETY: the pointer is that of the new page-locked memory, which the driver maps for every GPU.
        let found = unsafe { sys::cuMemHostGetDevicePointer_v2(address.as_mut_ptr(), word.as_ptr().cast(), 0) };
        found.result().map_err(&failed)?;
        // SAFETY: the call succeeded, so it wrote the address.
        let address = DeviceAddress::new(unsafe { address.assume_init() });
        Ok(HostCounter { _memory: memory, word, address })
    }

    /// The address for kernels. The counter must outlive their launches.
    pub(crate) fn address(&self) -> DeviceAddress<u32> {
        self.address
    }

    /// The count of all complete launches. Launches in progress may be part of it.
    pub(crate) fn get(&self) -> u32 {
        // SAFETY: the word is valid, aligned to a page, and initialised to zero; the GPU writes whole words.
        unsafe { self.word.as_ref() }.load(Ordering::Relaxed)
    }
}
