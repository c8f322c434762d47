//! Draws with filters, from the fused kernel's lists of the largest logits.
#![allow(unsafe_code)]

use crate::abi::FilterListCall;
use crate::compile::kernels::{self, KernelSource};
use crate::device::gpu::Device;
use crate::device::launch::argument;
use crate::device::launch_config::ConfiguredKernel;
use crate::error::CudaError;
use cudarc::driver::CudaStream;

pub(crate) static SOURCE: KernelSource = KernelSource::single_cold("filter_list.cu", kernels::any);

/// The kernel in a device.
#[derive(Debug)]
pub(crate) struct FilterList(ConfiguredKernel);

impl FilterList {
    /// Compiled and loaded at first use.
    pub(crate) fn load(device: &Device) -> Result<Self, CudaError> {
        Ok(FilterList(ConfiguredKernel::load(device, &SOURCE, "filter_list")?))
    }

    /// Replaces the draws of rows with filters by draws with filters, or by `UNDECIDED`.
    ///
    /// # Safety
    /// Every pointer is device memory of this kernel's device, of the sizes that row_lists.cuh states for `draws` rows,
    /// until the stream has passed the launch; no top-k is above [`TOP_K_MAX`](crate::abi::TOP_K_MAX).
    pub(crate) unsafe fn launch(
        &self,
        stream: &CudaStream,
        call: &FilterListCall,
        draws: u32,
    ) -> Result<(), CudaError> {
        // SAFETY: the kernel takes a FilterListCall by value, whose layout abi asserts; the rest is the caller's.
        unsafe { self.0.launch(stream, draws, [argument(call)]) }
    }
}
