//! Calls of ranks whose GPUs exchange draws and decide filters.

use super::HeadSampler;
use super::hidden_states::HiddenStates;
use super::kernels::{HeadKernels, max_launch_draws};
use crate::abi::{Draw, RowFilters};
use crate::error::CudaError;
use crate::exchange::cuda_exchange::CudaExchange;
use crate::exchange::sharded::FilterSupport;
use crate::sampler::row_scan::{DrawItems, decide, mark_fallbacks, quick_filters, write_draws};
use crate::sampler::{CallRows, CudaTiled, DeviceHidden, DrawItem, FilterSource};
use core::mem::take;
use flash_sampling_core::backend::{Batch, Progress, Request, RowSummary, Scan, Stage, StagedError, check_call};
use flash_sampling_core::{
    DType, Description, Exactness, Knob, Knobs, Matrix, RowError, RowParams, SampleError, Samples, backend,
};

const NOT_DECIDED: CudaError = CudaError::NotSharded { reason: "ranks cannot decide the filters of a row" };
const NOT_DRAWN: CudaError = CudaError::NotSharded { reason: "a row requests more than draws" };

/// Calls over the shards of all ranks.
impl CudaTiled<'_> {
    /// Encodes the filters that this sampler supports in an exchange, for [`CudaExchange::agree`].
    pub fn encode_support(&self) -> Vec<u8> {
        let HeadSampler { description: Description { capabilities, plan, .. }, kernels, dtype, .. } = &self.0;
        let decides = !plan.canonical && capabilities.exactness == Exactness::Pathwise;
        let kernels = kernels.as_ref().filter(|_| decides);
        kernels.map_or_else(FilterSupport::default, HeadKernels::filter_support).encode(*dtype)
    }

    /// Allocates room for this many bytes of lists and masks, so [`CudaTiled::sample_sharded`] allocates nothing for
    /// them.
    ///
    /// An allocation during a call may block behind a rank that waits on the same GPU.
    ///
    /// # Errors
    /// [`CudaError::Driver`].
    pub fn reserve_lists(&mut self, bytes: usize) -> Result<(), CudaError> {
        let HeadSampler { rows, kernels, stream, .. } = &mut self.0;
        rows.staging.reserve(bytes)?;
        kernels.as_mut().map_or(Ok(()), |kernels| kernels.reserve_lists(bytes, stream))
    }

    /// Loads kernels and allocates memory for calls of [`CudaTiled::sample_sharded`] with filters.
    ///
    /// All ranks call this before any rank's first call with filters. A load during a call may block behind a rank that
    /// waits on the same GPU.
    ///
    /// # Errors
    /// [`CudaError::Compile`], [`CudaError::Driver`].
    pub fn prepare_sharded(&mut self) -> Result<(), CudaError> {
        self.0.kernels.as_mut().map_or(Ok(()), HeadKernels::prepare_sharded)
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
        let sampler = &mut self.0;
        if hidden.is_some() && sampler.description.plan.canonical {
            return Err(CudaError::Unsupported { knob: Knob::Canonical });
        }
        // Launches may still read the last hidden states.
        if sampler.hidden.take().is_some() {
            sampler.kernels.iter().for_each(HeadKernels::wait_for_reads);
        }
        if let Some(hidden) = &hidden {
            hidden.order_before(&sampler.stream)?;
        }
        sampler.hidden = hidden;
        Ok(())
    }

    /// Whether the exchange decides all valid rows of a call. Every rank has the same result.
    ///
    /// The exchange decides draws without filters, draws with min-p first or a top-k of at most 128, and draws with
    /// top-p alone if all shards begin at multiples of 4. It needs Hopper GPUs, peers, and tokens in every shard.
    pub fn can_filter_sharded(&self, exchange: &CudaExchange, rows: &[RowParams<'_>]) -> bool {
        let (support, Description { capabilities, shape, plan }) = (exchange.filters(), &self.0.description);
        let decides = |params: &RowParams<'_>| {
            let row = params.check(&[], capabilities, plan, shape.vocab_size);
            row.map_or(true, |row| filters_of(support, &row).is_some())
        };
        support.is_any() && rows.iter().all(decides)
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
        mut open: Option<&mut Vec<usize>>,
        out: &mut Samples,
    ) -> Result<(), SampleError> {
        let sampler = &mut self.0;
        // Draws without filters do not depend on the alignment.
        let is_aligned = open.is_none() || sampler.is_hidden_aligned();
        exchange.begin(input.dtype(), sampler.hidden.is_some(), is_aligned);
        out.clear();
        open.iter_mut().for_each(|open| open.clear());
        check_call(&input, rows, &sampler.description.shape, &sampler.description.plan)?;
        if exchange.device().context().ordinal() != sampler.stream.context().ordinal() {
            return Err(CudaError::NotSharded { reason: "the exchange is of another GPU" }.into());
        }
        // Filters depend on the tokens of all ranks. Adjustments act on single logits, and so on this rank alone.
        let mut of = sampler.description.clone();
        if open.is_none() {
            of.capabilities.knobs = of.capabilities.knobs.intersection(Knobs::ADJUSTMENTS);
        }
        let (mut driver, mut items) = (take(&mut sampler.driver), take(&mut sampler.scan.items));
        let mut pass = ExchangePass { sampler: &mut *sampler, exchange, items: &mut items, open };
        let sampled = driver.sample(&mut pass, &of, input, rows, out);
        (sampler.driver, sampler.scan.items) = (driver, items);
        sampled
    }
}

