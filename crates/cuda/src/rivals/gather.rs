//! NVIDIA's all-gather.
#![allow(unsafe_code)]

use crate::device::gpu::Device;
use crate::device::nccl::communicator::Communicator;
use crate::device::nccl::{NcclId, failed};
use crate::error::CudaError;
use core::ffi::c_void;
use core::time::Duration;
use cudarc::driver::CudaStream;
use cudarc::nccl::{result, sys};
use std::sync::Arc;

/// NCCL's all-gather: every rank's bytes, one rank after the other, on every rank.
#[derive(Debug)]
pub struct Gather {
    comm: Communicator,
}

impl Gather {
    /// Rank `rank` of `world`; returns when all ranks of the id have called it, or the longer of `limit` and a minute has
    /// passed.
    ///
    /// # Errors
    /// [`CudaError::Unavailable`] without the library, [`CudaError::LateRanks`], [`CudaError::Nccl`],
    /// [`CudaError::Driver`].
    pub fn new(
        id: &NcclId,
        rank: usize,
        world: usize,
        device: &Arc<Device>,
        limit: Duration,
    ) -> Result<Gather, CudaError> {
        Communicator::meet(id, rank, world, device, limit).map(|comm| Gather { comm })
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
        let comm = self.comm.raw()?;
        let (kind, stream) = (sys::ncclDataType_t::ncclUint8, stream.cu_stream().cast());
        // SAFETY: the caller's; the communicator is alive.
        unsafe { result::all_gather(from as *const c_void, to as *mut c_void, bytes, kind, comm, stream) }
            .map(drop)
            .map_err(failed("gather"))
    }
}
