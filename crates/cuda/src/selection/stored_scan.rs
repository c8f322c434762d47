//! Scans of stored logits for rows with filters.

use crate::abi::{ScanSums, ScanTokens, StoredLogits};
use crate::compile::{KernelSource, kernels};
use crate::device::{Device, Entry, Grid, Kernel, Queue, entries};
use crate::error::CudaError;

/// One instance, for all GPUs.
pub(crate) static SOURCE: KernelSource = KernelSource::single("stored_scan.cu", kernels::any);

/// Constants of stored_scan.cu with the same names.
const THREADS: u32 = 256;
const TILE: u32 = 128;
const TOKENS: u32 = 4096;
/// Words of an item's sums for its moments.
pub(crate) const MOMENTS: usize = 9;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Sum {
    /// The mass before a logit rank, one word.
    PrefixMasses,
    /// The number of tokens before a logit rank, one word.
    PrefixCounts,
    /// [`MOMENTS`] words.
    Moments,
}

#[derive(Debug)]
pub(crate) struct StoredScanKernels {
    frontiers: Kernel<(ScanTokens,)>,
    tokens_above: Kernel<(ScanTokens,)>,
    prefix_masses: Kernel<(ScanSums,)>,
    prefix_counts: Kernel<(ScanSums,)>,
    moments: Kernel<(ScanSums,)>,
}

/// Blocks per row, for the kernels that support any number of blocks.
fn blocks_of(stored: &StoredLogits) -> u32 {
    stored.tokens.div_ceil(TOKENS).max(1)
}

impl StoredScanKernels {
    /// The kernels, compiled and loaded at first use.
    pub(crate) fn load(device: &Device) -> Result<Self, CudaError> {
        fn load<A>(device: &Device, entry: &Entry<A>) -> Result<Kernel<A>, CudaError> {
            device.function(&SOURCE, &SOURCE.instance(), entry)
        }
        Ok(StoredScanKernels {
            frontiers: load(device, &entries::FRONTIERS)?,
            tokens_above: load(device, &entries::TOKENS_ABOVE)?,
            prefix_masses: load(device, &entries::PREFIX_MASSES)?,
            prefix_counts: load(device, &entries::PREFIX_COUNTS)?,
            moments: load(device, &entries::MOMENTS)?,
        })
    }

    /// Keeps tokens that contain the frontier of each of `items` draws.
    pub(crate) fn frontiers(&self, queue: Queue<'_>, call: ScanTokens, items: u32) -> Result<(), CudaError> {
        let stored = &call.stored;
        let from = stored.first_token / TILE * TILE;
        let blocks = (stored.first_token + stored.tokens - from).div_ceil(TOKENS);
        let grid = Grid { blocks: (blocks, items), ..Grid::of(0, THREADS) };
        queue.launch(&self.frontiers, grid, (call,))
    }

    /// Keeps the tokens of each of `items` rows with a logit of at least the row's cutoff.
    pub(crate) fn tokens_above(&self, queue: Queue<'_>, call: ScanTokens, items: u32) -> Result<(), CudaError> {
        let grid = Grid { blocks: (blocks_of(&call.stored), items), ..Grid::of(0, THREADS) };
        queue.launch(&self.tokens_above, grid, (call,))
    }

    /// Sums over `queries` rows.
    pub(crate) fn sum(&self, what: Sum, queue: Queue<'_>, call: ScanSums, queries: u32) -> Result<(), CudaError> {
        let grid = Grid { blocks: (blocks_of(&call.stored), queries), ..Grid::of(0, THREADS) };
        let kernel = match what {
            Sum::PrefixMasses => &self.prefix_masses,
            Sum::PrefixCounts => &self.prefix_counts,
            Sum::Moments => &self.moments,
        };
        queue.launch(kernel, grid, (call,))
    }
}
