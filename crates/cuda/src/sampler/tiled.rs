//! The tiled variant over host memory (paper Alg. 1).

use crate::device::gpu::Device;
use crate::device::row_features::KernelChoice;
use crate::error::CudaError;
use crate::exchange::cuda_exchange::CudaExchange;
use crate::sampler::host_sampler::{HostSampler, planned};
use crate::sampler::impl_sampler::impl_sampler;
use crate::sampler::pinned_items::ROOM;
use crate::sampler::staging::most_listed;
use crate::sampler::uploaded_head::UploadedHead;
use flash_sampling_core::{
    Capabilities, Exactness, Head, Input, Knob, Knobs, Matrix, Plan, RowParams, SampleError, Samples, Scan, Variant,
};
use std::sync::Arc;

/// Draws inside the matmul on a GPU, for inputs in host memory (paper Alg. 1). Exact pathwise.
///
/// The weight is copied to the GPU once. A call copies hidden states and row parameters up, launches once for every 256
/// draws, copies the draws down and waits. Bf16 and f16, the same type on both sides, are multiplied on tensor cores, other
/// types without them. Which of the two depends on the types alone, so that a row's bits do not depend on its
/// neighbours. Sums are in float32.
///
/// The GPU decides rows with min-p, top-k or top-p that request draws and nothing else, on Hopper in the same launch as rows
/// without filters: see [`DeviceFilters`](crate::DeviceFilters).
/// [`RowSample::passes`](flash_sampling_core::RowSample::passes) counts the passes: 1 where a list of the largest logits, or
/// the stored logits, decided at once.
///
/// Rows with log-probabilities, draws without replacement or other filters, the few rows that stay undecided, and all rows
/// of a canonical plan are drawn from stored logits: the kernel that draws stores up to 256 MiB of logits on the GPU at a time,
/// and others draw again, sum the masses, and find the best tokens. Only results are copied down. The first such row
/// allocates the memory (for a vocabulary of 152k about 90 MiB, and 0.7 MiB for each row of the plan up to 256), and a call with more masks and biases than any before it
/// allocates more. For raw log-probabilities the logits are stored once more, without the row's transforms. A canonical plan
/// reads the weight once more when it is planned, on the host, for its norms.
///
/// As a [shard](Scan) it summarizes rows with filters or log-probabilities on the GPU; some kilobytes a row are copied down,
/// and lists where filters need them.
#[derive(Debug)]
pub struct CudaTiled<'w>(HostSampler<'w>);

