//! The tiled variant over host memory (paper Alg. 1).

use crate::abi::{RowColumns, TokenColumns};
use crate::device::{Device, KernelChoice};
use crate::error::CudaError;
use crate::exchange::cuda_exchange::CudaExchange;
use crate::sampler::head_sampler::{max_launch_draws, planned};
use crate::sampler::impl_sampler::impl_sampler;
use crate::sampler::pinned_items::ROOM;
use crate::sampler::staging::max_list_bytes;
use crate::sampler::{ColumnCall, DeviceHidden, HeadSampler};
use flash_sampling_core::backend::Scan;
use flash_sampling_core::{
    Capabilities, Exactness, Head, Input, Knob, Knobs, Matrix, Plan, RowParams, SampleError, Samples, Variant,
};
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

    /// The initial room of every sampler for the lists and masks of a call, in bytes.
    pub const LIST_ROOM: usize = ROOM;

    /// The maximum bytes of lists and masks in a call with these rows, on any rank.
    pub fn list_bytes(&self, rows: &[RowParams<'_>]) -> usize {
        max_list_bytes(rows, self.0.shape.vocab_size)
    }

    /// Allocates room for this many bytes of lists and masks, so [`CudaTiled::sample_sharded`] allocates nothing for
    /// them.
    ///
    /// An allocation during a call may block behind a rank that waits on the same GPU.
    ///
    /// # Errors
    /// [`CudaError::Driver`].
    pub fn reserve_lists(&mut self, bytes: usize) -> Result<(), CudaError> {
        self.0.reserve_lists(bytes)
    }
}

