//! Draws of a shard that leave for the other ranks while the launch ends.
#![allow(unsafe_code)]

use super::DeviceTiled;
use crate::abi::Peers;
use crate::device::choice::RowKinds;
use crate::device::fused_hopper::More;
use crate::device::matrix::DeviceMatrix;
use crate::device::peers::{DevicePeers, FanOut};
use crate::error::CudaError;
use cudarc::driver::CudaStream;

impl DeviceTiled {
    /// Loads the kernels that [`FanOut::LastBlock`] and [`FanOut::Blocks`] take, for every number of rows of the plan: the first
    /// launch of them does not then, and can be captured. Before ranks that share a GPU begin. [`FanOut::Launch`] takes the
    /// planned ones.
    ///
    /// # Errors
    /// [`CudaError::Compile`], [`CudaError::Driver`].
    pub fn prepare_fan_out(&mut self) -> Result<(), CudaError> {
        match &mut self.hopper {
            Some(hopper) => hopper.prepare(&More::FanOut(Peers::default()), &self.device),
            None => Ok(()),
        }
    }

    /// The draws of the whole vocabulary, on every rank: [`DeviceTiled::launch`] and [`DevicePeers::launch`], with the draws leaving
    /// when [`DevicePeers::set_fan_out`] says. [`FanOut::LastBlock`] is for what the Hopper kernel takes of rows that are not
    /// [`RowKinds::Any`]; others leave by [`FanOut::Launch`] in its place.
    ///
    /// # Errors
    /// * As [`DeviceTiled::launch`] and [`DevicePeers::launch`].
    /// * [`CudaError::Rank`], naming this rank: [`FanOut::Blocks`] where the Hopper kernel does not draw.
    ///
    /// # Safety
    /// As [`DeviceTiled::launch`] and [`DevicePeers::launch`], on the same device. For [`FanOut::Blocks`] every rank has tokens
    /// and makes the same choice.
    pub unsafe fn launch_together(
        &mut self,
        stream: &CudaStream,
        hidden: &DeviceMatrix,
        rows: u64,
        draws: u64,
        kinds: RowKinds,
        peers: &mut DevicePeers,
    ) -> Result<(), CudaError> {
        let fan_out = peers.fan_out();
        let is_early = kinds != RowKinds::Any && self.is_hoppers(hidden) && self.head.weight.rows > 0;
        if fan_out == FanOut::Blocks && !is_early {
            let what = "cannot send by blocks: these rows take another kernel".into();
            return Err(CudaError::Rank { rank: peers.rank(), what });
        }
        let fan_out = if is_early { fan_out } else { FanOut::Launch };
        let call = peers.call(rows, draws, hidden.rows, fan_out)?;
        // SAFETY: the same contract; the launches of the exchange follow those of the draws on one stream.
        unsafe {
            match fan_out {
                FanOut::Launch => self.launch(stream, hidden, rows, draws, kinds)?,
                _ => self.launch_any(stream, hidden, rows, draws, More::FanOut(call)).map(drop)?,
            }
            peers.join(stream, &call)
        }
    }
}
