//! Draws with top-p first, from logits in device memory and the draws without filters, on one GPU or on several ranks.

use crate::abi::{FilterCall, PeerRecords, UndecidedRows};
use crate::compile::{KernelSource, kernels};
use crate::device::{Arguments, Device, Entry, Grid, Kernel, Queue, Residency, entries, fused_hopper, launch_words};
use crate::error::CudaError;
use cudarc::driver::CudaModule;
use cudarc::driver::sys::CUdevice_attribute;
use std::sync::Arc;

pub(crate) static SOURCE: KernelSource = KernelSource::single_cold("top_p.cu", kernels::any);
pub(crate) static RANKS: KernelSource = KernelSource::single_cold("top_p_ranks.cu", fused_hopper::serves);

/// The maximum number of blocks per draw: the largest portable cluster.
const MAX_BLOCKS: u32 = 8;

/// Returns the number of blocks per draw of `tokens` tokens. A block reads `step` tokens at a time. The blocks fill the
/// multiprocessors; a draw has at least two if there is a multiprocessor for each draw.
fn blocks_of(tokens: u32, step: u32, draws: u32, multiprocessors: u32) -> u32 {
    let least = if draws <= multiprocessors { 2 } else { 1 };
    let most = (multiprocessors / draws.max(1)).clamp(least, MAX_BLOCKS).min(tokens / step).max(1);
    1 << most.ilog2()
}

/// Returns the number of blocks that read the block maxima of `draws` draws: two per multiprocessor, a multiple of the
/// groups of eight draws, each with at least 64 granules (block_max_sums.cuh).
fn maxima_blocks(tokens: u32, draws: u32, multiprocessors: u32) -> u32 {
    let octets = draws.div_ceil(8).max(1);
    octets * (2 * multiprocessors / octets).min(tokens / (2 * 32 * 16)).max(1)
}

/// The arguments of the kernels of one GPU, and of ranks.
pub(crate) type OneGpu = (FilterCall, UndecidedRows);
pub(crate) type Ranks = (FilterCall, UndecidedRows, PeerRecords);

/// The kernels on a device: `masses` sums masses, `by_maxima` selects few logits by block maxima, and `resolve` draws
/// for the rows that either leaves undecided.
#[derive(Debug)]
pub(crate) struct TopP<A> {
    masses: Kernel<A>,
    by_maxima: Kernel<A>,
    resolve: Kernel<A>,
    resolve_bytes: u32,
    by_maxima_bytes: u32,
    /// The number of resident blocks of `by_maxima`, which decide all rows; 0 without cooperative launches. `None` for
    /// ranks: `resolve` draws for their undecided rows.
    resident_blocks: Option<u32>,
    threads: u32,
    step: u32,
    has_clusters: bool,
    multiprocessors: u32,
}

impl TopP<OneGpu> {
    /// The kernels of one GPU, compiled and loaded at first use.
    pub(crate) fn load(device: &Device) -> Result<Self, CudaError> {
        let module = device.module(&SOURCE, &SOURCE.instance())?;
        let entries = [&entries::TOP_P, &entries::TOP_P_BLOCK_MAX, &entries::TOP_P_RESOLVE];
        let mut kernels = TopP::of(&module, entries, "top_p_launch", device)?;
        let may_wait = CUdevice_attribute::CU_DEVICE_ATTRIBUTE_COOPERATIVE_LAUNCH;
        let may_wait = device.context().attribute(may_wait).map_err(CudaError::driver("load a kernel"))? != 0;
        let of_one = kernels.by_maxima.blocks_per_multiprocessor(kernels.threads, kernels.by_maxima_bytes)?;
        kernels.resident_blocks = Some(if may_wait { of_one * device.multiprocessors() } else { 0 });
        Ok(kernels)
    }

    /// Whether calls may have block maxima.
    ///
    /// Such a call has `call.count` draws, at most [`UNDECIDED_ROWS_SUMMED`](crate::abi::UNDECIDED_ROWS_SUMMED). Its
    /// rows have no masks and no biases, and rows with top-p first have top-p alone. Its first token is a multiple of 4.
    pub(crate) fn supports_block_maxima(&self) -> bool {
        self.resident_blocks > Some(0)
    }
}

