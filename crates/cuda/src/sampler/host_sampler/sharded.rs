//! Calls of ranks whose GPUs exchange draws and decide filters.

use super::source::stage;
use super::{HostSampler, of_call};
use crate::abi::RowFilters;
use crate::error::CudaError;
use crate::exchange::cuda_exchange::CudaExchange;
use crate::exchange::sharded::FilterSupport;
use crate::sampler::row_scan::{CallRows, DrawItem, DrawItems, FilterSource, decide, quick_filters, write_draws};
use crate::sampler::uploaded_head::UploadedHead;
use core::mem::take;
use flash_sampling_core::backend::{Batch, Progress, Request, Row, RowSummary, Scan, Stage, StagedError, check_call};
use flash_sampling_core::{Capabilities, Exactness, Knobs, Matrix, RowError, RowParams, SampleError, Samples};

const NOT_DECIDED: CudaError = CudaError::NotTogether { reason: "ranks cannot decide the filters of a row" };
const NOT_DRAWN: CudaError = CudaError::NotTogether { reason: "a row requests more than draws" };

impl HostSampler<'_> {
    /// The filters that this rank supports in an exchange by peers.
    fn filter_support(&self) -> FilterSupport {
        let pathwise = self.can.exactness == Exactness::Pathwise;
        let Some(uploaded) = self.uploaded.as_ref().filter(|_| !self.plan.canonical && pathwise) else {
            return FilterSupport::default();
        };
        let (lists, masses) = uploaded.sharded_sources();
        FilterSupport { lists, masses, most: uploaded.max_sharded_draws() }
    }

    /// Encodes the filters that this rank supports, for the other ranks.
    pub(crate) fn encode_support(&self) -> Vec<u8> {
        self.filter_support().encode(self.head.weight().dtype())
    }

    /// Loads kernels and allocates memory for calls with filters.
    pub(crate) fn prepare_sharded(&mut self) -> Result<(), CudaError> {
        self.uploaded.as_mut().map_or(Ok(()), |uploaded| uploaded.prepare_sharded(&self.stream))
    }

    /// Whether ranks can decide all valid rows of a call on their GPUs. Every rank has the same result.
    pub(crate) fn can_filter_sharded(&self, can: FilterSupport, rows: &[RowParams<'_>]) -> bool {
        let (own, plan, vocab_size) = (&self.can, &self.plan, self.head.vocab_size());
        let decides = |params: &RowParams<'_>| {
            let row = params.check(&[], own, plan, vocab_size);
            row.map_or(true, |row| filters_of(can, &row).is_some())
        };
        can.is_any() && rows.iter().all(decides)
    }

    /// Draws with the other ranks of an exchange.
    ///
    /// With `open`, rows may have filters that [ranks can decide](HostSampler::can_filter_sharded). `open` receives the
    /// undecided rows, which have an error in the output. All rows are undecided if the hidden states of all ranks have
    /// another type than the weight.
    pub(crate) fn sample_with(
        &mut self,
        input: Matrix<'_>,
        rows: &[RowParams<'_>],
        exchange: &mut CudaExchange,
        mut open: Option<&mut Vec<usize>>,
        out: &mut Samples,
    ) -> Result<(), SampleError> {
        out.clear();
        open.iter_mut().for_each(|open| open.clear());
        check_call(&input, rows, &self.shape(), &self.plan)?;
        if exchange.device().context().ordinal() != self.stream.context().ordinal() {
            return Err(CudaError::NotTogether { reason: "the exchange is of another GPU" }.into());
        }
        // Filters depend on the tokens of all ranks. Adjustments act on single logits, and so on this rank alone.
        let knobs = if open.is_some() { self.can.knobs } else { self.can.knobs.intersection(Knobs::ADJUSTMENTS) };
        let can = Capabilities { knobs, ..self.can };
        let (plan, vocab_size) = (self.plan, self.head.vocab_size());
        let mut driver = take(&mut self.driver);
        let sampled = driver.sample(
            &mut ExchangePass { sampler: self, exchange, open },
            (&can, &plan, vocab_size),
            input,
            rows,
            out,
        );
        self.driver = driver;
        sampled
    }
}

/// The filters of a row, and the logits that decide them; `None` if ranks cannot decide the row.
fn filters_of(can: FilterSupport, row: &Row<'_>) -> Option<(RowFilters, FilterSource)> {
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
    sampler: &'s mut HostSampler<'w>,
    exchange: &'s mut CudaExchange,
    /// Receives the undecided rows, in calls with filters.
    open: Option<&'s mut Vec<usize>>,
}

