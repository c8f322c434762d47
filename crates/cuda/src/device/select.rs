//! The second launch of the grouped and online variants: draws from the groups' log-masses and samples.

use crate::abi::Selection;
use crate::compile::{KernelSource, kernels};
use crate::device::{Device, Grid, Kernel, Queue, entries};
use crate::error::CudaError;

/// One instance, for all GPUs.
pub(crate) static SOURCE: KernelSource = KernelSource::single("select.cu", kernels::any);

/// Threads of a block; each block handles a row.
const THREADS: u32 = 256;

/// The rule that draws a row from its groups. All rules are exact.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u32)]
pub(crate) enum GroupRule {
    /// The sample of the group with the largest log-mass plus fresh Gumbel noise (paper Alg. I.2). Exact in
    /// distribution.
    Fresh = 0,
    /// The binary merge of the groups in ascending order (paper Alg. I.3). Exact in distribution.
    Online = 1,
    /// The best of the groups' samples (paper section D.3), which is the tiled variant's draw. Exact pathwise.
    Maxima = 2,
}

#[derive(Debug)]
pub(crate) struct SelectKernel(Kernel<(Selection,)>);

impl SelectKernel {
    /// The kernel, compiled and loaded at first use.
    pub(crate) fn load(device: &Device) -> Result<Self, CudaError> {
        Ok(SelectKernel(device.function(&SOURCE, &SOURCE.instance(), &entries::SELECT_GROUPS)?))
    }

    /// Draws for every row, from partial summaries of an earlier launch over the same groups with as many blocks.
    pub(crate) fn launch(&self, queue: Queue<'_>, selection: Selection) -> Result<(), CudaError> {
        queue.launch(&self.0, Grid::of(selection.row_count, THREADS), (selection,))
    }
}
