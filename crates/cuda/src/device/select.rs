//! The second launch of the grouped and online variants: from the groups' log-masses and samples to draws.
#![allow(unsafe_code)]

use crate::abi::Selection;
use crate::compile::kernels::{self, KernelSource};
use crate::device::gpu::Device;
use crate::device::launch::{Grid, argument, launch};
use crate::error::CudaError;
use cudarc::driver::{CudaFunction, CudaStream};

/// One instance, for every GPU.
pub(crate) static SOURCE: KernelSource = KernelSource::single("select.cu", kernels::any);

/// Threads of a block, which takes a row.
const THREADS: u32 = 256;

/// How a row's draw comes of its groups. All are exact; see [`DeviceGroups`](crate::DeviceGroups).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u32)]
pub enum GroupRule {
    /// The group with the largest log-mass plus Gumbel noise of its own gives its sample (paper Alg. I.2). Exact in
    /// distribution.
    Fresh = 0,
    /// Groups in ascending order through the binary merge (paper Alg. I.3). Exact in distribution.
    Online = 1,
    /// The best of the groups' samples (paper section D.3): the draw of the tiled variant. Exact pathwise.
    Maxima = 2,
}

/// The kernel in a device.
#[derive(Debug)]
pub(crate) struct SelectKernel(CudaFunction);

impl SelectKernel {
    /// Compiled and loaded at first use.
    pub(crate) fn load(device: &Device) -> Result<Self, CudaError> {
        Ok(SelectKernel(device.function(&SOURCE, &SOURCE.instance(), "select_groups")?))
    }

    /// Launches it.
    ///
    /// # Safety
    /// * Every pointer of `selection` is device memory of this kernel's device, of the sizes that groups.cuh states, and
    ///   stays so until the stream has passed the launch.
    /// * The partial summaries are those of a launch over the same groups with as many blocks, earlier on the stream.
    pub(crate) unsafe fn launch(&self, stream: &CudaStream, selection: &Selection) -> Result<(), CudaError> {
        // SAFETY: the kernel takes a Selection by value, whose layout abi asserts; the rest is the caller's.
        unsafe { launch(&self.0, stream, Grid::of(selection.row_count, THREADS), [argument(selection)]) }
    }
}
