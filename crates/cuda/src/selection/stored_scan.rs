//! Scans of stored logits for rows with filters.
#![allow(unsafe_code)]

use crate::abi::{ScanSums, ScanTokens, StoredLogits};
use crate::compile::kernels::{self, KernelSource};
use crate::device::gpu::Device;
use crate::device::launch::{Grid, argument, launch};
use crate::error::CudaError;
use cudarc::driver::{CudaFunction, CudaStream};

/// One instance, for every GPU.
pub(crate) static SOURCE: KernelSource = KernelSource::single("stored_scan.cu", kernels::any);

/// Constants of stored_scan.cu with the same names.
const THREADS: u32 = 256;
const TILE: u32 = 128;
const TOKENS: u32 = 4096;
/// Words of an item's sums for its moments.
pub(crate) const MOMENTS: usize = 9;

/// The kernels in a device.
#[derive(Debug)]
pub(crate) struct StoredScanKernels {
    frontiers: CudaFunction,
    tokens_above: CudaFunction,
    prefix_masses: CudaFunction,
    prefix_counts: CudaFunction,
    moments: CudaFunction,
}

/// Blocks of a row for the kernels that take any number.
fn blocks_of(stored: &StoredLogits) -> u32 {
    stored.tokens.div_ceil(TOKENS).max(1)
}

// SAFETY (of all launches): the kernels take these arguments by value, whose layouts abi asserts; the rest is the caller's.
impl StoredScanKernels {
    /// Compiled and loaded at first use.
    pub(crate) fn load(device: &Device) -> Result<Self, CudaError> {
        let function = |name| device.function(&SOURCE, &SOURCE.instance(), name);
        Ok(StoredScanKernels {
            frontiers: function("frontiers")?,
            tokens_above: function("tokens_above")?,
            prefix_masses: function("prefix_masses")?,
            prefix_counts: function("prefix_counts")?,
            moments: function("moments")?,
        })
    }

    /// Keeps tokens that contain the frontier of each of `items` draws.
    ///
    /// # Safety
    /// Every pointer is device memory of the sizes that stored_scan.cu states until the stream has passed the launch.
    pub(crate) unsafe fn frontiers(&self, stream: &CudaStream, call: &ScanTokens, items: u32) -> Result<(), CudaError> {
        let stored = &call.stored;
        let from = stored.first_token / TILE * TILE;
        let blocks = (stored.first_token + stored.tokens - from).div_ceil(TOKENS);
        let grid = Grid { blocks: (blocks, items), threads: THREADS, shared_bytes: 0 };
        // SAFETY: as above.
        unsafe { launch(&self.frontiers, stream, grid, [argument(call)]) }
    }

    /// Keeps the tokens of each of `items` rows with a logit of at least the row's cutoff.
    ///
    /// # Safety
    /// As [`StoredScanKernels::frontiers`].
    pub(crate) unsafe fn tokens_above(
        &self,
        stream: &CudaStream,
        call: &ScanTokens,
        items: u32,
    ) -> Result<(), CudaError> {
        let grid = Grid { blocks: (blocks_of(&call.stored), items), threads: THREADS, shared_bytes: 0 };
        // SAFETY: as above.
        unsafe { launch(&self.tokens_above, stream, grid, [argument(call)]) }
    }

    /// Sums the masses before `queries` logit ranks, a word each.
    ///
    /// # Safety
    /// As [`StoredScanKernels::frontiers`]; the sums are zeros.
    pub(crate) unsafe fn prefix_masses(
        &self,
        stream: &CudaStream,
        call: &ScanSums,
        queries: u32,
    ) -> Result<(), CudaError> {
        let grid = Grid { blocks: (blocks_of(&call.stored), queries), threads: THREADS, shared_bytes: 0 };
        // SAFETY: as above.
        unsafe { launch(&self.prefix_masses, stream, grid, [argument(call)]) }
    }

    /// Counts the tokens before `queries` logit ranks, a word each.
    ///
    /// # Safety
    /// As [`StoredScanKernels::prefix_masses`].
    pub(crate) unsafe fn prefix_counts(
        &self,
        stream: &CudaStream,
        call: &ScanSums,
        queries: u32,
    ) -> Result<(), CudaError> {
        let grid = Grid { blocks: (blocks_of(&call.stored), queries), threads: THREADS, shared_bytes: 0 };
        // SAFETY: as above.
        unsafe { launch(&self.prefix_counts, stream, grid, [argument(call)]) }
    }

    /// Sums the moments of `queries` rows, [`MOMENTS`] words each.
    ///
    /// # Safety
    /// As [`StoredScanKernels::prefix_masses`].
    pub(crate) unsafe fn moments(&self, stream: &CudaStream, call: &ScanSums, queries: u32) -> Result<(), CudaError> {
        let grid = Grid { blocks: (blocks_of(&call.stored), queries), threads: THREADS, shared_bytes: 0 };
        // SAFETY: as above.
        unsafe { launch(&self.moments, stream, grid, [argument(call)]) }
    }
}
