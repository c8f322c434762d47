//! The launch configuration that a kernel exports, and a kernel loaded with it.
#![allow(unsafe_code)]

use crate::compile::kernels::KernelSource;
use crate::device::gpu::Device;
use crate::device::launch::{Grid, launch};
use crate::error::CudaError;
use core::ffi::c_void;
use cudarc::driver::sys::CUfunction_attribute;
use cudarc::driver::{CudaFunction, CudaModule, CudaStream};
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

/// Raises the limit on dynamic shared memory per block to `bytes`.
pub(crate) fn allow_shared(function: &CudaFunction, bytes: u32) -> Result<(), CudaError> {
    let attribute = CUfunction_attribute::CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES;
    function.set_attribute(attribute, bytes as i32).map_err(CudaError::driver("load a kernel"))
}

/// A kernel in a device, with the dynamic shared memory of a block, in bytes, and its threads, as the constant
/// `NAME_launch` of its source states.
#[derive(Debug)]
pub(crate) struct ConfiguredKernel {
    function: CudaFunction,
    shared_bytes: u32,
    threads: u32,
}

impl ConfiguredKernel {
    /// A kernel of a source with one instance, compiled and loaded at first use.
    pub(crate) fn load(device: &Device, source: &'static KernelSource, name: &str) -> Result<Self, CudaError> {
        let module = device.module(source, &source.instance())?;
        let function = module.load_function(name).map_err(CudaError::driver("load a kernel"))?;
        let [shared_bytes, threads] = launch_words(&module, &format!("{name}_launch"), device)?;
        allow_shared(&function, shared_bytes)?;
        Ok(ConfiguredKernel { function, shared_bytes, threads })
    }

    /// Enqueues it.
    ///
    /// # Safety
    /// As [`launch()`].
    pub(crate) unsafe fn launch<const N: usize>(
        &self,
        stream: &CudaStream,
        blocks: u32,
        arguments: [*mut c_void; N],
    ) -> Result<(), CudaError> {
        let grid = Grid { shared_bytes: self.shared_bytes, ..Grid::of(blocks, self.threads) };
        // SAFETY: the same contract.
        unsafe { launch(&self.function, stream, grid, arguments) }
    }
}