impl HeadSampler<'_> {
    /// Whether lists can filter hidden states at these addresses. Hidden states from the host are copied to such
    /// addresses.
    fn is_hidden_aligned(&self) -> bool {
        self.hidden.as_ref().is_none_or(|hidden| hidden.matrix().is_aligned())
    }

    /// Whether ranks can decide filters for hidden states of this type.
    fn can_filter_hidden(&self, dtype: DType) -> bool {
        dtype == self.dtype && self.is_hidden_aligned()
    }
}

/// The filters of a row, and the logits that decide them; `None` if ranks cannot decide the row.
fn filters_of(can: FilterSupport, row: &backend::Row<'_>) -> Option<(RowFilters, FilterSource)> {
    let draws_only = !row.without_replacement && !row.kept && row.logprobs.is_none() && row.raw_logprobs.is_none();
    let filters = match row.filters {
        None => RowFilters::OFF,
        Some(_) => quick_filters(row)?,
    };
    Some((filters, can.decides(&filters)?)).filter(|_| draws_only)
}

/// The only pass of a call, with all draws exchanged between the GPUs.
#[derive(Debug)]
struct ExchangePass<'s, 'w> {
    sampler: &'s mut HeadSampler<'w>,
    exchange: &'s mut CudaExchange,
    items: &'s mut DrawItems,
    /// Receives the undecided rows, in calls with filters.
    open: Option<&'s mut Vec<usize>>,
}

