//! The kernels over stored logits: their sources and their launches.
#![allow(unsafe_code)]

use crate::abi::{Canonical, NearTies, StoredLogits, TopLists, Transform};
use crate::compile::kernels::{self, KernelSource};
use crate::device::gpu::Device;
use crate::device::launch::{Grid, argument, launch};
use crate::device::standalone::WARPS;
use crate::error::CudaError;
use cudarc::driver::{CudaFunction, CudaStream};

pub(crate) static MASS_HISTOGRAM: KernelSource = KernelSource::single("mass_histogram.cu", kernels::any);
pub(crate) static TOP_LIST: KernelSource = KernelSource::single("top_list.cu", kernels::any);
pub(crate) static NEAR_TIES: KernelSource = KernelSource::single("near_ties.cu", kernels::any);
pub(crate) static CANONICAL: KernelSource = KernelSource::single("canonical.cu", kernels::any);
/// Cold, because the copy of logits to the device takes much longer.
pub(crate) static TRANSFORM: KernelSource = KernelSource::single_cold("transform.cu", kernels::any);

/// Tokens that a block of mass_histogram.cu sums.
const MASS_TOKENS: u32 = 1 << 14;

/// The kernels in a device.
#[derive(Debug)]
pub(crate) struct StoredKernels {
    row_tops: CudaFunction,
    row_masses: CudaFunction,
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
            row_tops: function(&MASS_HISTOGRAM, "row_tops")?,
            row_masses: function(&MASS_HISTOGRAM, "row_masses")?,
            top_list: function(&TOP_LIST, "top_list")?,
            near_ties: function(&NEAR_TIES, "near_ties")?,
            canonical: function(&CANONICAL, "canonical")?,
            multiprocessors: device.multiprocessors(),
        })
    }

    /// Sums the masses of the first `rows` stored rows into `words`, `[rows, 1 + bins]` u64, by way of `tops`, `[rows]` u32.
    ///
    /// # Safety
    /// All are device memory of these sizes until the stream has passed the launch; tops and words are zeros.
    pub(crate) unsafe fn sum_masses(
        &self,
        stream: &CudaStream,
        stored: &StoredLogits,
        rows: u32,
        tops: u64,
        words: u64,
    ) -> Result<(), CudaError> {
        let grid = Grid { blocks: (stored.tokens.div_ceil(MASS_TOKENS), rows), threads: 256, shared_bytes: 0 };
        // SAFETY: as above.
        unsafe {
            launch(&self.row_tops, stream, grid, [argument(stored), argument(&tops)])?;
            launch(&self.row_masses, stream, grid, [argument(stored), argument(&tops), argument(&words)])
        }
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

/// The kernel that stores the transformed logits of raw ones.
#[derive(Debug)]
pub(crate) struct TransformKernel(CudaFunction);

impl TransformKernel {
    /// Compiled and loaded at first use.
    pub(crate) fn load(device: &Device) -> Result<Self, CudaError> {
        Ok(TransformKernel(device.function(&TRANSFORM, &TRANSFORM.instance(), "transform")?))
    }

    /// Transforms `rows` rows.
    ///
    /// # Safety
    /// Every pointer is device memory of the sizes that transform.cu states until the stream has passed the launch.
    pub(crate) unsafe fn launch(&self, stream: &CudaStream, call: &Transform, rows: u32) -> Result<(), CudaError> {
        let grid = Grid { blocks: (call.tokens.div_ceil(256).min(64), rows), threads: 256, shared_bytes: 0 };
        // SAFETY: the kernel takes a Transform by value, whose layout abi asserts; the rest is the caller's.
        unsafe { launch(&self.0, stream, grid, [argument(call)]) }
    }
}
