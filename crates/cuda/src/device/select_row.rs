//! The draws with min-p or top-k first from logits in device memory, after the draws without filters: its kernel and its
//! launch.
#![allow(unsafe_code)]

use crate::abi::SelectRows;
use crate::compile::kernels::{self, Instance, KernelSource};
use crate::device::gpu::Device;
use crate::device::launch::{Grid, argument, launch};
use crate::error::CudaError;
use cudarc::driver::sys::CUfunction_attribute;
use cudarc::driver::{CudaFunction, CudaStream};

pub(crate) static SOURCE: KernelSource =
    KernelSource { file: "select_row.cu", serves: kernels::any, instances: || vec![instance()] };

/// Its functions that are called seldom are calls, which keep registers in memory.
fn instance() -> Instance {
    Instance::new(&[]).cold()
}

/// The kernel in a device.
#[derive(Debug)]
pub(crate) struct SelectRow {
    function: CudaFunction,
    shared_bytes: u32,
    threads: u32,
}

impl SelectRow {
    /// Compiled and loaded at first use.
    pub(crate) fn load(device: &Device) -> Result<Self, CudaError> {
        let failed = CudaError::driver("load a kernel");
        let module = device.module(&SOURCE, &instance())?;
        let function = module.load_function("select_row").map_err(&failed)?;
        let mut launch = [0u8; 8];
        let stream = device.context().default_stream();
        let global = module.get_global("select_row_launch", &stream).map_err(&failed)?;
        stream.memcpy_dtoh(&global, &mut launch).map_err(&failed)?;
        stream.synchronize().map_err(&failed)?;
        let [shared_bytes, threads]: [u32; 2] = bytemuck::cast(launch);
        let attribute = CUfunction_attribute::CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES;
        function.set_attribute(attribute, shared_bytes as i32).map_err(&failed)?;
        Ok(SelectRow { function, shared_bytes, threads })
    }

    /// Puts the draws with filters in place of those without, but where top-p comes first.
    ///
    /// # Safety
    /// Every pointer is device memory of this kernel's device, of the sizes that select_rows.cuh states for `draws` draws,
    /// until the stream has passed the launch; no top-k is above [`TOP_K_MAX`](crate::abi::TOP_K_MAX).
    pub(crate) unsafe fn launch(&self, stream: &CudaStream, call: &SelectRows, draws: u32) -> Result<(), CudaError> {
        let grid = Grid { shared_bytes: self.shared_bytes, ..Grid::of(draws, self.threads) };
        // SAFETY: the kernel takes a SelectRows by value, whose layout abi asserts; the rest is the caller's.
        unsafe { launch(&self.function, stream, grid, [argument(call)]) }
    }
}
