//! The logits of all shards in the memory of every rank, for calls that do not wait.
//!
//! `kernels/include/flash_sampling/exchange/gather.cuh` has the steps of an exchange.

use super::descriptor::PeerDescriptor;
use super::mailbox::{Mailbox, MappedMailbox};
use super::{DevicePeers, SOURCE, THREADS};
use crate::abi::{self, DeviceAddress, GatherLogits};
use crate::device::{Grid, Kernel, Queue, RowsAndDraws, entries};
use crate::error::CudaError;
use core::ops::Range;
use flash_sampling_core::DType;
use std::sync::Arc;

/// Threads of a block of `gather_logits`, and the tokens of a block.
const GATHER_THREADS: u32 = 256;
const GATHER_TOKENS: u32 = 8 * GATHER_THREADS;

/// A rank's matrix for the logits of all shards, `[rows, vocab]` in float32, not yet connected to the other ranks.
#[derive(Debug)]
pub(crate) struct LogitMatrix {
    descriptor: PeerDescriptor,
    memory: Arc<Mailbox>,
    rows: usize,
    vocab_size: u32,
    gather: Kernel<(GatherLogits,)>,
    join: Kernel<(abi::Peers, DeviceAddress<u32>)>,
}

impl LogitMatrix {
    /// The bytes that the other ranks need in order to connect, as [`PeerEndpoint::descriptor`](super::PeerEndpoint).
    pub(crate) fn descriptor(&self) -> Vec<u8> {
        self.memory.set_shared(self.descriptor.world > 1);
        self.descriptor.encode()
    }
}

/// The matrices of all ranks.
#[derive(Debug)]
pub(super) struct GatheredLogits {
    call: GatherLogits,
    matrix: LogitMatrix,
    /// Keeps the matrices open, since the kernel has their addresses.
    _opened: Vec<MappedMailbox>,
}

/// This rank's matrix.
#[derive(Clone, Copy, Debug)]
pub(crate) struct GatheredRows {
    pub(crate) logits: DeviceAddress<f32>,
    pub(crate) rows: usize,
    pub(crate) vocab_size: u32,
}

impl GatheredRows {
    /// The number of elements from one row to the next: a multiple of 8.
    pub(crate) fn row_stride(&self) -> usize {
        self.vocab_size.next_multiple_of(8) as usize
    }
}

impl DevicePeers {
    /// Allocates a matrix for up to `rows` rows of `vocab_size` logits, and loads the kernels. Every rank then sends its
    /// descriptor to the other ranks, and calls [`DevicePeers::connect_logits`].
    ///
    /// # Errors
    /// [`CudaError::Driver`], [`CudaError::Compile`].
    pub(crate) fn offer_logits(&self, rows: usize, vocab_size: u32) -> Result<LogitMatrix, CudaError> {
        let row_stride = vocab_size.next_multiple_of(8) as usize;
        // The fused kernel stores a multiple of eight rows.
        let memory = Mailbox::of_bytes(DType::F32.block_bytes() * row_stride * rows.next_multiple_of(8), &self.device)?;
        let descriptor = PeerDescriptor {
            process: PeerDescriptor::this_process(),
            mailbox: memory.id(),
            rank: self.call.rank,
            world: self.call.world,
            max_rows: rows as u64,
            vocab_size: u64::from(vocab_size),
            handle: memory.handle(),
        };
        let instance = SOURCE.instance();
        let gather = self.device.function(&SOURCE, &instance, &entries::GATHER_LOGITS)?;
        let join = self.device.function(&SOURCE, &instance, &entries::JOIN_LOGITS)?;
        Ok(LogitMatrix { descriptor, memory, rows, vocab_size, gather, join })
    }

    /// Opens the matrices of all ranks; `descriptors[r]` is the descriptor of rank `r`, this rank included. Replaces
    /// earlier matrices, so no launch may be pending.
    ///
    /// # Errors
    /// [`CudaError::Rank`], as [`PeerEndpoint::connect`](super::PeerEndpoint::connect).
    pub(crate) fn connect_logits(&mut self, matrix: LogitMatrix, descriptors: &[Vec<u8>]) -> Result<(), CudaError> {
        let LogitMatrix { descriptor, memory, .. } = &matrix;
        let (opened, addresses) = MappedMailbox::all(descriptor, descriptors, memory, &self.device)?;
        let call = GatherLogits {
            matrices: addresses.map(DeviceAddress::cast),
            state: self.call.state,
            row_stride: u64::from(matrix.vocab_size.next_multiple_of(8)),
            first_token: 0,
            tokens: 0,
            rank: self.call.rank,
            world: self.call.world,
        };
        self.gathered = Some(GatheredLogits { call, matrix, _opened: opened });
        Ok(())
    }

    /// This rank's matrix, once connected.
    pub(crate) fn gathered(&self) -> Option<GatheredRows> {
        let &LogitMatrix { ref memory, rows, vocab_size, .. } = &self.gathered.as_ref()?.matrix;
        Some(GatheredRows { logits: memory.address().cast(), rows, vocab_size })
    }

    /// Enqueues the exchange of draws and the gathering of logits, after the launch that draws from the shard and stores
    /// its logits in this rank's matrix.
    ///
    /// `contents` has the digest of each row's mask, lists and filters.
    pub(crate) fn enqueue_gather(
        &mut self,
        queue: Queue<'_>,
        (rows, draws): RowsAndDraws,
        (count, tokens): (usize, Range<u32>),
        contents: DeviceAddress<u32>,
    ) -> Result<(), CudaError> {
        let call = self.call(rows, draws, count)?;
        let Some(gathered) = &self.gathered else { return Err(NOT_CONNECTED) };
        CudaError::check_limits(&[("rows", count, gathered.matrix.rows)])?;
        if count == 0 {
            return Ok(());
        }
        let blocks = (call.row_count * call.lanes).div_ceil(THREADS);
        queue.launch(&self.kernel, Grid::of(blocks, THREADS), (call,))?;
        if call.world > 1 && !tokens.is_empty() {
            let parts = (tokens.len() as u32).div_ceil(GATHER_TOKENS);
            let grid = Grid { blocks: (parts, call.row_count), ..Grid::of(0, GATHER_THREADS) };
            let copy = GatherLogits { first_token: tokens.start, tokens: tokens.len() as u32, ..gathered.call };
            queue.launch(&gathered.matrix.gather, grid, (copy,))?;
        }
        queue.launch(&gathered.matrix.join, Grid::of(blocks, THREADS), (call, contents))
    }
}

const NOT_CONNECTED: CudaError = CudaError::NotSharded { reason: "the ranks have not prepared to gather logits" };
