//! The kernels over stored logits: their sources and their launches.

use crate::abi::{Canonical, NearTies, RowSummaries, SUMMARY_TOKENS, TopLists};
use crate::compile::{KernelSource, kernels};
use crate::device::standalone::WARPS;
use crate::device::{Device, Entry, Grid, Kernel, Queue, entries};
use crate::error::CudaError;

pub(crate) static ROW_SUMMARY: KernelSource = KernelSource::single("row_summary.cu", kernels::any);
pub(crate) static TOP_LIST: KernelSource = KernelSource::single("top_list.cu", kernels::any);
pub(crate) static NEAR_TIES: KernelSource = KernelSource::single("near_ties.cu", kernels::any);
pub(crate) static CANONICAL: KernelSource = KernelSource::single("canonical.cu", kernels::any);

/// The kernels of row_summary.cu.
#[derive(Debug)]
pub(crate) struct SummaryKernels {
    parts: Kernel<(RowSummaries,)>,
    rows: Kernel<(RowSummaries,)>,
}

impl SummaryKernels {
    /// The kernels, compiled and loaded at first use.
    pub(crate) fn load(device: &Device) -> Result<Self, CudaError> {
        let instance = ROW_SUMMARY.instance();
        Ok(SummaryKernels {
            parts: device.function(&ROW_SUMMARY, &instance, &entries::PART_SUMMARIES)?,
            rows: device.function(&ROW_SUMMARY, &instance, &entries::ROW_SUMMARIES)?,
        })
    }

    /// Summarizes the first `rows` rows.
    pub(crate) fn launch(&self, queue: Queue<'_>, call: RowSummaries, rows: u32) -> Result<(), CudaError> {
        let blocks = (rows, call.stored.tokens.div_ceil(SUMMARY_TOKENS as u32));
        queue.launch(&self.parts, Grid { blocks, ..Grid::of(0, 512) }, (call,))?;
        queue.launch(&self.rows, Grid::of(rows, 512), (call,))
    }
}

#[derive(Debug)]
pub(crate) struct StoredKernels {
    pub(crate) summaries: SummaryKernels,
    top_list: Kernel<(TopLists,)>,
    near_ties: Kernel<(NearTies,)>,
    canonical: Kernel<(Canonical,)>,
    multiprocessors: u32,
}

impl StoredKernels {
    /// The kernels, compiled and loaded at first use.
    pub(crate) fn load(device: &Device) -> Result<Self, CudaError> {
        fn load<A>(device: &Device, source: &'static KernelSource, entry: &Entry<A>) -> Result<Kernel<A>, CudaError> {
            device.function(source, &source.instance(), entry)
        }
        Ok(StoredKernels {
            summaries: SummaryKernels::load(device)?,
            top_list: load(device, &TOP_LIST, &entries::TOP_LIST)?,
            near_ties: load(device, &NEAR_TIES, &entries::NEAR_TIES)?,
            canonical: load(device, &CANONICAL, &entries::CANONICAL)?,
            multiprocessors: device.multiprocessors(),
        })
    }

    /// Keeps the best tokens of each item, `blocks` items at a time.
    pub(crate) fn top_list(&self, queue: Queue<'_>, call: TopLists, blocks: u32) -> Result<(), CudaError> {
        queue.launch(&self.top_list, Grid::of(blocks, 1024), (call,))
    }

    /// Keeps the tokens of each of `items` items that are near its draw.
    pub(crate) fn near_ties(&self, queue: Queue<'_>, call: NearTies, items: u32) -> Result<(), CudaError> {
        let grid = Grid::of(call.blocks * items, 32 * WARPS);
        queue.launch(&self.near_ties, grid, (call,))
    }

    /// Evaluates the kept tokens of items a second time, canonically.
    pub(crate) fn canonical(&self, queue: Queue<'_>, call: Canonical) -> Result<(), CudaError> {
        let grid = Grid::of(8 * self.multiprocessors, 256);
        queue.launch(&self.canonical, grid, (call,))
    }
}
