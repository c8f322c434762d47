//! Calls of ranks that do not wait: hidden states, parameters and results are in device memory, and the GPUs exchange
//! the draws.
//!
//! Every rank encodes the rows with the adjusted tokens of the whole vocabulary. So a row with too many adjusted tokens
//! is invalid on all ranks, and the encoded rows, which the exchange compares, do not depend on the shard.

use super::HeadSampler;
use super::call_mark::mark_of;
use super::kernels::max_launch_draws;
use crate::abi::{RowColumns, TokenColumns};
use crate::device::{ListedTokens, RowFeatures};
use crate::error::CudaError;
use crate::exchange::cuda_exchange::CudaExchange;
use crate::sampler::{ColumnCall, CudaTiled};
use crate::selection::{DeviceLogprobs, FilterKinds, LogitFilters, rows_within};
use cudarc::driver::CudaStream;
use flash_sampling_core::Knob;

const NOT_PREPARED: CudaError = CudaError::NotSharded { reason: "filters and log-probabilities are not prepared" };

/// The kernels of calls with filters, log-probabilities or kept tokens, over the gathered logits of all ranks.
#[derive(Debug)]
pub(super) struct GatheredKernels {
    filters: LogitFilters,
    logprobs: DeviceLogprobs,
}

/// Calls over the shards of all ranks that do not wait.
impl CudaTiled<'_> {
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
        if let Some(kernels) = &mut self.0.kernels {
            kernels.fused.prepare(RowFeatures::Any)?;
            if exchange.is_by_peers() {
                kernels.fused.prepare_fan_out()?;
            }
        }
        self.0.reserve_columns(max_adjusted)
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
        let sampler = &mut self.0;
        let (rows, vocab_size) = (sampler.max_gathered(), sampler.description.shape.vocab_size);
        let Some(peers) = exchange.gathering_peers() else {
            return Err(CudaError::NotSharded { reason: "NCCL gathers no logits" });
        };
        if sampler.gathered.is_none() {
            let filters = LogitFilters::new(Some(vocab_size), rows, &sampler.device)?;
            let logprobs = DeviceLogprobs::new(rows, vocab_size as usize, &sampler.device)?;
            sampler.gathered = Some(GatheredKernels { filters, logprobs });
        }
        let matrix = peers.offer_logits(rows, vocab_size)?;
        let message = matrix.descriptor();
        exchange.offer(matrix);
        Ok(message)
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
        // Filters, log-probabilities and kept tokens depend on all logits of a row, which only peers gather.
        let of_whole_rows = whole_row(columns, out);
        let refused = of_whole_rows.filter(|_| !exchange.is_by_peers());
        match self.0.description.plan.canonical.then_some(Knob::Canonical).or(refused) {
            Some(knob) => Err(CudaError::NotEnqueued { knob }),
            None => Ok(of_whole_rows.is_some()),
        }
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
        let (hidden, columns, out) = (call.hidden(), call.columns(), call.out());
        let gathers = self.check_enqueue_sharded(exchange, columns, out)?;
        columns.check()?;
        out.check()?;
        self.0.check_gpus(exchange, call.queue().stream())?;
        CudaError::check_limits(&[("rows", hidden.rows, self.0.description.plan.max_rows)])?;
        if hidden.cols != self.0.description.shape.input {
            return Err(CudaError::Layout { what: "hidden states", reason: "their width is not that of the weight" });
        }
        if self.0.columns.is_none() {
            self.prepare_enqueue_sharded(exchange, 0)?;
        }
        match gathers {
            true => self.0.enqueue_gathered(exchange, call),
            false => self.0.enqueue_draws(exchange, call),
        }
    }
}

