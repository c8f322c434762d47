//! The draws with top-p first from logits in device memory, after the draws without filters: its kernel and its launch.
#![allow(unsafe_code)]

use crate::abi::SelectRows;
use crate::compile::kernels::{self, Instance, KernelSource};
use crate::device::gpu::Device;
use crate::device::launch::{Grid, argument, launch, launch_clusters};
use crate::error::CudaError;
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
/// multiprocessors for, and two at least while there are few draws. At 64 draws two blocks took 51 us over the plain draw,
/// the store counted, and eight 69.
fn blocks_of(tokens: u32, step: u32, draws: u32, multiprocessors: u32) -> u32 {
    let least = if draws <= 4 * multiprocessors { 2 } else { 1 };
    let most = (multiprocessors / draws.max(1)).clamp(least, MAX_BLOCKS).min(tokens / step).max(1);
    1 << most.ilog2()
}

/// The kernel in a device.
#[derive(Debug)]
pub(crate) struct SelectMass {
    function: CudaFunction,
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
        let mut launch = [0u8; 8];
        let stream = device.context().default_stream();
        let global = module.get_global("select_mass_launch", &stream).map_err(&failed)?;
        stream.memcpy_dtoh(&global, &mut launch).map_err(&failed)?;
        stream.synchronize().map_err(&failed)?;
        let [threads, step]: [u32; 2] = bytemuck::cast(launch);
        Ok(SelectMass {
            function,
            threads,
            step,
            has_clusters: device.capability().0 >= 9,
            multiprocessors: device.multiprocessors(),
        })
    }

    /// Puts the draws with filters in place of those without, where top-p comes first.
    ///
    /// # Safety
    /// Every pointer is device memory of this kernel's device, of the sizes that select_rows.cuh states for `draws` draws,
    /// until the stream has passed the launch.
    pub(crate) unsafe fn launch(&self, stream: &CudaStream, call: &SelectRows, draws: u32) -> Result<(), CudaError> {
        if !self.has_clusters {
            // SAFETY: the kernel takes a SelectRows by value, whose layout abi asserts; the rest is the caller's.
            return unsafe { launch(&self.function, stream, Grid::of(draws, self.threads), [argument(call)]) };
        }
        let blocks = blocks_of(call.tokens, self.step, draws, self.multiprocessors);
        // SAFETY: as above.
        unsafe {
            launch_clusters(&self.function, stream, Grid::of(draws * blocks, self.threads), blocks, [argument(call)])
        }
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
        assert_eq!([0, 1, 64, 132, 133, 256, 300, 1000, 1 << 20].map(of), [8, 8, 2, 2, 2, 2, 2, 1, 1]);
    }
}
