//! The draws with filters from lists of the largest logits, after the fused kernel: its kernel and its launch.
#![allow(unsafe_code)]

use crate::abi::SelectLists;
use crate::compile::kernels::{self, Instance, KernelSource};
use crate::device::gpu::Device;
use crate::device::launch::argument;
use crate::device::launch_config::ConfiguredKernel;
use crate::error::CudaError;
use cudarc::driver::CudaStream;

pub(crate) static SOURCE: KernelSource =
    KernelSource { file: "select_list.cu", serves: kernels::any, instances: || vec![instance()] };

/// Its functions that are called seldom are calls, which keep registers in memory.
fn instance() -> Instance {
    Instance::new(&[]).cold()
}

/// The kernel in a device.
#[derive(Debug)]
pub(crate) struct SelectList(ConfiguredKernel);

impl SelectList {
    /// Compiled and loaded at first use.
    pub(crate) fn load(device: &Device) -> Result<Self, CudaError> {
        Ok(SelectList(ConfiguredKernel::load(device, &SOURCE, &instance(), "select_list")?))
    }

    /// Puts the draws with filters in place of those without, or says that a row is undecided.
    ///
    /// # Safety
    /// Every pointer is device memory of this kernel's device, of the sizes that select_list.cu states for `draws` rows,
    /// until the stream has passed the launch; no top-k is above [`TOP_K_MAX`](crate::abi::TOP_K_MAX).
    pub(crate) unsafe fn launch(&self, stream: &CudaStream, call: &SelectLists, draws: u32) -> Result<(), CudaError> {
        // SAFETY: the kernel takes a SelectLists by value, whose layout abi asserts; the rest is the caller's.
        unsafe { self.0.launch(stream, draws, [argument(call)]) }
    }
}
