//! A kernel launch with arguments by value.
#![allow(unsafe_code)]

use crate::error::CudaError;
use core::ffi::c_void;
use cudarc::driver::{CudaFunction, CudaStream, result};

/// The address of a kernel argument; the argument must live until the launch returns.
pub(crate) fn argument<T>(value: &T) -> *mut c_void {
    (&raw const *value).cast_mut().cast()
}

/// Enqueues a kernel without dynamic shared memory.
///
/// # Safety
/// * `arguments` point to values of the types and number that the kernel takes.
/// * What the kernel reads and writes is device memory of its device, of the sizes it states, until the stream has passed
///   the launch.
pub(crate) unsafe fn launch<const N: usize>(
    function: &CudaFunction,
    stream: &CudaStream,
    blocks: (u32, u32),
    threads: u32,
    mut arguments: [*mut c_void; N],
) -> Result<(), CudaError> {
    let failed = CudaError::driver("launch a kernel");
    stream.context().bind_to_thread().map_err(&failed)?;
    let (grid, block) = ((blocks.0, blocks.1, 1), (threads, 1, 1));
    // SAFETY: the caller's.
    unsafe { result::launch_kernel(function.cu_function(), grid, block, 0, stream.cu_stream(), &mut arguments) }
        .map_err(failed)
}
