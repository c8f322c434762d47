//! NVIDIA's all-gather.
#![allow(unsafe_code)]

use crate::device::gpu::Device;
use crate::device::nccl::{NcclId, failed, is_present};
use crate::error::CudaError;
use core::ffi::{c_int, c_void};
use cudarc::driver::CudaStream;
use cudarc::nccl::{result, sys};
use std::sync::Arc;

/// NCCL's all-gather: every rank's bytes, one rank after the other, on every rank.
#[derive(Debug)]
pub struct Gather {
    comm: sys::ncclComm_t,
    device: Arc<Device>,
}

// SAFETY: the library takes calls for a communicator from any thread, one at a time, which `&mut self` ensures.
unsafe impl Send for Gather {}

impl Gather {
    /// Rank `rank` of `world`; returns when all ranks of the id have called it.
    ///
    /// # Errors
    /// [`CudaError::Unavailable`] without the library, [`CudaError::Nccl`], [`CudaError::Driver`].
    pub fn new(id: &NcclId, rank: usize, world: usize, device: &Arc<Device>) -> Result<Gather, CudaError> {
        if !is_present() {
            return Err(CudaError::unavailable("the library libnccl cannot be loaded"));
        }
        device.context().bind_to_thread().map_err(CudaError::driver("bind the context"))?;
        let mut comm = core::ptr::null_mut();
        // SAFETY: a place for the communicator; the context of its device is bound.
        unsafe { result::comm_init_rank(&raw mut comm, world as c_int, id.raw(), rank as c_int) }
            .map_err(failed("meet the other ranks"))?;
        Ok(Gather { comm, device: device.clone() })
    }

    /// Enqueues it: `bytes` from the device address `from`, as many for each rank from `to` on.
    ///
    /// # Errors
    /// [`CudaError::Nccl`], [`CudaError::Driver`].
    ///
    /// # Safety
    /// Both are device memory of this rank's device, of these sizes, until the work has run; every rank makes the same
    /// calls.
    pub unsafe fn launch(&mut self, stream: &CudaStream, from: u64, to: u64, bytes: usize) -> Result<(), CudaError> {
        stream.context().bind_to_thread().map_err(CudaError::driver("bind the context"))?;
        let (kind, stream) = (sys::ncclDataType_t::ncclUint8, stream.cu_stream().cast());
        // SAFETY: the caller's; the communicator is alive.
        unsafe { result::all_gather(from as *const c_void, to as *mut c_void, bytes, kind, self.comm, stream) }
            .map(drop)
            .map_err(failed("gather"))
    }
}

impl Drop for Gather {
    fn drop(&mut self) {
        if self.device.context().bind_to_thread().is_ok() && self.device.context().synchronize().is_ok() {
            // SAFETY: alive, and ended once, with nothing pending.
            let _ = unsafe { result::comm_destroy(self.comm) };
        }
    }
}
