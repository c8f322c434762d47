//! The tiled variant over host memory (paper Alg. 1).

use crate::device::{Device, KernelChoice};
use crate::error::CudaError;
use crate::sampler::HeadSampler;
use crate::sampler::head_sampler::{max_launch_draws, planned};
use crate::sampler::impl_sampler::impl_sampler;
use crate::sampler::pinned_items::ROOM;
use crate::sampler::staging::max_list_bytes;
use flash_sampling_core::backend::Scan;
use flash_sampling_core::{Capabilities, Exactness, Head, Input, Knob, Knobs, Plan, RowParams, Variant};
use std::sync::Arc;

/// Draws inside the matmul on a GPU, for inputs in host memory (paper Alg. 1). Exact pathwise.
///
/// The constructor copies the weight to the GPU. A call copies hidden states and row parameters to the GPU, launches
/// once per 256 draws, waits, and copies the draws to the host. If weight and hidden states have the same type, bf16 or
/// f16, the products use tensor cores. The types alone decide this, so a row's bits do not depend on its neighbours.
/// Sums are in float32.
///
/// The GPU decides rows with min-p, top-k or top-p that request only draws; see
/// [`DeviceFilters`](crate::DeviceFilters). On Hopper, such rows share a launch with rows without filters.
/// [`RowSample::passes`](flash_sampling_core::RowSample::passes) is 1 if a list of the largest logits, or the stored
/// logits, decide the row.
///
/// Some rows are drawn from stored logits: rows with log-probabilities, draws without replacement or other filters,
/// undecided rows, and all rows of a canonical plan. The fused kernel stores up to 256 MiB of logits on the GPU at a
/// time. Other kernels then draw, sum the masses, and list the best tokens. Only results are copied to the host. For
/// raw log-probabilities, a second launch stores the logits without the row's transforms.
///
/// The first such row allocates memory: about 90 MiB for a vocabulary of 152k, and 0.7 MiB per row of the plan, up to
/// 256 rows. A call with more masks and biases than all earlier calls allocates more. The constructor of a canonical
/// plan reads the weight once more, on the host, for its norms.
///
/// As a [shard](Scan), this sampler summarizes rows with filters or log-probabilities on the GPU. It copies a few
/// kilobytes per row to the host, and lists if filters need them.
#[derive(Debug)]
pub struct CudaTiled<'w>(pub(super) HeadSampler<'w>);

/// The knobs of pathwise samplers that can store logits.
pub(crate) const FILTERS_TOO: Knobs = RAW_TOO.union(Knobs::FILTERS).union(Knobs::of(&[Knob::Kept]));
/// The knobs of all samplers that can store logits.
pub(crate) const RAW_TOO: Knobs = Knobs::ADJUSTMENTS.union(Knobs::LOGPROBS);

impl<'w> CudaTiled<'w> {
    pub(crate) const CAPABILITIES: Capabilities = Capabilities {
        backend: "cuda",
        variant: Variant::Tiled,
        exactness: Exactness::Pathwise,
        input: Input::Hidden,
        without_replacement: true,
        knobs: FILTERS_TOO,
        canonical: true,
        shadow: false,
    };

    /// The capabilities of a sampler of this plan, without a head or a GPU.
    pub fn capabilities_of(plan: &Plan) -> Capabilities {
        planned(CudaTiled::CAPABILITIES, plan)
    }

    /// Makes a sampler: copies the weight, and compiles and loads the kernels.
    ///
    /// # Errors
    /// * [`CudaError::EmptyPlan`]: the plan has no rows or no draws.
    /// * [`CudaError::Layout`]: the head has tokens, but no columns.
    /// * [`CudaError::Architecture`], [`CudaError::TooLarge`], [`CudaError::Compile`], [`CudaError::Driver`].
    pub fn new(head: Head<'w>, plan: Plan, device: &Arc<Device>) -> Result<Self, CudaError> {
        CudaTiled::with_kernels(head, plan, device, KernelChoice::default())
    }

    /// Makes a sampler as [`CudaTiled::new`] does, with a choice of kernels.
    ///
    /// # Errors
    /// As [`CudaTiled::new`].
    pub fn with_kernels(
        head: Head<'w>,
        plan: Plan,
        device: &Arc<Device>,
        choice: KernelChoice,
    ) -> Result<Self, CudaError> {
        Ok(CudaTiled(HeadSampler::new(head, plan, CudaTiled::CAPABILITIES, device, choice, None)?))
    }

    /// The rows of an exchange for samplers of this plan. All ranks of a group have the same plan.
    pub fn max_exchange_rows(plan: &Plan) -> usize {
        max_launch_draws(plan)
    }

    /// The number of rows, of all complete calls, that the shadow of this sampler's head did not decide: see
    /// [`DeviceTiled::fallback_rows`](crate::DeviceTiled::fallback_rows). It serves calls of
    /// [`CudaTiled::enqueue_sharded`]. A change of the plan may begin a new count.
    pub fn fallback_rows(&self) -> u32 {
        self.0.fallback_rows()
    }

    /// The initial room of every sampler for the lists and masks of a call, in bytes.
    pub const LIST_ROOM: usize = ROOM;

    /// The maximum bytes of lists and masks in a call with these rows, on any rank.
    pub fn list_bytes(&self, rows: &[RowParams<'_>]) -> usize {
        max_list_bytes(rows, self.0.description.shape.vocab_size)
    }
}

impl_sampler!(
    CudaTiled,
    fn scan(&mut self) -> Option<&mut dyn Scan> {
        // A canonical plan computes canonical logits of near ties only, so it has no scan.
        (!self.0.description.plan.canonical).then_some(&mut self.0)
    }
);
