//! When draws leave for the other ranks, and the launch of an exchange.
#![allow(unsafe_code)]

use super::{DevicePeers, SOURCE, instance};
use crate::abi;
use crate::device::address::check_rows;
use crate::device::gpu::Device;
use crate::device::launch::{Grid, argument, launch};
use crate::error::CudaError;
use cudarc::driver::{CudaFunction, CudaStream};

/// Threads of a block: each for a pair of row and rank, or together for a row.
const THREADS: usize = 256;

/// When a shard's draws leave for the other ranks, for [`DeviceTiled::launch_together`](crate::DeviceTiled::launch_together).
/// The draws are the same.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
#[repr(u32)]
pub enum FanOut {
    /// When the shard's launch has ended: the exchange's launch sends them. Ranks may mix this way with the next.
    Launch = 0,
    /// From the last block of the fused kernel, as soon as it knows them: one store a row and rank, as above. It waits for the
    /// other ranks' too, so there is no other launch.
    #[default]
    LastBlock = 1,
    /// From every block of the fused kernel, which sends its own winners (paper Alg. 1, line 11, its tiles being our blocks); the
    /// exchange's launch finds the best of all blocks of all ranks. Every rank does so, or none.
    Blocks = 2,
}

/// The exchange's kernels in a device.
#[derive(Clone, Debug)]
pub(super) struct Kernels {
    peers: CudaFunction,
    blocks: CudaFunction,
}

impl Kernels {
    pub(super) fn load(device: &Device) -> Result<Kernels, CudaError> {
        let load = |name| device.function(&SOURCE, &instance(), name);
        Ok(Kernels { peers: load("join_peers")?, blocks: load("join_blocks")? })
    }
}

impl DevicePeers {
    /// Chooses when draws leave in later launches together with a shard's; [`FanOut::LastBlock`] at first.
    ///
    /// # Errors
    /// [`CudaError::TooLarge`]: [`FanOut::Blocks`], for which no room was planned.
    pub fn set_fan_out(&mut self, fan_out: FanOut) -> Result<(), CudaError> {
        if fan_out == FanOut::Blocks && self.call.blocks == 0 {
            return Err(CudaError::TooLarge { what: "blocks that send", found: 1, limit: 0 });
        }
        self.fan_out = fan_out;
        Ok(())
    }

    /// When draws leave.
    pub fn fan_out(&self) -> FanOut {
        self.fan_out
    }

    /// The arguments of a step's launches; `rows` and `draws` are device addresses.
    ///
    /// # Errors
    /// [`CudaError::TooLarge`]: more rows than planned. [`CudaError::Layout`]: misaligned rows or draws.
    pub(crate) fn call(
        &self,
        rows: u64,
        draws: u64,
        row_count: usize,
        fan_out: FanOut,
    ) -> Result<abi::Peers, CudaError> {
        let limit = self.max_rows();
        if row_count > limit {
            return Err(CudaError::TooLarge { what: "rows", found: row_count, limit });
        }
        check_rows(rows, draws)?;
        Ok(abi::Peers { rows, draws, row_count: row_count as u32, fan_out: fan_out as u32, ..self.call })
    }

    /// Enqueues the exchange's launch of a step, if it has one.
    ///
    /// # Safety
    /// As [`DevicePeers::launch`], for a call of [`DevicePeers::call`]; where a fused kernel is to have sent, its launch with the
    /// same call stands before.
    pub(crate) unsafe fn join(&mut self, stream: &CudaStream, call: &abi::Peers) -> Result<(), CudaError> {
        if call.row_count == 0 {
            return Ok(());
        }
        self.is_pending = true;
        if call.fan_out == FanOut::LastBlock as u32 {
            return Ok(());
        }
        let (kernel, blocks) = match call.fan_out == FanOut::Blocks as u32 {
            true => (&self.kernels.blocks, call.row_count),
            false => (&self.kernels.peers, (call.row_count * call.lanes).div_ceil(THREADS as u32)),
        };
        // SAFETY: the kernels take Peers by value, whose layout abi asserts; mailboxes and state are held by this value
        // and sized for as many rows and ranks; the rest is the caller's.
        unsafe { launch(kernel, stream, Grid::of(blocks, THREADS as u32), [argument(call)]) }
    }
}
