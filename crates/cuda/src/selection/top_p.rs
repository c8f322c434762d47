//! Draws with top-p first, from logits in device memory and the draws without filters.
#![allow(unsafe_code)]

use crate::abi::{FilterCall, UndecidedRows};
use crate::compile::kernels::{self, KernelSource};
use crate::device::gpu::Device;
use crate::device::launch::{Grid, argument, launch, launch_clusters, launch_resident};
use crate::device::launch_config::{allow_shared, launch_words};
use crate::error::CudaError;
use cudarc::driver::sys::CUdevice_attribute;
use cudarc::driver::{CudaFunction, CudaStream};

pub(crate) static SOURCE: KernelSource = KernelSource::single_cold("top_p.cu", kernels::any);

/// The most blocks of a draw: the largest portable cluster.
const MAX_BLOCKS: u32 = 8;

/// Returns the number of blocks per draw of `tokens` tokens, of which each block reads `step` at a time. The blocks fill the
/// multiprocessors; a draw has at least two if there is a multiprocessor for each draw.
pub(crate) fn blocks_of(tokens: u32, step: u32, draws: u32, multiprocessors: u32) -> u32 {
    let least = if draws <= multiprocessors { 2 } else { 1 };
    let most = (multiprocessors / draws.max(1)).clamp(least, MAX_BLOCKS).min(tokens / step).max(1);
    1 << most.ilog2()
}

/// The kernels in a device.
#[derive(Debug)]
pub(crate) struct TopP {
    function: CudaFunction,
    by_maxima: CudaFunction,
    open: CudaFunction,
    open_bytes: u32,
    by_maxima_bytes: u32,
    /// Blocks of `by_maxima` that the device holds at once; 0 without cooperative launches.
    maxima_blocks: u32,
    threads: u32,
    step: u32,
    has_clusters: bool,
    multiprocessors: u32,
}

impl TopP {
    /// Compiled and loaded at first use.
    pub(crate) fn load(device: &Device) -> Result<Self, CudaError> {
        let failed = CudaError::driver("load a kernel");
        let module = device.module(&SOURCE, &SOURCE.instance())?;
        let function = module.load_function("top_p").map_err(&failed)?;
        let by_maxima = module.load_function("top_p_block_max").map_err(&failed)?;
        let open = module.load_function("top_p_resolve").map_err(&failed)?;
        let [threads, step, open_bytes, by_maxima_bytes] = launch_words(&module, "top_p_launch", device)?;
        allow_shared(&open, open_bytes)?;
        allow_shared(&by_maxima, by_maxima_bytes)?;
        let may_wait = CUdevice_attribute::CU_DEVICE_ATTRIBUTE_COOPERATIVE_LAUNCH;
        let may_wait = device.context().attribute(may_wait).map_err(&failed)? != 0;
        let of_one = by_maxima.occupancy_max_active_blocks_per_multiprocessor(threads, by_maxima_bytes as usize, None);
        let of_one = of_one.map_err(&failed)?;
        Ok(TopP {
            function,
            by_maxima,
            open,
            open_bytes,
            by_maxima_bytes,
            maxima_blocks: if may_wait { of_one * device.multiprocessors() } else { 0 },
            threads,
            step,
            has_clusters: device.capability().0 >= 9,
            multiprocessors: device.multiprocessors(),
        })
    }

    /// Whether calls may have block maxima.
    pub(crate) fn takes_block_maxima(&self) -> bool {
        self.maxima_blocks > 0
    }

    /// Replaces the draws of rows that have top-p first by draws with filters.
    ///
    /// # Safety
    /// * Every pointer is device memory of this kernel's device, of the sizes that filter_call.cuh and undecided_rows.cuh state for
    ///   `draws` draws, until the stream has passed the launches.
    /// * What `open` points to is zeros, or what the launch before left; no other launch uses it at the same time.
    /// * Block maxima only if [`TopP::takes_block_maxima`]; the draws are then `call.count`, at most
    ///   [`UNDECIDED_ROWS_SUMMED`](crate::abi::UNDECIDED_ROWS_SUMMED), of rows with neither masks nor biases, and with top-p alone or
    ///   no filter; the first token is a multiple of 4.
    pub(crate) unsafe fn launch(
        &self,
        stream: &CudaStream,
        call: &FilterCall,
        open: &UndecidedRows,
        draws: u32,
    ) -> Result<(), CudaError> {
        let arguments = [argument(call), argument(open)];
        if call.block_maxima != 0 {
            debug_assert!(self.takes_block_maxima());
            let grid = Grid { shared_bytes: self.by_maxima_bytes, ..Grid::of(self.maxima_blocks, self.threads) };
            // SAFETY: as below.
            return unsafe { launch_resident(&self.by_maxima, stream, grid, arguments) };
        }
        if self.has_clusters {
            let blocks = blocks_of(call.tokens, self.step, draws, self.multiprocessors);
            let grid = Grid::of(draws * blocks, self.threads);
            // SAFETY: the kernels take a FilterCall and an UndecidedRows by value, whose layouts abi asserts; the rest is the
            // caller's.
            unsafe { launch_clusters(&self.function, stream, grid, blocks, arguments) }?;
        } else {
            // SAFETY: as above.
            unsafe { launch(&self.function, stream, Grid::of(draws, self.threads), arguments) }?;
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
    fn a_draw_has_no_more_blocks_than_a_cluster_may() {
        let of = |tokens| blocks_of(tokens, 2048, 1, 132);
        assert_eq!([1, 2047, 2048, 4096, 6143, 8192, 30_011, 151_936, 1 << 30].map(of), [1, 1, 1, 2, 2, 4, 8, 8, 8]);
        let of = |draws| blocks_of(151_936, 4096, draws, 132);
        assert_eq!([0, 1, 16, 33, 64, 132, 133, 256, 1 << 20].map(of), [8, 8, 8, 4, 2, 2, 1, 1, 1]);
    }
}
