//! Launches that draw from a shard and then exchange the draws with the other ranks.
#![allow(unsafe_code)]

use super::DeviceTiled;
use crate::abi::Peers;
use crate::device::fused_hopper::FusedOutput;
use crate::device::matrix::DeviceMatrix;
use crate::device::row_features::RowFeatures;
use crate::error::CudaError;
use crate::exchange::peers::DevicePeers;
use cudarc::driver::CudaStream;

impl DeviceTiled {
    /// Loads the kernels that contain the exchange, for every number of rows of the plan.
    ///
    /// The first [`DeviceTiled::launch_together`] then loads no kernel, and can be captured. Ranks that share a GPU
    /// call this before any of them launches.
    ///
    /// # Errors
    /// [`CudaError::Compile`], [`CudaError::Driver`].
    pub fn prepare_fan_out(&mut self) -> Result<(), CudaError> {
        match &mut self.hopper {
            Some(hopper) => hopper.prepare(&FusedOutput::FanOut(Peers::default()), &self.device),
            None => Ok(()),
        }
    }

    /// Draws from the whole vocabulary, with the same draws on every rank: [`DeviceTiled::launch`], then
    /// [`DevicePeers::launch`].
    ///
    /// Both are one launch if the Hopper kernel draws and the rows are not [`RowFeatures::Any`]: the last block makes the
    /// exchange. Each rank may use one launch or two, whatever the other ranks use.
    ///
    /// # Errors
    /// As [`DeviceTiled::launch`] and [`DevicePeers::launch`].
    ///
    /// # Safety
    /// As [`DeviceTiled::launch`] and [`DevicePeers::launch`], on the same device.
    pub unsafe fn launch_together(
        &mut self,
        stream: &CudaStream,
        hidden: &DeviceMatrix,
        rows: u64,
        draws: u64,
        kinds: RowFeatures,
        peers: &mut DevicePeers,
    ) -> Result<(), CudaError> {
        // SAFETY: the same contract; on one stream, the launch of the exchange follows the launch of the draws.
        unsafe {
            if kinds != RowFeatures::Any && self.is_hoppers(hidden) && self.head.weight.rows > 0 {
                let call = peers.call_within(rows, draws, hidden.rows)?;
                return self.launch_any(stream, hidden, rows, draws, FusedOutput::FanOut(call)).map(drop);
            }
            peers.check_call(rows, draws, hidden.rows)?;
            self.launch(stream, hidden, rows, draws, kinds)?;
            peers.launch(stream, rows, draws, hidden.rows)
        }
    }
}
