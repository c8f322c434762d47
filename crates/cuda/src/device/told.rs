//! Kernels that tell the host what their launch takes.
#![allow(unsafe_code)]

use crate::compile::kernels::{Instance, KernelSource};
use crate::device::gpu::Device;
use crate::device::launch::{Grid, launch};
use crate::error::CudaError;
use core::ffi::c_void;
use cudarc::driver::sys::CUfunction_attribute;
use cudarc::driver::{CudaFunction, CudaStream};

/// A kernel in a device, with the dynamic shared memory of a block, in bytes, and its threads: what the constant
/// `NAME_launch` of its source says.
#[derive(Debug)]
pub(crate) struct ToldKernel {
    function: CudaFunction,
    shared_bytes: u32,
    threads: u32,
}

impl ToldKernel {
    /// Compiled and loaded at first use.
    pub(crate) fn load(
        device: &Device,
        source: &'static KernelSource,
        instance: &Instance,
        name: &str,
    ) -> Result<Self, CudaError> {
        let failed = CudaError::driver("load a kernel");
        let module = device.module(source, instance)?;
        let function = module.load_function(name).map_err(&failed)?;
        let mut launch = [0u8; 8];
        let stream = device.context().default_stream();
        let global = module.get_global(&format!("{name}_launch"), &stream).map_err(&failed)?;
        stream.memcpy_dtoh(&global, &mut launch).map_err(&failed)?;
        stream.synchronize().map_err(&failed)?;
        let [shared_bytes, threads]: [u32; 2] = bytemuck::cast(launch);
        let attribute = CUfunction_attribute::CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES;
        function.set_attribute(attribute, shared_bytes as i32).map_err(&failed)?;
        Ok(ToldKernel { function, shared_bytes, threads })
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
