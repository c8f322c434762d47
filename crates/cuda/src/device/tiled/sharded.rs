//! The draws of a shard and their exchange with other GPUs, in one launch where the kernel supports it.
#![allow(unsafe_code)]

use super::{DeviceTiled, RowsAndDraws};
use crate::abi::{DeviceAddress, Draw, Peers, Row};
use crate::device::{DeviceMatrix, FusedOutput, Queue, RowFeatures};
use crate::error::CudaError;
use crate::exchange::peers::DevicePeers;
use cudarc::driver::CudaStream;

impl DeviceTiled {
    /// Loads the kernels that contain the exchange, for every number of rows of the plan.
    ///
    /// The first [`DeviceTiled::launch_sharded`] then loads no kernel, and can be captured. Ranks that share a GPU
    /// call this before any of them launches.
    ///
    /// # Errors
    /// [`CudaError::Compile`], [`CudaError::Driver`].
    pub fn prepare_fan_out(&mut self) -> Result<(), CudaError> {
        self.prepare_output(&FusedOutput::FanOut(Peers::default()))
    }

    /// Draws from the whole vocabulary, with the same draws on every rank: [`DeviceTiled::launch`], then
    /// [`DevicePeers::launch`].
    ///
    /// Both are one launch if the Hopper kernel draws, no shadow is read, and the rows are not [`RowFeatures::Any`]: the
    /// last block then runs the exchange. Each rank may use one launch or two, independently of the other ranks.
    ///
    /// # Errors
    /// As [`DeviceTiled::launch`] and [`DevicePeers::launch`].
    ///
    /// # Safety
    /// As [`DeviceTiled::launch`] and [`DevicePeers::launch`], on the same device.
    pub unsafe fn launch_sharded(
        &mut self,
        stream: &CudaStream,
        hidden: &DeviceMatrix,
        rows: DeviceAddress<Row>,
        draws: DeviceAddress<Draw>,
        features: RowFeatures,
        peers: &mut DevicePeers,
    ) -> Result<(), CudaError> {
        // SAFETY: the bullets of this function and of `new`; the exchange follows the draws on one stream.
        let queue = unsafe { Queue::new(stream) };
        self.enqueue_sharded(queue, hidden, (rows, draws), features, peers)
    }

    /// [`DeviceTiled::launch_sharded`].
    pub(crate) fn enqueue_sharded(
        &mut self,
        queue: Queue<'_>,
        hidden: &DeviceMatrix,
        rows: RowsAndDraws,
        features: RowFeatures,
        peers: &mut DevicePeers,
    ) -> Result<(), CudaError> {
        // A step fails before any of its launches.
        let call = peers.call(rows.0, rows.1, hidden.rows)?;
        if features != RowFeatures::Any
            && self.is_hopper(hidden)
            && !self.uses_shadow(hidden)
            && self.head.weight.rows > 0
        {
            return self.launch_any(queue, hidden, rows, FusedOutput::FanOut(call)).map(drop);
        }
        self.enqueue(queue, hidden, rows, features)?;
        peers.enqueue(queue, rows, hidden.rows)
    }
}
