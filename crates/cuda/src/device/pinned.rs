//! Page-locked host memory on the way to a GPU or from it.
#![allow(unsafe_code)]

use crate::abi::DeviceAddress;
use crate::device::launch::Queue;
use crate::error::CudaError;
use core::ptr::NonNull;
use cudarc::driver::{CudaContext, CudaStream, HostSlice, PinnedHostSlice, result};
use std::sync::Arc;

/// Page-locked bytes, which the GPU reads and writes by itself; other memory the driver copies once more, on the caller's
/// thread.
#[derive(Debug)]
pub(crate) struct Pinned {
    memory: PinnedHostSlice<u8>,
    /// Where it is: asking the memory waits for its event, each time by a call of the driver.
    address: NonNull<u8>,
    /// Copies may be pending.
    is_pending: bool,
}

// SAFETY: the address is that of `memory`, which any thread may use; it is used through this value alone.
unsafe impl Send for Pinned {}
// SAFETY: as above; a shared value gives no access to it.
unsafe impl Sync for Pinned {}

/// Page-locked memory of zeros.
pub(crate) fn page_locked(size: usize, context: &Arc<CudaContext>) -> Result<PinnedHostSlice<u8>, CudaError> {
    let failed = CudaError::driver("allocate page-locked memory");
    // SAFETY: it is filled before it is read; reads by the processor rule out write-combined memory.
    let mut memory = unsafe { context.alloc_pinned_with_flags::<u8>(size, 0) }.map_err(&failed)?;
    let address = memory.as_mut_ptr().map_err(&failed)?;
    // SAFETY: as many bytes as were allocated.
    unsafe { address.write_bytes(0, size) };
    Ok(memory)
}

impl Pinned {
    /// `size` bytes of zeros.
    pub(crate) fn new(size: usize, stream: &CudaStream) -> Result<Self, CudaError> {
        let mut memory = page_locked(size, stream.context())?;
        let address = memory.as_mut_ptr().map_err(CudaError::driver("allocate page-locked memory"))?;
        let address = NonNull::new(address).ok_or(CudaError::Corrupt { what: "an address of page-locked memory" })?;
        Ok(Pinned { memory, address, is_pending: false })
    }

    /// Number of bytes.
    pub(crate) fn len(&self) -> usize {
        self.memory.len()
    }

    /// The bytes. Waits for copies that were enqueued.
    pub(crate) fn bytes(&mut self) -> Result<&mut [u8], CudaError> {
        if self.is_pending {
            self.memory.as_mut_ptr().map_err(CudaError::driver("wait for a copy"))?;
            self.is_pending = false;
        }
        // SAFETY: as many bytes as were allocated and written at first; no copy is pending, and this value is borrowed alone.
        Ok(unsafe { core::slice::from_raw_parts_mut(self.address.as_ptr(), self.memory.len()) })
    }

    /// Enqueues a copy of the first `size` bytes to device memory.
    pub(crate) fn copy_up(&mut self, to: DeviceAddress<u8>, size: usize, queue: Queue<'_>) -> Result<(), CudaError> {
        let stream = queue.stream();
        let failed = CudaError::driver("copy inputs to the GPU");
        stream.context().bind_to_thread().map_err(&failed)?;
        self.is_pending = true;
        // SAFETY: *Memory* of the queue; `bytes` waits for the event that the guard records behind the copy, and so does freeing.
        unsafe {
            let (bytes, _until_copied) = self.memory.stream_synced_slice(stream);
            result::memcpy_htod_async(to.get(), &bytes[..size], stream.cu_stream())
        }
        .map_err(failed)
    }

    /// Enqueues a copy of `size` bytes of device memory to the bytes from `at` on.
    pub(crate) fn copy_down<T>(
        &mut self,
        from: DeviceAddress<T>,
        at: usize,
        size: usize,
        queue: Queue<'_>,
    ) -> Result<(), CudaError> {
        let stream = queue.stream();
        let failed = CudaError::driver("copy results from the GPU");
        stream.context().bind_to_thread().map_err(&failed)?;
        self.is_pending = true;
        // SAFETY: as in `copy_up`.
        unsafe {
            let (bytes, _until_copied) = self.memory.stream_synced_mut_slice(stream);
            result::memcpy_dtoh_async(&mut bytes[at..at + size], from.get(), stream.cu_stream())
        }
        .map_err(failed)
    }
}
