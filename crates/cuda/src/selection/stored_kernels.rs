//! The kernels over stored logits: their sources and their launches.
#![allow(unsafe_code)]

use crate::abi::{Canonical, NearTies, RowSummaries, SUMMARY_TOKENS, TopLists};
use crate::compile::kernels::{self, KernelSource};
use crate::device::gpu::Device;
use crate::device::launch::{Grid, argument, launch};
use crate::device::standalone::WARPS;
use crate::error::CudaError;
use cudarc::driver::{CudaFunction, CudaStream};

pub(crate) static ROW_SUMMARY: KernelSource = KernelSource::single("row_summary.cu", kernels::any);
pub(crate) static TOP_LIST: KernelSource = KernelSource::single("top_list.cu", kernels::any);
pub(crate) static NEAR_TIES: KernelSource = KernelSource::single("near_ties.cu", kernels::any);
pub(crate) static CANONICAL: KernelSource = KernelSource::single("canonical.cu", kernels::any);
/// The kernels in a device.
#[derive(Debug)]
pub(crate) struct StoredKernels {
    row_summaries: CudaFunction,
    top_list: CudaFunction,
    near_ties: CudaFunction,
    canonical: CudaFunction,
    multiprocessors: u32,
}

// SAFETY (of all launches): the kernels take these arguments by value, whose layouts abi asserts; the rest is the caller's.
impl StoredKernels {
    /// Compiled and loaded at first use.
    pub(crate) fn load(device: &Device) -> Result<Self, CudaError> {
        let function = |kernel: &'static KernelSource, name| device.function(kernel, &kernel.instance(), name);
        Ok(StoredKernels {
            row_summaries: function(&ROW_SUMMARY, "row_summaries")?,
            top_list: function(&TOP_LIST, "top_list")?,
            near_ties: function(&NEAR_TIES, "near_ties")?,
            canonical: function(&CANONICAL, "canonical")?,
            multiprocessors: device.multiprocessors(),
        })
    }

    /// Summarizes the first `rows` rows.
    ///
    /// # Safety
    /// Every pointer is device memory of the sizes that row_summary.cu states until the stream has passed the launch.
    pub(crate) unsafe fn row_summaries(
        &self,
        stream: &CudaStream,
        call: &RowSummaries,
        rows: u32,
    ) -> Result<(), CudaError> {
        let blocks = (rows, call.stored.tokens.div_ceil(SUMMARY_TOKENS as u32));
        // SAFETY: as above.
        unsafe { launch(&self.row_summaries, stream, Grid { blocks, threads: 512, shared_bytes: 0 }, [argument(call)]) }
    }

    /// Keeps the best tokens of each item, `blocks` items at a time.
    ///
    /// # Safety
    /// Every pointer is device memory of the sizes that top_list.cu states until the stream has passed the launch.
    pub(crate) unsafe fn top_list(&self, stream: &CudaStream, call: &TopLists, blocks: u32) -> Result<(), CudaError> {
        // SAFETY: as above.
        unsafe { launch(&self.top_list, stream, Grid::of(blocks, 1024), [argument(call)]) }
    }

    /// Keeps the tokens of each of `items` items that are near its draw.
    ///
    /// # Safety
    /// Every pointer is device memory of the sizes that near_ties.cu states until the stream has passed the launch.
    pub(crate) unsafe fn near_ties(&self, stream: &CudaStream, call: &NearTies, items: u32) -> Result<(), CudaError> {
        let grid = Grid::of(call.blocks * items, 32 * WARPS);
        // SAFETY: as above.
        unsafe { launch(&self.near_ties, stream, grid, [argument(call)]) }
    }

    /// Evaluates what items keep again, canonically.
    ///
    /// # Safety
    /// Every pointer is device memory of the sizes that canonical.cu states until the stream has passed the launch.
    pub(crate) unsafe fn canonical(&self, stream: &CudaStream, call: &Canonical) -> Result<(), CudaError> {
        let grid = Grid::of(8 * self.multiprocessors, 256);
        // SAFETY: as above.
        unsafe { launch(&self.canonical, stream, grid, [argument(call)]) }
    }
}
