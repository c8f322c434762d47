//! Page-locked host memory on the way to a GPU or from it.
#![allow(unsafe_code)]

use crate::error::CudaError;
use cudarc::driver::{CudaStream, HostSlice, PinnedHostSlice, result};

/// Page-locked bytes, which the GPU reads and writes by itself; other memory the driver copies once more, on the caller's
/// thread.
#[derive(Debug)]
pub(crate) struct Pinned(PinnedHostSlice<u8>);

impl Pinned {
    /// `size` bytes of zeros.
    pub(crate) fn new(size: usize, stream: &CudaStream) -> Result<Self, CudaError> {
        let failed = CudaError::driver("allocate page-locked memory");
        // SAFETY: it is filled before it is read; reads by the processor rule out write-combined memory.
        let mut memory = unsafe { stream.context().alloc_pinned_with_flags::<u8>(size, 0) }.map_err(&failed)?;
        // SAFETY: as many bytes as were allocated.
        unsafe { memory.as_mut_ptr().map_err(&failed)?.write_bytes(0, size) };
        Ok(Pinned(memory))
    }

    /// The bytes. Waits for copies that were enqueued.
    pub(crate) fn bytes(&mut self) -> Result<&mut [u8], CudaError> {
        self.0.as_mut_slice().map_err(CudaError::driver("wait for a copy"))
    }

    /// Enqueues a copy of the first `size` bytes to device memory.
    ///
    /// # Safety
    /// There is device memory of `size` bytes at `to`, until the stream has passed the copy.
    pub(crate) unsafe fn copy_up(&mut self, to: u64, size: usize, stream: &CudaStream) -> Result<(), CudaError> {
        let failed = CudaError::driver("copy inputs to the GPU");
        stream.context().bind_to_thread().map_err(&failed)?;
        // SAFETY: the caller's; `bytes` waits for the event that the guard records behind the copy, and so does freeing.
        unsafe {
            let (bytes, _until_copied) = self.0.stream_synced_slice(stream);
            result::memcpy_htod_async(to, &bytes[..size], stream.cu_stream())
        }
        .map_err(failed)
    }

    /// Enqueues a copy of `size` bytes of device memory to the bytes from `at` on.
    ///
    /// # Safety
    /// There is device memory of `size` bytes at `from`, until the stream has passed the copy.
    pub(crate) unsafe fn copy_down(
        &mut self,
        from: u64,
        at: usize,
        size: usize,
        stream: &CudaStream,
    ) -> Result<(), CudaError> {
        let failed = CudaError::driver("copy results from the GPU");
        stream.context().bind_to_thread().map_err(&failed)?;
        // SAFETY: as in `copy_up`.
        unsafe {
            let (bytes, _until_copied) = self.0.stream_synced_mut_slice(stream);
            result::memcpy_dtoh_async(&mut bytes[at..at + size], from, stream.cu_stream())
        }
        .map_err(failed)
    }
}
