//! The kernels of a shard's survey of stored logits, and their launches.
#![allow(unsafe_code)]

use crate::abi::{StoredLogits, SurveySums, SurveyTokens};
use crate::compile::kernels::{self, Instance, KernelSource};
use crate::device::gpu::Device;
use crate::device::launch::{Grid, argument, launch};
use crate::error::CudaError;
use cudarc::driver::{CudaFunction, CudaStream};

/// One instance, for every GPU.
pub(crate) static SOURCE: KernelSource =
    KernelSource { file: "survey.cu", serves: kernels::any, instances: || vec![instance()] };

fn instance() -> Instance {
    Instance::new(&[])
}

/// What survey.cu has as constants of the same names.
const THREADS: u32 = 256;
const TILE: u32 = 128;
const TOKENS: u32 = 4096;
/// Words of an item's sums for its moments.
pub(crate) const MOMENTS: usize = 9;

/// The kernels in a device.
#[derive(Debug)]
pub(crate) struct SurveyKernels {
    frontiers: CudaFunction,
    tokens_above: CudaFunction,
    masses_before: CudaFunction,
    moments: CudaFunction,
}

/// Blocks of a row for the kernels that take any number.
fn blocks_of(stored: &StoredLogits) -> u32 {
    stored.tokens.div_ceil(TOKENS).max(1)
}

// SAFETY (of all launches): the kernels take these arguments by value, whose layouts abi asserts; the rest is the caller's.
impl SurveyKernels {
    /// Compiled and loaded at first use.
    pub(crate) fn load(device: &Device) -> Result<Self, CudaError> {
        let function = |name| device.function(&SOURCE, &instance(), name);
        Ok(SurveyKernels {
            frontiers: function("frontiers")?,
            tokens_above: function("tokens_above")?,
            masses_before: function("masses_before")?,
            moments: function("moments")?,
        })
    }

    /// Keeps, of each of `items` draws, tokens among which the frontier is.
    ///
    /// # Safety
    /// Every pointer is device memory of the sizes that survey.cu states until the stream has passed the launch.
    pub(crate) unsafe fn frontiers(
        &self,
        stream: &CudaStream,
        call: &SurveyTokens,
        items: u32,
    ) -> Result<(), CudaError> {
        let stored = &call.stored;
        let from = stored.first_token / TILE * TILE;
        let blocks = (stored.first_token + stored.tokens - from).div_ceil(TOKENS);
        let grid = Grid { blocks: (blocks, items), threads: THREADS, shared_bytes: 0 };
        // SAFETY: as above.
        unsafe { launch(&self.frontiers, stream, grid, [argument(call)]) }
    }

    /// Keeps, of each of `items` rows, the tokens with a logit of at least its floor.
    ///
    /// # Safety
    /// As [`SurveyKernels::frontiers`].
    pub(crate) unsafe fn tokens_above(
        &self,
        stream: &CudaStream,
        call: &SurveyTokens,
        items: u32,
    ) -> Result<(), CudaError> {
        let grid = Grid { blocks: (blocks_of(&call.stored), items), threads: THREADS, shared_bytes: 0 };
        // SAFETY: as above.
        unsafe { launch(&self.tokens_above, stream, grid, [argument(call)]) }
    }

    /// Sums the masses before `looks` places, a word each.
    ///
    /// # Safety
    /// As [`SurveyKernels::frontiers`]; the sums are zeros.
    pub(crate) unsafe fn masses_before(
        &self,
        stream: &CudaStream,
        call: &SurveySums,
        looks: u32,
    ) -> Result<(), CudaError> {
        let grid = Grid { blocks: (blocks_of(&call.stored), looks), threads: THREADS, shared_bytes: 0 };
        // SAFETY: as above.
        unsafe { launch(&self.masses_before, stream, grid, [argument(call)]) }
    }

    /// Sums the moments of `looks` rows, [`MOMENTS`] words each.
    ///
    /// # Safety
    /// As [`SurveyKernels::masses_before`].
    pub(crate) unsafe fn moments(&self, stream: &CudaStream, call: &SurveySums, looks: u32) -> Result<(), CudaError> {
        let grid = Grid { blocks: (blocks_of(&call.stored), looks), threads: THREADS, shared_bytes: 0 };
        // SAFETY: as above.
        unsafe { launch(&self.moments, stream, grid, [argument(call)]) }
    }
}
