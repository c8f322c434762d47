//! Page-locked host memory for copies to and from a GPU.
#![allow(unsafe_code)]

use crate::abi::DeviceAddress;
use crate::device::{Queue, wait};
use crate::error::CudaError;
use core::ptr::NonNull;
use cudarc::driver::sys::{CUevent_flags, CUstream};
use cudarc::driver::{CudaContext, CudaEvent, CudaStream, DriverError, PinnedHostSlice, result};
use std::sync::Arc;

/// Page-locked bytes, which the GPU accesses directly. Other memory is copied once more, on the caller's thread.
#[derive(Debug)]
pub(crate) struct Pinned {
    memory: PinnedHostSlice<u8>,
    /// The cached address of `memory`, whose own accessor calls the driver each time.
    address: NonNull<u8>,
    /// Recorded after the last copy. On streams of contexts without event tracking, the memory's own event is not.
    copied: CudaEvent,
    is_pending: bool,
}

// SAFETY: the address is that of `memory`, which any thread may use; only this value uses it.
unsafe impl Send for Pinned {}
// SAFETY: as above; a shared reference gives no access to the memory.
unsafe impl Sync for Pinned {}

/// Allocates page-locked memory of zeros.
pub(crate) fn page_locked(size: usize, context: &Arc<CudaContext>) -> Result<PinnedHostSlice<u8>, CudaError> {
    let failed = CudaError::driver("allocate page-locked memory");
    // SAFETY: the memory is filled before any read. Flags of 0 exclude write-combined memory, which is slow to read.
    let mut memory = unsafe { context.alloc_pinned_with_flags::<u8>(size, 0) }.map_err(&failed)?;
    let address = memory.as_mut_ptr().map_err(&failed)?;
    // SAFETY: exactly the allocated bytes.
    unsafe { address.write_bytes(0, size) };
    Ok(memory)
}

impl Pinned {
    /// Allocates `size` bytes of zeros.
    pub(crate) fn new(size: usize, stream: &CudaStream) -> Result<Self, CudaError> {
        let mut memory = page_locked(size, stream.context())?;
        let address = memory.as_mut_ptr().map_err(CudaError::driver("allocate page-locked memory"))?;
        let address =
            NonNull::new(address).ok_or(CudaError::Corrupt { what: "page-locked memory without an address" })?;
        let copied = stream.context().new_event(Some(CUevent_flags::CU_EVENT_BLOCKING_SYNC));
        let copied = copied.map_err(CudaError::driver("allocate page-locked memory"))?;
        Ok(Pinned { memory, address, copied, is_pending: false })
    }

    pub(crate) fn len(&self) -> usize {
        self.memory.len()
    }

    /// The bytes. Waits for pending copies.
    pub(crate) fn bytes(&mut self) -> Result<&mut [u8], CudaError> {
        if self.is_pending {
            self.copied.synchronize().map_err(CudaError::driver("wait for a copy"))?;
            self.is_pending = false;
        }
        // SAFETY: all bytes were allocated and initialised; no copy is pending, and this value is borrowed exclusively.
        Ok(unsafe { core::slice::from_raw_parts_mut(self.address.as_ptr(), self.memory.len()) })
    }

    /// Enqueues a copy of the first `size` bytes to device memory.
    pub(crate) fn copy_up(&mut self, to: DeviceAddress<u8>, size: usize, queue: Queue<'_>) -> Result<(), CudaError> {
        assert!(size <= self.len(), "a copy of {size} bytes");
        let from = self.address.as_ptr();
        self.copy(queue, "copy inputs to the GPU", |stream| {
            // SAFETY: *Memory* of the queue; `bytes` and dropping wait for the event after the copy.
            unsafe { result::memcpy_htod_async(to.get(), core::slice::from_raw_parts(from, size), stream) }
        })
    }

    /// Enqueues a copy of `size` bytes of device memory to the bytes at offset `at`.
    pub(crate) fn copy_down<T>(
        &mut self,
        from: DeviceAddress<T>,
        at: usize,
        size: usize,
        queue: Queue<'_>,
    ) -> Result<(), CudaError> {
        assert!(at + size <= self.len(), "a copy of {size} bytes to {at}");
        let to = self.address.as_ptr();
        self.copy(queue, "copy results from the GPU", |stream| {
            // SAFETY: as in `copy_up`.
            unsafe {
                let to = core::slice::from_raw_parts_mut(to.add(at), size);
                result::memcpy_dtoh_async(to, from.get(), stream)
            }
        })
    }

    /// Enqueues a copy after earlier copies, and records the event.
    fn copy(
        &mut self,
        queue: Queue<'_>,
        action: &'static str,
        copy: impl FnOnce(CUstream) -> Result<(), DriverError>,
    ) -> Result<(), CudaError> {
        let stream = queue.stream();
        let failed = CudaError::driver(action);
        stream.context().bind_to_thread().map_err(&failed)?;
        if self.is_pending {
            stream.wait(&self.copied).map_err(&failed)?;
        }
        self.is_pending = true;
        copy(stream.cu_stream()).map_err(&failed)?;
        self.copied.record(stream).or_else(|_| stream.synchronize()).map_err(failed)
    }
}

impl Drop for Pinned {
    fn drop(&mut self) {
        if self.is_pending {
            wait(self.memory.context(), || self.copied.synchronize());
        }
    }
}
