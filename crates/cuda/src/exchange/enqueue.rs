//! The exchange of calls that do not wait.

use crate::abi::{DeviceAddress, LogitStore, status};
use crate::device::{DeviceMatrix, DeviceTiled, FusedOutput, Queue, RowFeatures, RowsAndDraws};
use crate::error::CudaError;
use crate::exchange::cuda_exchange::{CudaExchange, ExchangeKind};
use crate::exchange::peers::{DevicePeers, GatheredRows, LogitMatrix};
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

    /// The peers, which alone gather logits.
    pub(crate) fn gathering_peers(&mut self) -> Option<&mut DevicePeers> {
        self.peers().map(|(peers, _)| peers)
    }

    /// Keeps this rank's matrix until all ranks [connect](CudaExchange::connect_logits).
    pub(crate) fn offer(&mut self, matrix: LogitMatrix) {
        self.offered = Some(matrix);
    }

    /// This rank's matrix for the logits of all ranks, once all ranks have [connected](CudaExchange::connect_logits).
    pub(crate) fn gathered(&mut self) -> Option<GatheredRows> {
        self.gathering_peers().and_then(|peers| peers.gathered())
    }

    /// Connects the matrices for the logits of all ranks: the end of
    /// [`CudaTiled::offer_logits`](crate::CudaTiled::offer_logits). No call may be pending.
    ///
    /// `messages` has the message of each rank, in the order of ranks.
    ///
    /// # Errors
    /// [`CudaError::Rank`]: a rank sent no message of this version, has another plan, or has memory that this GPU cannot
    /// reach. [`CudaError::NotSharded`]: this rank has offered nothing. [`CudaError::Driver`].
    pub fn connect_logits(&mut self, messages: &[Vec<u8>]) -> Result<(), CudaError> {
        let offered = self.offered.take();
        let peers = self.gathering_peers();
        let (peers, offered) = peers.zip(offered).ok_or(CudaError::NotSharded { reason: "no logits were offered" })?;
        peers.connect_logits(offered, messages)
    }

    /// Enqueues the draws of a shard, their exchange, and the gathering of the raw logits of all shards.
    ///
    /// `contents` has the digest of each row's mask, lists and filters. All ranks have
    /// [connected](CudaExchange::connect_logits).
    pub(crate) fn enqueue_gather(
        &mut self,
        queue: Queue<'_>,
        shard: ShardLaunch<'_>,
        (rows, count): (RowsAndDraws, usize),
        (contents, mark): (DeviceAddress<u32>, u64),
    ) -> Result<(), CudaError> {
        let to = self.gathered().ok_or(CudaError::NotSharded { reason: "the exchange gathers no logits" })?;
        let tokens = match shard {
            Some((fused, hidden, _)) => {
                let (tokens, stride) = (fused.tokens(), to.row_stride() as u64);
                let logits = to.logits.add(tokens.start as usize);
                let store = LogitStore { logits, stride, is_raw: 1, ..LogitStore::default() };
                fused.launch_any(queue, hidden, rows, FusedOutput::MasksPenalties(store))?;
                tokens
            }
            None => {
                draw_nothing(queue, rows, count)?;
                0..0
            }
        };
        let peers = self.gathering_peers().ok_or(CudaError::NotSharded { reason: "the exchange gathers no logits" })?;
        peers.set_mark(mark);
        peers.enqueue_gather(queue, rows, (count, tokens), contents)
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