impl Scan for ExchangePass<'_, '_> {
    fn scan(&mut self, batch: &Batch<'_, '_>, _: &[Request<'_>], out: &mut [RowSummary]) -> Result<(), SampleError> {
        let valid = batch.rows.iter().enumerate().filter_map(|(r, row)| Some((r, row.as_ref().ok()?)));
        valid.clone().for_each(|(r, row)| out[r].begin(row));
        self.draw(batch, out)?;
        let Some(open) = &mut self.open else { return Ok(()) };
        for (r, row) in valid {
            if row.filters.is_some() {
                decide(&mut out[r]);
            }
            if out[r].progress == Progress::Open {
                open.push(r);
                out[r].progress = Progress::Summarized;
                out[r].error = Some(StagedError { stage: Stage::Transformed, error: RowError::NoFiniteLogit });
            }
        }
        Ok(())
    }
}

impl ExchangePass<'_, '_> {
    /// Makes all draws of a call: those without filters, or those from lists and then those from stored logits.
    fn draw(&mut self, batch: &Batch<'_, '_>, out: &mut [RowSummary]) -> Result<(), CudaError> {
        let (plan, support, has_filters) =
            (self.sampler.description.plan, self.exchange.filters(), self.open.is_some());
        self.items.clear();
        let DrawItems { plain, listed, by_logits, draws } = &mut *self.items;
        for (r, row) in batch.rows.iter().enumerate() {
            let Ok(row) = row else { continue };
            let (filters, from) = match has_filters {
                true => filters_of(support, row).ok_or(NOT_DECIDED)?,
                false if plan.canonical || row.without_replacement || row.logprobs.is_some() => return Err(NOT_DRAWN),
                false => (RowFilters::OFF, FilterSource::Lists),
            };
            let items = match from {
                _ if filters == RowFilters::OFF => &mut *plain,
                FilterSource::Lists => &mut *listed,
                FilterSource::Logits => &mut *by_logits,
            };
            items.extend(DrawItem::of_row(r, row, filters));
        }
        if has_filters {
            // Rows without filters share a launch with rows of either kind.
            let with_plain = if listed.is_empty() && !by_logits.is_empty() { &mut *by_logits } else { &mut *listed };
            with_plain.append(plain);
        }
        let is_decided = !has_filters || self.sampler.can_filter_hidden(batch.input.dtype());
        for (from, items) in
            [(None, plain), (Some(FilterSource::Lists), listed), (Some(FilterSource::Logits), by_logits)]
        {
            items.sort_unstable_by_key(|item| (item.row, item.draw));
            let before = self.sampler.fallback_draws();
            launch(self.sampler, self.exchange, batch, (items, from), draws)?;
            if is_decided {
                write_draws(items, draws, out);
                mark_fallbacks(items, self.sampler.fallback_draws().wrapping_sub(before) as usize, out);
            }
        }
        // The exchange's fingerprint has type and alignment, so the other ranks also leave all rows open.
        if !is_decided {
            let valid = batch.rows.iter().zip(out).filter(|(row, _)| row.is_ok());
            valid.for_each(|(_, out)| out.progress = Progress::Open);
        }
        Ok(())
    }
}

/// Makes the draws of items over the shards of all ranks.
fn launch(
    sampler: &mut HeadSampler<'_>,
    exchange: &mut CudaExchange,
    batch: &Batch<'_, '_>,
    (items, from): (&[DrawItem], Option<FilterSource>),
    draws: &mut Vec<Draw>,
) -> Result<(), CudaError> {
    let can_filter = sampler.can_filter_hidden(batch.input.dtype());
    let HeadSampler { description, stream, kernels, rows, hidden, .. } = sampler;
    let (call, queue) = (&CallRows::new(batch, description), HeadKernels::queue(stream));
    let hidden = HiddenStates::of(&batch.input, hidden.as_ref())?;
    // A rank without tokens takes part, and so does a rank that cannot filter its hidden states.
    let mut kernels = kernels.as_mut().filter(|_| from.is_none() || can_filter);
    // The draws of one launch: the same number on every rank, with or without tokens.
    let most = match from {
        None => max_launch_draws(&description.plan).min(exchange.max_rows()),
        Some(_) => exchange.filters().most,
    };
    rows.plan(items, most, hidden, draws);
    for at in 0..rows.plan.launches.len() {
        let launch = rows.plan.launches[at].clone();
        rows.stage(call, items, &launch)?;
        if from.is_none() {
            rows.staging.expect_penalties_of(batch.params);
        }
        let count = launch.slots.len();
        let exchanged = match &mut kernels {
            Some(kernels) => {
                let launched = kernels.launch(queue, rows, hidden, (&launch, 0), from, Some((exchange, batch.params)));
                let finished = launched.and_then(|()| kernels.finish(queue, count, &mut rows.results));
                finished.and_then(|()| exchange.check(&rows.results))
            }
            None => exchange.draw_nothing((rows.staging.staged(), batch.params), &mut rows.results, queue),
        };
        // The exchange counts the draws of its launch.
        exchanged.map_err(|error| match error {
            CudaError::OtherCall { rank, row: Some(slot) } => {
                let item = rows.plan.slots.get(launch.slots.start + slot).copied().flatten();
                CudaError::OtherCall { rank, row: Some(item.map_or(launch.first + slot, |i| items[i].row)) }
            }
            error => error,
        })?;
        rows.write(launch.slots, draws);
    }
    Ok(())
}
