//! The draws with top-p first from logits in device memory, after the draws without filters: its kernels and their launches.
#![allow(unsafe_code)]

use crate::abi::{OpenRows, SelectRows};
use crate::compile::kernels::{self, Instance, KernelSource};
use crate::device::gpu::Device;
use crate::device::launch::{Grid, argument, launch, launch_clusters, launch_resident};
use crate::device::launch_config::{allow_shared, told};
use crate::error::CudaError;
use cudarc::driver::sys::CUdevice_attribute;
use cudarc::driver::{CudaFunction, CudaStream};

pub(crate) static SOURCE: KernelSource =
    KernelSource { file: "select_mass.cu", serves: kernels::any, instances: || vec![instance()] };

/// Its functions that are called seldom are calls, which keep registers in memory.
fn instance() -> Instance {
    Instance::new(&[]).cold()
}

/// The most blocks of a draw: what a cluster may have on every GPU that has clusters.
const MAX_BLOCKS: u32 = 8;

/// How many blocks share a draw of `tokens` tokens, of which each block takes `step` at a time: as many as there are
/// multiprocessors for, and two at least while there is one for each draw.
pub(crate) fn blocks_of(tokens: u32, step: u32, draws: u32, multiprocessors: u32) -> u32 {
    let least = if draws <= multiprocessors { 2 } else { 1 };
    let most = (multiprocessors / draws.max(1)).clamp(least, MAX_BLOCKS).min(tokens / step).max(1);
    1 << most.ilog2()
}

/// The kernels in a device.
#[derive(Debug)]
pub(crate) struct SelectMass {
    function: CudaFunction,
    by_tops: CudaFunction,
    open: CudaFunction,
    open_bytes: u32,
    tops_bytes: u32,
    /// How many blocks of `by_tops` the device holds; 0 where it may not hold them at the same time.
    tops_blocks: u32,
    threads: u32,
    step: u32,
    has_clusters: bool,
    multiprocessors: u32,
}

impl SelectMass {
    /// Compiled and loaded at first use.
    pub(crate) fn load(device: &Device) -> Result<Self, CudaError> {
        let failed = CudaError::driver("load a kernel");
        let module = device.module(&SOURCE, &instance())?;
        let function = module.load_function("select_mass").map_err(&failed)?;
        let by_tops = module.load_function("select_by_tops").map_err(&failed)?;
        let open = module.load_function("select_open").map_err(&failed)?;
        let [threads, step, open_bytes, tops_bytes] = told(&module, "select_mass_launch", device)?;
        allow_shared(&open, open_bytes)?;
        allow_shared(&by_tops, tops_bytes)?;
        let may_wait = CUdevice_attribute::CU_DEVICE_ATTRIBUTE_COOPERATIVE_LAUNCH;
        let may_wait = device.context().attribute(may_wait).map_err(&failed)? != 0;
        let of_one = by_tops.occupancy_max_active_blocks_per_multiprocessor(threads, tops_bytes as usize, None);
        let of_one = of_one.map_err(&failed)?;
        Ok(SelectMass {
            function,
            by_tops,
            open,
            open_bytes,
            tops_bytes,
            tops_blocks: if may_wait { of_one * device.multiprocessors() } else { 0 },
            threads,
            step,
            has_clusters: device.capability().0 >= 9,
            multiprocessors: device.multiprocessors(),
        })
    }

    /// Whether calls may come with tops.
    pub(crate) fn takes_tops(&self) -> bool {
        self.tops_blocks > 0
    }

    /// Puts the draws with filters in place of those without, where top-p comes first.
    ///
    /// # Safety
    /// * Every pointer is device memory of this kernel's device, of the sizes that select_rows.cuh and open_rows.cuh state for
    ///   `draws` draws, until the stream has passed the launches.
    /// * What `open` points to is zeros, or what the launch before left; no other launch uses it at the same time.
    /// * Tops where [`SelectMass::takes_tops`]; the draws are then `call.count`, at most
    ///   [`OPEN_ROWS_SUMMED`](crate::abi::OPEN_ROWS_SUMMED), of rows with neither masks nor biases, and with top-p alone or
    ///   no filter; the first token is a multiple of 4.
    pub(crate) unsafe fn launch(
        &self,
        stream: &CudaStream,
        call: &SelectRows,
        open: &OpenRows,
        draws: u32,
    ) -> Result<(), CudaError> {
        let arguments = [argument(call), argument(open)];
        if call.tops != 0 {
            debug_assert!(self.takes_tops());
            let grid = Grid { shared_bytes: self.tops_bytes, ..Grid::of(self.tops_blocks, self.threads) };
            // SAFETY: as below.
            return unsafe { launch_resident(&self.by_tops, stream, grid, arguments) };
        }
        if self.has_clusters {
            let blocks = blocks_of(call.tokens, self.step, draws, self.multiprocessors);
            let grid = Grid::of(draws * blocks, self.threads);
            // SAFETY: the kernels take a SelectRows and an OpenRows by value, whose layouts abi asserts; the rest is the
            // caller's.
            unsafe { launch_clusters(&self.function, stream, grid, blocks, arguments) }?;
        } else {
            // SAFETY: as above.
            unsafe { launch(&self.function, stream, Grid::of(draws, self.threads), arguments) }?;
        }
        // Two blocks a multiprocessor, and one a draw at least: each open row has one.
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