/// What a pathwise sampler that can store logits does.
pub(crate) const FILTERS_TOO: Knobs = RAW_TOO.union(Knobs::FILTERS).union(Knobs::of(&[Knob::Kept]));
/// What every sampler that can store logits does.
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
    };

    /// The capabilities of a sampler of this plan, without a head or a GPU.
    pub fn capabilities_of(plan: &Plan) -> Capabilities {
        planned(CudaTiled::CAPABILITIES, plan)
    }

    /// Plans a sampler: copies the weight, compiles and loads the kernels.
    ///
    /// # Errors
    /// * [`CudaError::EmptyPlan`]: the plan has no rows or no draws.
    /// * [`CudaError::Layout`]: the head has tokens, but no columns.
    /// * [`CudaError::Architecture`], [`CudaError::TooLarge`], [`CudaError::Compile`], [`CudaError::Driver`].
    pub fn new(head: Head<'w>, plan: Plan, device: &Arc<Device>) -> Result<Self, CudaError> {
        CudaTiled::with_kernels(head, plan, device, KernelChoice::default())
    }

    /// [`CudaTiled::new`] with a choice of kernels.
    ///
    /// # Errors
    /// As [`CudaTiled::new`].
    pub fn with_kernels(
        head: Head<'w>,
        plan: Plan,
        device: &Arc<Device>,
        choice: KernelChoice,
    ) -> Result<Self, CudaError> {
        Ok(CudaTiled(HostSampler::new(head, plan, CudaTiled::CAPABILITIES, device, choice, None)?))
    }

    /// Rows of an exchange that takes all draws of a launch of `plan`; ranks that draw together plan alike.
    pub fn max_exchange_rows(plan: &Plan) -> usize {
        UploadedHead::most_of(plan)
    }

    /// Bytes of lists and masks of a call for which every sampler has room at first.
    pub const ROOM_TOGETHER: usize = ROOM;

    /// Bytes of lists and masks that a call with these rows takes at most, on whatever rank.
    pub fn lists_together(&self, rows: &[RowParams<'_>]) -> usize {
        most_listed(rows, self.0.shape().vocab_size)
    }

    /// Makes room for calls whose lists and masks take as many bytes: [`CudaTiled::sample_sharded`] allocates nothing for them
    /// then. What a rank allocates while another waits on the same GPU may stand behind it.
    ///
    /// # Errors
    /// [`CudaError::Driver`].
    pub fn reserve_together(&mut self, bytes: usize) -> Result<(), CudaError> {
        self.0.reserve_lists(bytes)
    }

    /// Draws from the whole vocabulary of which this sampler's head is one shard: the draws of all ranks meet on their
    /// GPUs, and every rank gets the same. Ranks make the same calls, with the same rows. Token, score and logit are those
    /// of a sampler over the whole head, to the last bit.
    ///
    /// # Errors
    /// Those of [`PerturbedArgmax::sample`](flash_sampling_core::PerturbedArgmax::sample). A
    /// [`SampleError::Backend`] with [`CudaError::LateRanks`] or [`CudaError::OtherCall`] when the exchange fails, with
    /// [`CudaError::NotTogether`] when a row requests more than draws. A rank that fails before the exchange does not take
    /// part in it, and is late for the others; its next call is refused with [`CudaError::OtherCall`], as it finds what they
    /// sent for the one before.
    pub fn sample_sharded(
        &mut self,
        exchange: &mut CudaExchange,
        input: Matrix<'_>,
        rows: &[RowParams<'_>],
        out: &mut Samples,
    ) -> Result<(), SampleError> {
        exchange.begin(input.dtype());
        let drawn = self.0.sample_with(input, rows, exchange, None, out);
        if drawn.is_err() {
            out.clear();
        }
        drawn
    }
}

/// Rows with filters in an exchange.
impl CudaTiled<'_> {
    /// What this sampler can do in an exchange with rows that have filters, for [`CudaExchange::agree`].
    pub fn encode_support(&self) -> Vec<u8> {
        self.0.encode_support()
    }

    /// Loads and allocates what [`CudaTiled::sample_sharded_filters`] needs. Every rank does so before the first such call of
    /// any: what is loaded while another rank waits on the same GPU would stand behind it.
    ///
    /// # Errors
    /// [`CudaError::Compile`], [`CudaError::Driver`].
    pub fn prepare_sharded(&mut self) -> Result<(), CudaError> {
        self.0.prepare_sharded()
    }

    /// Whether the exchange decides all of these rows; rows that are invalid do not count. Every rank finds the same. It
    /// decides draws without filters, those with min-p first or a top-k of at most 128, and those with top-p alone where all
    /// shards begin at multiples of 4; on Hopper, by peers, where every shard has tokens.
    pub fn can_filter_sharded(&self, exchange: &CudaExchange, rows: &[RowParams<'_>]) -> bool {
        self.0.can_filter_sharded(exchange.filters(), rows)
    }

    /// As [`CudaTiled::sample_sharded`], for rows that may have filters: such as the exchange
    /// [decides](CudaTiled::can_filter_sharded). A few rows may stay open, the same on every rank; `open` gets their numbers, and
    /// an error stands in their place. All stay open where the hidden states of all ranks have another type than the weight.
    ///
    /// # Errors
    /// As [`CudaTiled::sample_sharded`].
    pub fn sample_sharded_filters(
        &mut self,
        exchange: &mut CudaExchange,
        input: Matrix<'_>,
        rows: &[RowParams<'_>],
        open: &mut Vec<usize>,
        out: &mut Samples,
    ) -> Result<(), SampleError> {
        exchange.begin(input.dtype());
        let drawn = self.0.sample_with(input, rows, exchange, Some(open), out);
        if drawn.is_err() {
            out.clear();
        }
        drawn
    }
}

impl_sampler!(
    CudaTiled,
    fn scan(&mut self) -> Option<&mut dyn Scan> {
        // Canonical logits are known of near ties alone.
        (!self.0.plan().canonical).then_some(&mut self.0)
    }
);