impl Scan for ExchangePass<'_, '_> {
    fn scan(&mut self, batch: &Batch<'_, '_>, _: &[Request<'_>], out: &mut [RowSummary]) -> Result<(), SampleError> {
        let valid = batch.rows.iter().enumerate().filter_map(|(r, row)| Some((r, row.as_ref().ok()?)));
        valid.clone().for_each(|(r, row)| out[r].begin(row));
        let has_filters = self.open.is_some();
        let drawn = if has_filters { self.draw_filtered(batch, out) } else { self.draw(batch, out) };
        drawn?;
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
    /// Makes draws without filters.
    fn draw(&mut self, batch: &Batch<'_, '_>, out: &mut [RowSummary]) -> Result<(), CudaError> {
        let HostSampler { head, plan, can, stream, uploaded, staging, adjustments, scan, .. } = &mut *self.sampler;
        let (input, rows) = (&batch.input, &CallRows::new(batch, can, plan, head.vocab_size()));
        scan.items.clear();
        let DrawItems { plain: items, draws, .. } = &mut scan.items;
        for (r, row) in batch.rows.iter().enumerate() {
            let Ok(row) = row else { continue };
            if plan.canonical || row.without_replacement || row.logprobs.is_some() {
                return Err(NOT_DRAWN);
            }
            let draws = row.first_draw..row.first_draw + row.draws;
            items.extend(draws.map(|draw| DrawItem { row: r, draw, filters: RowFilters::OFF }));
        }
        // Draws of one launch: as many on every rank, with tokens or without.
        for part in items.chunks(UploadedHead::most_of(plan).min(self.exchange.max_rows())) {
            stage(staging, adjustments, head, rows, part)?;
            staging.expect_penalties_of(batch.params);
            draws.clear();
            let exchange = &mut *self.exchange;
            let drawn = match uploaded {
                Some(uploaded) => uploaded.draw(staging, input, draws, stream, Some((exchange, batch.params))),
                None => exchange.draw_nothing((staging.staged(), batch.params), draws, UploadedHead::queue(stream)),
            };
            drawn.map_err(|error| of_call(error, |at| part[at].row))?;
            write_draws(part, draws, out);
        }
        Ok(())
    }

    /// Makes all draws of a call with filters: those from lists, then those from stored logits.
    fn draw_filtered(&mut self, batch: &Batch<'_, '_>, out: &mut [RowSummary]) -> Result<(), CudaError> {
        let together = self.exchange.filters();
        let HostSampler { head, plan, can, stream, uploaded, staging, adjustments, scan, filters, .. } =
            &mut *self.sampler;
        let (input, rows) = (&batch.input, &CallRows::new(batch, can, plan, head.vocab_size()));
        scan.items.clear();
        let DrawItems { plain, listed, by_logits, draws } = &mut scan.items;
        for (r, row) in batch.rows.iter().enumerate() {
            let Ok(row) = row else { continue };
            let (filters, from) = filters_of(together, row).ok_or(NOT_DECIDED)?;
            let items = match from {
                _ if filters == RowFilters::OFF => &mut *plain,
                FilterSource::Lists => &mut *listed,
                FilterSource::Logits => &mut *by_logits,
            };
            let draws = row.first_draw..row.first_draw + row.draws;
            items.extend(draws.map(|draw| DrawItem { row: r, draw, filters }));
        }
        // Rows without filters go with rows of either kind.
        let with_plain = if listed.is_empty() && !by_logits.is_empty() { &mut *by_logits } else { &mut *listed };
        with_plain.append(plain);
        for (from, items) in [(FilterSource::Lists, listed), (FilterSource::Logits, by_logits)] {
            items.sort_unstable_by_key(|item| (item.row, item.draw));
            for part in items.chunks(together.most) {
                stage(staging, adjustments, head, rows, part)?;
                filters.clear();
                filters.extend(part.iter().map(|item| item.filters));
                let Some(uploaded) = uploaded else { return Err(NOT_DECIDED) };
                let exchange = (&mut *self.exchange, batch.params);
                draws.clear();
                let is_other = input.dtype() != head.weight().dtype();
                let drawn = match is_other {
                    false => uploaded.draw_filtered_with(staging, (filters, from), input, draws, stream, exchange),
                    true => {
                        exchange.0.draw_nothing((staging.staged(), batch.params), draws, UploadedHead::queue(stream))
                    }
                };
                drawn.map_err(|error| of_call(error, |at| part[at].row))?;
                // The fingerprint of the exchange has the type: the other ranks have this one, too, and leave all rows
                // open.
                if is_other {
                    let valid = batch.rows.iter().zip(out).filter(|(row, _)| row.is_ok());
                    valid.for_each(|(_, out)| out.progress = Progress::Open);
                    return Ok(());
                }
                write_draws(part, draws, out);
            }
        }
        Ok(())
    }
}