impl TopP<Ranks> {
    /// The kernels of ranks, compiled and loaded at first use.
    ///
    /// Blocks wait for other ranks: the last block of `top_p_block_max_ranks`, and at most one block per draw in the
    /// other kernels. So the draws of all ranks on one GPU must not exceed its resident blocks, two per multiprocessor.
    ///
    /// Rows have top-p alone or no filters. The logits are writable at multiples of 16 bytes, and the first token is a
    /// multiple of 4, with or without block maxima. The exchange of the same rows' draws, with the same peers, precedes
    /// a launch on the stream. A draw may report the late rank.
    pub(crate) fn load(device: &Device) -> Result<Self, CudaError> {
        let module = device.module(&RANKS, &RANKS.instance())?;
        let entries = [&entries::TOP_P_RANKS, &entries::TOP_P_BLOCK_MAX_RANKS, &entries::TOP_P_RESOLVE_RANKS];
        TopP::of(&module, entries, "top_p_ranks_launch", device)
    }
}

impl<A: Arguments + Copy> TopP<A> {
    fn of(
        module: &Arc<CudaModule>,
        [masses, by_maxima, resolve]: [&Entry<A>; 3],
        launch: &str,
        device: &Device,
    ) -> Result<Self, CudaError> {
        let [threads, step, resolve_bytes, by_maxima_bytes] = launch_words(module, launch, device)?;
        Ok(TopP {
            masses: Kernel::load(module, masses)?,
            by_maxima: Kernel::load(module, by_maxima)?.with_shared(by_maxima_bytes)?,
            resolve: Kernel::load(module, resolve)?.with_shared(resolve_bytes)?,
            resolve_bytes,
            by_maxima_bytes,
            resident_blocks: None,
            threads,
            step,
            has_clusters: device.capability().0 >= 9,
            multiprocessors: device.multiprocessors(),
        })
    }

    /// Replaces the draws of rows with top-p first by draws with filters. On ranks, some draws are `UNDECIDED`.
    ///
    /// `arguments` has `call`. The memory for undecided rows has zeros, or the content after the last launch.
    pub(crate) fn launch(
        &self,
        queue: Queue<'_>,
        call: &FilterCall,
        arguments: A,
        draws: u32,
    ) -> Result<(), CudaError> {
        if !call.block_maxima.is_null() {
            let blocks = maxima_blocks(call.tokens, draws, self.multiprocessors);
            let grid = Grid::of(self.resident_blocks.unwrap_or(blocks), self.threads);
            let residency = if self.resident_blocks.is_some() { Residency::All } else { Residency::Free };
            let grid = Grid { shared_bytes: self.by_maxima_bytes, residency, ..grid };
            queue.launch(&self.by_maxima, grid, arguments)?;
            if self.resident_blocks.is_some() {
                return Ok(());
            }
        } else if self.has_clusters {
            let blocks = blocks_of(call.tokens, self.step, draws, self.multiprocessors);
            let grid = Grid { residency: Residency::Clusters(blocks), ..Grid::of(draws * blocks, self.threads) };
            queue.launch(&self.masses, grid, arguments)?;
        } else {
            queue.launch(&self.masses, Grid::of(draws, self.threads), arguments)?;
        }
        // Two blocks per multiprocessor, and at least one per draw, so that each undecided row has a block.
        let blocks = (2 * self.multiprocessors).max(draws);
        let grid = Grid { shared_bytes: self.resolve_bytes, ..Grid::of(blocks, self.threads) };
        queue.launch(&self.resolve, grid, arguments)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_draw_has_no_more_blocks_than_a_cluster_may() {
        let of = |tokens| blocks_of(tokens, 2048, 1, 132);
        assert_eq!([1, 2047, 2048, 4096, 6143, 8192, 30_011, 151_936, 1 << 30].map(of), [1, 1, 1, 2, 2, 4, 8, 8, 8]);
        let of = |draws| blocks_of(151_936, 4096, draws, 132);
        assert_eq!([0, 1, 16, 33, 64, 132, 133, 256, 1 << 20].map(of), [8, 8, 8, 4, 2, 2, 1, 1, 1]);
    }

    #[test]
    fn every_octet_of_draws_has_as_many_blocks_for_its_tops() {
        let of = |draws| maxima_blocks(151_936, draws, 132);
        assert_eq!([1, 8, 9, 64, 65, 250, 256].map(of), [148, 148, 264, 264, 261, 256, 256]);
        assert_eq!([1, 1023, 4096].map(|tokens| maxima_blocks(tokens, 17, 132)), [3, 3, 12]);
    }
}
