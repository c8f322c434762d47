//! Draws of a shard that leave for the other ranks while the launch ends.
#![allow(unsafe_code)]

use super::DeviceTiled;
use crate::abi::Peers;
use crate::device::choice::RowKinds;
use crate::device::fused_hopper::More;
use crate::device::matrix::DeviceMatrix;
use crate::device::peers::DevicePeers;
use crate::error::CudaError;
use cudarc::driver::CudaStream;

impl DeviceTiled {
    /// Loads the kernels that make the exchange as well, for every number of rows of the plan: the first
    /// [`DeviceTiled::launch_together`] does not then, and can be captured. Before ranks that share a GPU begin.
    ///
    /// # Errors
    /// [`CudaError::Compile`], [`CudaError::Driver`].
    pub fn prepare_fan_out(&mut self) -> Result<(), CudaError> {
        match &mut self.hopper {
            Some(hopper) => hopper.prepare(&More::FanOut(Peers::default()), &self.device),
            None => Ok(()),
        }
    }

    /// The draws of the whole vocabulary, on every rank: [`DeviceTiled::launch`] and [`DevicePeers::launch`], which are one launch
    /// where the Hopper kernel draws and rows are not [`RowKinds::Any`]: its last block makes the exchange. Other ranks may do
    /// so or not.
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
        kinds: RowKinds,
        peers: &mut DevicePeers,
    ) -> Result<(), CudaError> {
        // SAFETY: the same contract; a launch of the exchange follows that of the draws on one stream.
        unsafe {
            if kinds != RowKinds::Any && self.is_hoppers(hidden) && self.head.weight.rows > 0 {
                let call = peers.call_within(rows, draws, hidden.rows)?;
                return self.launch_any(stream, hidden, rows, draws, More::FanOut(call)).map(drop);
            }
            self.launch(stream, hidden, rows, draws, kinds)?;
            peers.launch(stream, rows, draws, hidden.rows)
        }
    }
}
