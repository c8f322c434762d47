//! Draws with top-p alone, from the logits of several ranks and the draws without filters.
#![allow(unsafe_code)]

use crate::abi::{FilterCall, PeerRecords, UndecidedRows};
use crate::compile::kernels::KernelSource;
use crate::device::fused_hopper;
use crate::device::gpu::Device;
use crate::device::launch::{Grid, argument, launch, launch_clusters};
use crate::device::launch_config::{allow_shared, launch_words};
use crate::error::CudaError;
use crate::selection::top_p::blocks_of;
use cudarc::driver::{CudaFunction, CudaStream};

pub(crate) static SOURCE: KernelSource = KernelSource::single_cold("top_p_ranks.cu", fused_hopper::serves);

/// Returns the number of blocks that read the block maxima of `draws` draws: two per multiprocessor, a multiple of the octets
/// of draws, each with at least 64 granules (block_max_sums.cuh).
fn maxima_blocks(tokens: u32, draws: u32, multiprocessors: u32) -> u32 {
    let octets = draws.div_ceil(8).max(1);
    octets * (2 * multiprocessors / octets).min(tokens / (2 * 32 * 16)).max(1)
}

/// The kernels in a device.
#[derive(Debug)]
pub(crate) struct TopPRanks {
    masses: CudaFunction,
    by_maxima: CudaFunction,
    open: CudaFunction,
    open_bytes: u32,
    by_maxima_bytes: u32,
    threads: u32,
    step: u32,
    multiprocessors: u32,
}

impl TopPRanks {
    /// Compiled and loaded at first use.
    pub(crate) fn load(device: &Device) -> Result<Self, CudaError> {
        let failed = CudaError::driver("load a kernel");
        let module = device.module(&SOURCE, &SOURCE.instance())?;
        let masses = module.load_function("top_p_ranks").map_err(&failed)?;
        let by_maxima = module.load_function("top_p_block_max_ranks").map_err(&failed)?;
        let open = module.load_function("top_p_resolve_ranks").map_err(&failed)?;
        let [threads, step, open_bytes, by_maxima_bytes] = launch_words(&module, "top_p_ranks_launch", device)?;
        allow_shared(&open, open_bytes)?;
        allow_shared(&by_maxima, by_maxima_bytes)?;
        let multiprocessors = device.multiprocessors();
        Ok(TopPRanks { masses, by_maxima, open, open_bytes, by_maxima_bytes, threads, step, multiprocessors })
    }

    /// Replaces draws by draws with top-p, by `UNDECIDED`, or by the rank that is late. Blocks wait for other ranks: the last
    /// block of `top_p_block_max_ranks`, at most one block per draw of the other kernels. So the draws of all ranks on one GPU
    /// may be no more than the blocks that it holds at once, two per multiprocessor.
    ///
    /// # Safety
    /// * As [`TopP::launch`](crate::selection::top_p::TopP::launch), for rows with top-p alone or no filters; the
    ///   logits may be written to, lie at multiples of 16 bytes, and the first token is a multiple of 4, with block maxima or without.
    /// * The exchange of the draws of the same rows stands before it on the stream, with the same peers.
    pub(crate) unsafe fn launch(
        &self,
        stream: &CudaStream,
        call: &FilterCall,
        open: &UndecidedRows,
        records: &PeerRecords,
        draws: u32,
    ) -> Result<(), CudaError> {
        let arguments = [argument(call), argument(open), argument(records)];
        // SAFETY (of all): the kernels take a FilterCall, an UndecidedRows and a PeerRecords by value, whose layouts abi asserts; the
        // rest is the caller's.
        if call.block_maxima != 0 {
            let blocks = maxima_blocks(call.tokens, draws, self.multiprocessors);
            let grid = Grid { shared_bytes: self.by_maxima_bytes, ..Grid::of(blocks, self.threads) };
            // SAFETY: see above.
            unsafe { launch(&self.by_maxima, stream, grid, arguments) }?;
        } else {
            let blocks = blocks_of(call.tokens, self.step, draws, self.multiprocessors);
            // SAFETY: see above.
            unsafe {
                launch_clusters(&self.masses, stream, Grid::of(draws * blocks, self.threads), blocks, arguments)
            }?;
        }
        // Two blocks per multiprocessor, and at least one per draw, so that each undecided row has a block.
        let blocks = (2 * self.multiprocessors).max(draws);
        let grid = Grid { shared_bytes: self.open_bytes, ..Grid::of(blocks, self.threads) };
        // SAFETY: as above.
        unsafe { launch(&self.open, stream, grid, arguments) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_octet_of_draws_has_as_many_blocks_for_its_tops() {
        let of = |draws| maxima_blocks(151_936, draws, 132);
        assert_eq!([1, 8, 9, 64, 65, 250, 256].map(of), [148, 148, 264, 264, 261, 256, 256]);
        assert_eq!([1, 1023, 4096].map(|tokens| maxima_blocks(tokens, 17, 132)), [3, 3, 12]);
    }
}
