//! The draws with min-p or top-k first from logits in device memory, after the draws without filters: its kernel and its
//! launch.
#![allow(unsafe_code)]

use crate::abi::SelectRows;
use crate::compile::kernels::{self, Instance, KernelSource};
use crate::device::gpu::Device;
use crate::device::launch::argument;
use crate::device::launch_config::ConfiguredKernel;
use crate::error::CudaError;
use cudarc::driver::CudaStream;

pub(crate) static SOURCE: KernelSource =
    KernelSource { file: "select_row.cu", serves: kernels::any, instances: || vec![instance()] };

/// Its functions that are called seldom are calls, which keep registers in memory.
fn instance() -> Instance {
    Instance::new(&[]).cold()
}

/// The kernel in a device.
#[derive(Debug)]
pub(crate) struct SelectRow(ConfiguredKernel);

impl SelectRow {
    /// Compiled and loaded at first use.
    pub(crate) fn load(device: &Device) -> Result<Self, CudaError> {
        Ok(SelectRow(ConfiguredKernel::load(device, &SOURCE, &instance(), "select_row")?))
    }

    /// Puts the draws with filters in place of those without, but where top-p comes first.
    ///
    /// # Safety
    /// Every pointer is device memory of this kernel's device, of the sizes that select_rows.cuh states for `draws` draws,
    /// until the stream has passed the launch; no top-k is above [`TOP_K_MAX`](crate::abi::TOP_K_MAX).
    pub(crate) unsafe fn launch(&self, stream: &CudaStream, call: &SelectRows, draws: u32) -> Result<(), CudaError> {
        // SAFETY: the kernel takes a SelectRows by value, whose layout abi asserts; the rest is the caller's.
        unsafe { self.0.launch(stream, draws, [argument(call)]) }
    }
}
