//! The exchange of calls that do not wait.

use crate::abi::status;
use crate::device::launch::Queue;
use crate::device::matrix::DeviceMatrix;
use crate::device::row_features::RowFeatures;
use crate::device::tiled::{DeviceTiled, RowsAndDraws};
use crate::error::CudaError;
use crate::exchange::cuda_exchange::{CudaExchange, ExchangeKind};
use cudarc::driver::CudaStream;

/// The kernel of a shard, its hidden states, and the features of the rows; `None` for a shard without tokens.
type ShardLaunch<'s> = Option<(&'s mut DeviceTiled, &'s DeviceMatrix, RowFeatures)>;

impl CudaExchange {
    /// Whether GPUs store into each other's memory.
    pub(crate) fn is_by_peers(&self) -> bool {
        matches!(self.kind, ExchangeKind::Peers(_))
    }

    /// Enqueues the draws of a shard and their exchange, and waits for nothing. A graph can capture the launches.
    pub(crate) fn enqueue(
        &mut self,
        queue: Queue<'_>,
        shard: ShardLaunch<'_>,
        (rows, count): (RowsAndDraws, usize),
        mark: u64,
    ) -> Result<(), CudaError> {
        match &mut self.kind {
            ExchangeKind::Peers(peers) => {
                peers.set_mark(mark);
                match shard {
                    Some((fused, hidden, features)) => fused.enqueue_sharded(queue, hidden, rows, features, peers),
                    None => {
                        draw_nothing(queue, rows, count)?;
                        peers.enqueue(queue, rows, count)
                    }
                }
            }
            #[cfg(feature = "nccl")]
            ExchangeKind::Nccl(nccl) => {
                nccl.set_mark(mark);
                match shard {
                    Some((fused, hidden, features)) => fused.enqueue(queue, hidden, rows, features)?,
                    None => draw_nothing(queue, rows, count)?,
                }
                nccl.enqueue(queue, rows, count)
            }
        }
    }

    /// Waits until the calls on a stream have run.
    ///
    /// A wait for a missing rank ends within the time limit. By peers, the GPU itself ends it, and every row of the call
    /// has the status [`LATE_RANK`](status::LATE_RANK). By NCCL, the GPU waits without limit until this function aborts
    /// the exchange.
    ///
    /// # Errors
    /// [`CudaError::LateRanks`]: ranks missed this call or an earlier call, and the group is unusable. NCCL does not
    /// name the ranks. [`CudaError::Nccl`], [`CudaError::Driver`].
    pub fn wait(&mut self, stream: &CudaStream) -> Result<(), CudaError> {
        match &mut self.kind {
            ExchangeKind::Peers(peers) => {
                stream.synchronize().map_err(CudaError::driver("run the kernels"))?;
                peers.check_late()
            }
            #[cfg(feature = "nccl")]
            ExchangeKind::Nccl(nccl) => nccl.wait(stream),
        }
    }
}

/// Writes the draws of a shard without tokens: their status alone matters to the exchange.
fn draw_nothing(queue: Queue<'_>, (_, draws): RowsAndDraws, count: usize) -> Result<(), CudaError> {
    queue.fill_words(draws, status::NO_FINITE_LOGIT, count)
}