/// Calls over the shards of all ranks.
impl CudaTiled<'_> {
    /// Encodes the filters that this sampler supports in an exchange, for [`CudaExchange::agree`].
    pub fn encode_support(&self) -> Vec<u8> {
        self.0.encode_support()
    }

    /// Loads kernels and allocates memory for calls of [`CudaTiled::sample_sharded`] with filters.
    ///
    /// All ranks call this before any rank's first call with filters. A load during a call may block behind a rank that
    /// waits on the same GPU.
    ///
    /// # Errors
    /// [`CudaError::Compile`], [`CudaError::Driver`].
    pub fn prepare_sharded(&mut self) -> Result<(), CudaError> {
        self.0.prepare_sharded()
    }

    /// Replaces the input of later calls by hidden states on the device, until a call with `None`.
    ///
    /// Later calls still take an `input`, of the same shape and type, and read nothing of it. They draw the same tokens
    /// as from hidden states on the host. All ranks of a group have their hidden states in the same kind of memory. In
    /// a call with filters, either all or none of the ranks have hidden states whose address and row stride are
    /// multiples of 16 bytes.
    ///
    /// # Errors
    /// * [`CudaError::Unsupported`]: a canonical plan, which needs the hidden states on the host.
    /// * [`CudaError::Driver`].
    pub fn set_hidden(&mut self, hidden: Option<DeviceHidden>) -> Result<(), CudaError> {
        self.0.set_hidden(hidden)
    }

    /// Whether the exchange decides all valid rows of a call. Every rank has the same result.
    ///
    /// The exchange decides draws without filters, draws with min-p first or a top-k of at most 128, and draws with
    /// top-p alone if all shards begin at multiples of 4. It needs Hopper GPUs, peers, and tokens in every shard.
    pub fn can_filter_sharded(&self, exchange: &CudaExchange, rows: &[RowParams<'_>]) -> bool {
        self.0.can_filter_sharded(exchange.filters(), rows)
    }

    /// Draws from the whole vocabulary, with this sampler's head as one shard.
    ///
    /// The GPUs of all ranks exchange their draws, and every rank has the same result. All ranks make the same calls,
    /// with the same rows. Token, score and logit have the bits of a sampler over the whole head.
    ///
    /// With `open`, rows may have filters that the exchange [decides](CudaTiled::can_filter_sharded). A few rows may
    /// stay undecided, the same rows on every rank. `open` receives their indices, and `out` has an error for each. All
    /// rows are undecided if the hidden states of all ranks have another type than the weight, or an address or row
    /// stride that is not a multiple of 16 bytes.
    ///
    /// # Errors
    /// * The errors of [`PerturbedArgmax::sample`](flash_sampling_core::PerturbedArgmax::sample).
    /// * [`SampleError::Backend`] with [`CudaError::LateRanks`] or [`CudaError::OtherCall`]: the exchange failed.
    /// * [`SampleError::Backend`] with [`CudaError::NotSharded`]: a row requests more than draws, or the exchange is of
    ///   another GPU.
    ///
    /// A rank that fails before the exchange takes no part in it, and is late for the other ranks. Its next call
    /// receives their data for the failed call, and fails with [`CudaError::OtherCall`].
    pub fn sample_sharded(
        &mut self,
        exchange: &mut CudaExchange,
        input: Matrix<'_>,
        rows: &[RowParams<'_>],
        open: Option<&mut Vec<usize>>,
        out: &mut Samples,
    ) -> Result<(), SampleError> {
        self.0.sample_sharded(exchange, input, rows, open, out)
    }

    /// Loads kernels and allocates memory for calls of [`CudaTiled::enqueue_sharded`] with up to `max_adjusted` adjusted
    /// tokens in a row, so that a graph can capture such calls.
    ///
    /// Adjusted tokens are counted over the whole vocabulary: biased, banned, banned as stop tokens, and penalised. All
    /// ranks plan the same number. Each adjusted token takes 20 bytes for every row. A larger number than before replaces
    /// memory, so graphs that captured earlier calls must not run again.
    ///
    /// All ranks call this before any rank's first call: a load during a call may block behind a rank that waits on the
    /// same GPU, or may take longer than the time limit of the other ranks.
    ///
    /// # Errors
    /// [`CudaError::TooLarge`], [`CudaError::Driver`], [`CudaError::Compile`].
    pub fn prepare_enqueue_sharded(&mut self, exchange: &CudaExchange, max_adjusted: usize) -> Result<(), CudaError> {
        self.0.prepare_sharded_columns(exchange, max_adjusted)
    }

    /// Loads kernels and allocates memory for calls of [`CudaTiled::enqueue_sharded`] with filters, log-probabilities or
    /// kept tokens, besides [`CudaTiled::prepare_enqueue_sharded`]. Returns a message for the other ranks.
    ///
    /// All ranks call this, send their messages to each other, and then call [`CudaExchange::connect_logits`], before any
    /// rank's first such call. A rank allocates a matrix for the logits of up to 256 rows of the whole vocabulary, at most
    /// 256 MiB or one row. If ranks are in several processes, the matrix is not freed before the process ends, as the
    /// mailboxes.
    ///
    /// # Errors
    /// [`CudaError::NotSharded`]: NCCL. [`CudaError::Driver`], [`CudaError::Compile`].
    pub fn offer_logits(&mut self, exchange: &mut CudaExchange) -> Result<Vec<u8>, CudaError> {
        self.0.offer_logits(exchange)
    }

    /// Checks that [`CudaTiled::enqueue_sharded`] supports the parameters and results of a call: only whether an array is
    /// null matters. Returns whether the call needs the logits of all ranks, and so [`CudaTiled::offer_logits`].
    ///
    /// # Errors
    /// [`CudaError::NotEnqueued`].
    pub fn check_enqueue_sharded(
        &self,
        exchange: &CudaExchange,
        columns: &RowColumns,
        out: &TokenColumns,
    ) -> Result<bool, CudaError> {
        self.0.check_sharded_columns(exchange, columns, out)
    }

    /// Enqueues draws from the whole vocabulary, with this sampler's head as one shard, and returns without waiting.
    ///
    /// This is [`DeviceSampler::enqueue`](crate::DeviceSampler::enqueue) for ranks. Each rank makes one draw for each row,
    /// and every rank has the same result: token and score have the bits of a sampler over the whole head, and so has the
    /// logit by peers. By NCCL, the logit is score minus noise. The exchange takes no part of the host, so a graph can
    /// capture the call. Every rank then runs its graph the same number of times.
    ///
    /// Parameters of single logits (temperature, masks, biases, bans, minimum lengths, penalties) cost as much as in calls
    /// that wait. Filters, log-probabilities and kept tokens depend on all logits of a row. By peers, each rank copies the
    /// logits of its shard into the memory of every rank, and every rank decides all rows with the kernels of one GPU, after
    /// [`CudaTiled::offer_logits`]. By NCCL, such calls are refused.
    ///
    /// A row without a draw has token -1, and its status is the reason. Besides the statuses of
    /// [`DeviceSampler::enqueue`](crate::DeviceSampler::enqueue):
    /// * [`LATE_RANK`](crate::abi::status::LATE_RANK): by peers, a rank did not make the call within the exchange's time
    ///   limit. The group is then unusable: all rows of later calls have this status at once.
    /// * [`OTHER_CALL`](crate::abi::status::OTHER_CALL): a rank made another call: another number of rows, seed,
    ///   position or temperature, other arrays, or hidden states of another type. A rank that skips a call meets the
    ///   draws of the skipped call in its next call, and has this status if its rows are others. Calls with filters,
    ///   log-probabilities or kept tokens also compare filters and the contents of masks and lists.
    ///
    /// [`failed_rank`](crate::abi::failed_rank) reads the rank from these statuses. By NCCL, the GPU waits for a missing
    /// rank without limit, until [`CudaExchange::wait`] aborts the exchange.
    ///
    /// # Errors
    /// * [`CudaError::NotEnqueued`]: a canonical plan; by NCCL, a filter, log-probabilities or kept tokens.
    /// * [`CudaError::NotSharded`]: the exchange is of another GPU, or has not connected the logits that the call needs.
    /// * The errors of [`DeviceSampler::enqueue`](crate::DeviceSampler::enqueue).
    ///
    /// A rank that has an error takes no part in the call.
    pub fn enqueue_sharded(&mut self, exchange: &mut CudaExchange, call: &ColumnCall<'_>) -> Result<(), CudaError> {
        self.0.enqueue_sharded(exchange, call)
    }
}

impl_sampler!(
    CudaTiled,
    fn scan(&mut self) -> Option<&mut dyn Scan> {
        // A canonical plan computes canonical logits of near ties only, so it has no scan.
        (!self.0.plan.canonical).then_some(&mut self.0)
    }
);