impl HeadSampler<'_> {
    /// Enqueues a call whose parameters act on single logits.
    fn enqueue_draws(&mut self, exchange: &mut CudaExchange, call: &ColumnCall<'_>) -> Result<(), CudaError> {
        let (hidden, columns, out, queue) = (call.hidden(), call.columns(), call.out(), call.queue());
        let listed = self.listed(false);
        let (Some(encoder), kernels) = (&mut self.columns, &mut self.kernels) else { return Ok(()) };
        let (count, max_rows, max_adjusted) = (hidden.rows, exchange.max_rows(), encoder.max_adjusted());
        encoder.enqueue(queue, (columns, out), (count, max_rows), &listed, |rows, encoded| {
            let mark = mark_of((columns, None), (hidden.dtype, max_adjusted), (rows.start, count));
            let (states, to) = (hidden.rows(rows.clone()), (encoded.rows, encoded.draws));
            let shard = kernels.as_mut().map(|kernels| (&mut kernels.fused, &states, columns.features()));
            exchange.enqueue(queue, shard, (to, rows.len()), mark)
        })
    }

    /// Enqueues a call with filters, log-probabilities or kept tokens. Every rank decides them from the logits of all
    /// ranks.
    fn enqueue_gathered(&mut self, exchange: &mut CudaExchange, call: &ColumnCall<'_>) -> Result<(), CudaError> {
        let (hidden, columns, out, queue) = (call.hidden(), call.columns(), call.out(), call.queue());
        let (listed, vocab_size) = (self.listed(true), self.description.shape.vocab_size);
        // An exchange may have been connected for another sampler.
        let of_plan = (self.max_gathered(), vocab_size);
        let to = exchange.gathered().filter(|to| (to.rows, to.vocab_size) == of_plan).ok_or(NOT_PREPARED)?;
        let GatheredKernels { filters, logprobs } = self.gathered.as_mut().ok_or(NOT_PREPARED)?;
        let (Some(encoder), kernels) = (&mut self.columns, &mut self.kernels) else { return Ok(()) };
        let none = FilterKinds::new(false, false, columns.features());
        let (kinds, whole) = (columns.filter_kinds().unwrap_or(none), whole_row(columns, out));
        let (count, max_rows, max_adjusted) = (hidden.rows, to.rows.min(exchange.max_rows()), encoder.max_adjusted());
        let (invalid, contents) = (encoder.invalid(), encoder.contents());
        encoder.enqueue(queue, (columns, out), (count, max_rows), &listed, |rows, encoded| {
            let mark = mark_of((columns, whole), (hidden.dtype, max_adjusted), (rows.start, count));
            let (states, drawn) = (hidden.rows(rows.clone()), (encoded.rows, encoded.draws));
            let shard = kernels.as_mut().map(|kernels| (&mut kernels.fused, &states, columns.features()));
            exchange.enqueue_gather(queue, shard, (drawn, rows.len()), (contents, mark))?;
            let filtered = encoded.call((to.logits, to.row_stride()), 0..vocab_size, rows.len());
            filters.enqueue(queue, filtered, kinds, true)?;
            match out.needs_logits() {
                true => logprobs.enqueue(queue, &filtered, invalid, (out, rows.start)),
                false => Ok(()),
            }
        })
    }

    /// The maximum number of rows of a launch that gathers logits, the same on every rank.
    fn max_gathered(&self) -> usize {
        max_launch_draws(&self.description.plan).min(rows_within(self.description.shape.vocab_size as usize))
    }

    /// The tokens of the lists of encoded rows.
    fn listed(&self, has_contents: bool) -> ListedTokens {
        let vocab_size = self.description.shape.vocab_size;
        ListedTokens { tokens: 0..vocab_size, vocab_size, has_contents, largest_top_k: None }
    }

    fn check_gpus(&self, exchange: &CudaExchange, stream: &CudaStream) -> Result<(), CudaError> {
        let mine = self.stream.context().ordinal();
        match () {
            () if exchange.device().context().ordinal() != mine => {
                Err(CudaError::NotSharded { reason: "the exchange is of another GPU" })
            }
            () if stream.context().ordinal() != mine => {
                Err(CudaError::Layout { what: "hidden states", reason: "they are on another GPU" })
            }
            () => Ok(()),
        }
    }
}

/// The first parameter or result of a call that depends on all logits of a row, and so on all ranks.
fn whole_row(columns: &RowColumns, out: &TokenColumns) -> Option<Knob> {
    let all = [
        (!columns.top_k.is_null(), Knob::TopK),
        (!columns.top_p.is_null(), Knob::TopP),
        (!columns.min_p.is_null(), Knob::MinP),
        (!out.kept.begin.is_null(), Knob::Kept),
        (out.needs_logits(), Knob::Logprobs),
    ];
    all.into_iter().find(|(is_present, _)| *is_present).map(|(_, knob)| knob)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::abi::{DeviceAddress, KeptColumns, LogprobColumns};

    #[test]
    fn what_depends_on_the_whole_row_is_named() {
        let none = (RowColumns::default(), TokenColumns::default());
        let (int, float) = (DeviceAddress::new(4), DeviceAddress::new(4));
        let raw = LogprobColumns { log_probs: float, ..LogprobColumns::default() };
        let kept = KeptColumns { begin: DeviceAddress::new(8), ..KeptColumns::default() };
        for ((columns, out), knob) in [
            (none, None),
            ((RowColumns { temperature: float, mask: DeviceAddress::new(4), ..none.0 }, none.1), None),
            ((RowColumns { top_k: int, ..none.0 }, none.1), Some(Knob::TopK)),
            ((RowColumns { top_p: float, ..none.0 }, none.1), Some(Knob::TopP)),
            ((RowColumns { min_p: float, ..none.0 }, none.1), Some(Knob::MinP)),
            ((none.0, TokenColumns { raw, ..none.1 }), Some(Knob::Logprobs)),
            ((none.0, TokenColumns { kept, ..none.1 }), Some(Knob::Kept)),
        ] {
            assert_eq!(whole_row(&columns, &out), knob);
        }
    }
}
