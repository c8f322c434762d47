//! Draws with min-p or top-k first, from logits in device memory.
#![allow(unsafe_code)]

use crate::abi::FilterCall;
use crate::compile::kernels::{self, KernelSource};
use crate::device::gpu::Device;
use crate::device::launch::argument;
use crate::device::launch_config::ConfiguredKernel;
use crate::error::CudaError;
use cudarc::driver::CudaStream;

pub(crate) static SOURCE: KernelSource = KernelSource::single_cold("filter_row.cu", kernels::any);

/// The kernel in a device.
#[derive(Debug)]
pub(crate) struct FilterRow(ConfiguredKernel);

impl FilterRow {
    /// Compiled and loaded at first use.
    pub(crate) fn load(device: &Device) -> Result<Self, CudaError> {
        Ok(FilterRow(ConfiguredKernel::load(device, &SOURCE, "filter_row")?))
    }

    /// Replaces the draws of rows with filters by draws with filters, except rows that have top-p first.
    ///
    /// # Safety
    /// Every pointer is device memory of this kernel's device, of the sizes that filter_call.cuh states for `draws` draws,
    /// until the stream has passed the launch; no top-k is above [`TOP_K_MAX`](crate::abi::TOP_K_MAX).
    pub(crate) unsafe fn launch(&self, stream: &CudaStream, call: &FilterCall, draws: u32) -> Result<(), CudaError> {
        // SAFETY: the kernel takes a FilterCall by value, whose layout abi asserts; the rest is the caller's.
        unsafe { self.0.launch(stream, draws, [argument(call)]) }
    }
}
