//! The launch configuration that a kernel exports, and a kernel loaded with it.

use crate::compile::{Instance, KernelSource};
use crate::device::{Arguments, Device, Entry, Grid, Kernel, Queue, Residency};
use crate::error::CudaError;
use cudarc::driver::CudaModule;
use std::sync::Arc;

/// Reads the words of a module's exported launch-configuration constant.
pub(crate) fn launch_words<const N: usize>(
    module: &Arc<CudaModule>,
    constant: &str,
    device: &Device,
) -> Result<[u32; N], CudaError> {
    let failed = CudaError::driver("load a kernel");
    let stream = device.context().default_stream();
    let global = module.get_global(constant, &stream).map_err(&failed)?;
    let mut words = [0; N];
    stream.memcpy_dtoh(&global, bytemuck::cast_slice_mut::<u32, u8>(&mut words)).map_err(&failed)?;
    stream.synchronize().map_err(&failed)?;
    Ok(words)
}

/// A kernel on a device, with its threads per block and the bytes of dynamic shared memory per block.
///
/// The constant `NAME_launch` of its source states both numbers.
#[derive(Debug)]
pub(crate) struct ConfiguredKernel<A> {
    kernel: Kernel<A>,
    shared_bytes: u32,
    threads: u32,
}

impl<A: Arguments> ConfiguredKernel<A> {
    /// A kernel of a source with one instance, compiled and loaded at first use.
    pub(crate) fn load(device: &Device, source: &'static KernelSource, entry: &Entry<A>) -> Result<Self, CudaError> {
        ConfiguredKernel::load_instance(device, source, &source.instance(), entry)
    }

    /// A kernel of an instance, compiled and loaded at first use.
    pub(crate) fn load_instance(
        device: &Device,
        source: &'static KernelSource,
        instance: &Instance,
        entry: &Entry<A>,
    ) -> Result<Self, CudaError> {
        let module = device.module(source, instance)?;
        let [shared_bytes, threads] = launch_words(&module, &format!("{}_launch", entry.name), device)?;
        let kernel = Kernel::load(&module, entry)?.with_shared(shared_bytes)?;
        Ok(ConfiguredKernel { kernel, shared_bytes, threads })
    }

    pub(crate) fn launch(&self, queue: Queue<'_>, blocks: u32, arguments: A) -> Result<(), CudaError> {
        let grid = Grid { shared_bytes: self.shared_bytes, ..Grid::of(blocks, self.threads) };
        queue.launch(&self.kernel, grid, arguments)
    }

    /// Launches with [`Residency::Early`].
    pub(crate) fn launch_early(&self, queue: Queue<'_>, blocks: u32, arguments: A) -> Result<(), CudaError> {
        let grid = Grid::of(blocks, self.threads);
        let grid = Grid { shared_bytes: self.shared_bytes, residency: Residency::Early, ..grid };
        queue.launch(&self.kernel, grid, arguments)
    }
}
