//! NVIDIA's all-gather.

use crate::gpu::read::driver;
use core::ffi::{c_int, c_void};
use core::ptr::null_mut;
use cudarc::driver::CudaStream;
use cudarc::nccl::result::{self, NcclError};
use cudarc::nccl::sys;
use flash_sampling::cuda::NcclId;
use flash_sampling_cli::error::CommandError;

/// NCCL's all-gather: every rank's bytes, one rank after the other, on every rank.
#[derive(Debug)]
pub struct Gather {
    comm: sys::ncclComm_t,
}

fn failed(action: &'static str) -> impl Fn(NcclError) -> CommandError {
    move |NcclError(code)| CommandError::usage(format!("NCCL failed to {action}: {code:?}"))
}

impl Gather {
    /// Joins as rank `rank` of `world` on the GPU of `stream`; returns after all ranks of the id have joined.
    ///
    /// # Errors
    /// Errors of the library and the driver.
    pub fn new(id: &NcclId, rank: usize, world: usize, stream: &CudaStream) -> Result<Gather, CommandError> {
        stream.context().bind_to_thread().map_err(driver("bind the context"))?;
        let mut unique = sys::ncclUniqueId { internal: [0; 128] };
        unique.internal.iter_mut().zip(id.as_bytes()).for_each(|(to, &byte)| *to = byte as core::ffi::c_char);
        let mut comm = null_mut();
        // SAFETY: a pointer to write to; the library made the id.
        unsafe { result::comm_init_rank(&raw mut comm, world as c_int, unique, rank as c_int) }
            .map_err(failed("meet"))?;
        Ok(Gather { comm })
    }

    /// Enqueues the gather: `bytes` bytes from the device address `from`, and as many of each rank to `to`.
    ///
    /// # Errors
    /// Errors of the library and the driver.
    ///
    /// # Safety
    /// Both are device memory of this rank's device, of these sizes, until the work has run; every rank makes the same
    /// calls.
    pub unsafe fn launch(&mut self, stream: &CudaStream, from: u64, to: u64, bytes: usize) -> Result<(), CommandError> {
        stream.context().bind_to_thread().map_err(driver("bind the context"))?;
        let (kind, stream) = (sys::ncclDataType_t::ncclUint8, stream.cu_stream().cast());
        // SAFETY: met by the caller; the communicator is alive.
        unsafe { result::all_gather(from as *const c_void, to as *mut c_void, bytes, kind, self.comm, stream) }
            .map(drop)
            .map_err(failed("gather"))
    }
}

impl Drop for Gather {
    fn drop(&mut self) {
        // SAFETY: made by `new`, ended once. Unlike `comm_destroy`, this call does not wait for a missing rank.
        let _ = unsafe { result::comm_abort(self.comm) };
    }
}
