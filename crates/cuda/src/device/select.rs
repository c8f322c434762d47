//! The second launch of the grouped and online variants: from the groups' log-masses and samples to draws.

use crate::abi::Selection;
use crate::compile::kernels::{self, KernelSource};
use crate::device::entries;
use crate::device::gpu::Device;
use crate::device::launch::{Grid, Kernel, Queue};
use crate::error::CudaError;

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
pub(crate) struct SelectKernel(Kernel<(Selection,)>);

impl SelectKernel {
    /// Compiled and loaded at first use.
    pub(crate) fn load(device: &Device) -> Result<Self, CudaError> {
        Ok(SelectKernel(device.function(&SOURCE, &SOURCE.instance(), &entries::SELECT_GROUPS)?))
    }

    /// Draws for every row, from the partial summaries of an earlier launch over the same groups with as many blocks.
    pub(crate) fn launch(&self, queue: Queue<'_>, selection: Selection) -> Result<(), CudaError> {
        queue.launch(&self.0, Grid::of(selection.row_count, THREADS), (selection,))
    }
}
