//! One pass over the rows of a call on a GPU.
//!
//! A [`LogitSource`] launches the kernels: a head with hidden states on the host or on the device, or existing logits.
//!
//! | request of a row | served by |
//! | --- | --- |
//! | draws | the fused kernel |
//! | draws with min-p, top-k or top-p | the fused kernel and the selection kernels; undecided rows take a second pass |
//! | log-probabilities, other filters, draws without replacement, canonical draws, raw logits | stored logits |

mod stored_scan;

use crate::abi::{Draw, RowFilters, status};
use crate::error::CudaError;
use crate::sampler::staging::Staging;
use crate::selection::queries::CanonicalInputs;
use crate::selection::stored_rows::StoredRows;
use core::mem::take;
use core::ops::Range;
use cudarc::driver::CudaStream;
use flash_sampling_core::backend::error_bounds::RowScoreBound;
use flash_sampling_core::backend::{Batch, CheckedRow, Progress, Request, RowSummary};
use flash_sampling_core::sampler::reuse_vec;
use flash_sampling_core::{Adjustments, Candidate, Capabilities, Exactness, Plan, RowError, RowParams, Winner, params};
use flash_sampling_core::{SampleError, Scan, Stage, StagedError};
use std::sync::Arc;
pub(crate) use stored_scan::{ScanRow, StoredQueries, StoredScan};

/// The rows of a call.
#[derive(Debug)]
pub(crate) struct CallRows<'c, 'a> {
    pub(crate) batch: &'c Batch<'c, 'a>,
    /// A row without transforms: its transformed logits are its raw logits.
    raw: CheckedRow<'static>,
}

/// The parameters of a row without transforms: its transformed logits are its raw logits.
pub(crate) fn idle() -> RowParams<'static> {
    RowParams { temperature: 0.0, ..RowParams::default() }
}

impl<'c, 'a> CallRows<'c, 'a> {
    pub(crate) fn new(batch: &'c Batch<'c, 'a>, can: &Capabilities, plan: &Plan, vocab_size: u32) -> Self {
        CallRows { batch, raw: idle().check(&[], can, plan, vocab_size) }
    }

    /// A row with its adjustments of `tokens`. Adjustments are collected one row at a time, so staging finds them in
    /// the processor's cache.
    pub(crate) fn adjusted<'r>(
        &self,
        r: usize,
        adjustments: &'r mut Adjustments,
        tokens: Range<u32>,
    ) -> Result<params::Row<'r>, CudaError>
    where
        'a: 'r,
    {
        adjustments.collect_within([&self.batch.params[r]], tokens);
        let row = self.batch.rows[r].map_err(|_| UNCHECKED)?;
        Ok(row.with_adjustments(adjustments.row(0)))
    }

    /// Stages the first draw of a row, or with `is_raw` a greedy draw without the row's transforms.
    pub(crate) fn stage_first(
        &self,
        r: usize,
        is_raw: bool,
        adjustments: &mut Adjustments,
        staging: &mut Staging,
    ) -> Result<(), CudaError> {
        if is_raw {
            return staging.push_of(r, &idle(), &self.raw()?, [0]);
        }
        let row = self.adjusted(r, adjustments, staging.tokens())?;
        staging.push_of(r, &self.batch.params[r], &row, [row.first_draw])
    }

    /// A row without transforms.
    pub(crate) fn raw(&self) -> Result<params::Row<'static>, CudaError> {
        self.raw.map_err(|_| UNCHECKED)
    }
}

/// In place of a row that was summarized, but whose logits were not stored.
const NOT_STORED: usize = usize::MAX;

const UNCHECKED: CudaError = CudaError::Corrupt { what: "a row that is not valid" };

/// A draw of a row, for a kernel.
#[derive(Clone, Copy, Debug)]
pub(crate) struct DrawItem {
    pub(crate) row: usize,
    pub(crate) draw: u32,
    pub(crate) filters: RowFilters,
}

impl DrawItem {
    /// The draws of a row.
    pub(crate) fn of_row(r: usize, row: &params::Row<'_>, filters: RowFilters) -> impl Iterator<Item = DrawItem> {
        (row.first_draw..row.first_draw + row.draws).map(move |draw| DrawItem { row: r, draw, filters })
    }
}

/// The logits that a launch filters.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum FilterSource {
    /// Lists of the largest logits.
    Lists,
    /// The stored logits.
    Logits,
}

/// The kernels that compute the logits of a call and draw from them.
pub(crate) trait LogitSource {
    /// Draws without filters. The items have ascending rows, and each item has one result.
    fn draw(&mut self, rows: &CallRows<'_, '_>, items: &[DrawItem], draws: &mut Vec<Draw>) -> Result<(), CudaError>;

    /// The maximum number of draws in a launch with filters. If it is 0, filters use stored logits.
    fn most_filtered(&self) -> usize {
        0
    }

    /// Whether the source can filter by lists of the largest logits.
    fn has_lists(&self) -> bool {
        false
    }

    /// Draws with filters. The items have ascending rows, and each item has one result. With [`FilterSource::Lists`],
    /// all filters are [listed](RowFilters::is_listed) or off.
    fn draw_filtered(
        &mut self,
        _rows: &CallRows<'_, '_>,
        _items: &[DrawItem],
        _from: FilterSource,
        draws: &mut Vec<Draw>,
    ) -> Result<(), CudaError> {
        draws.clear();
        Ok(())
    }

    /// The maximum number of rows in a call of [`LogitSource::store`].
    fn most_stored(&self) -> usize;

    /// Stores and summarizes the logits of ascending rows, and waits. The logits, transformed or raw, go to the first
    /// rows of `stored`. Writes one draw per row, with the row's first invalid logit if there is one. Returns the
    /// inputs of the logits, for a canonical plan.
    fn store(
        &mut self,
        rows: &CallRows<'_, '_>,
        which: &[usize],
        is_raw: bool,
        stored: &mut StoredRows,
        draws: &mut Vec<Draw>,
    ) -> Result<Option<CanonicalInputs>, CudaError>;

    /// Whether [`LogitSource::store`] makes the first draw of each row.
    fn stores_draws(&self) -> bool {
        false
    }

    /// The error bound of a row's scores, in a canonical plan.
    fn score_bound(&mut self, _rows: &CallRows<'_, '_>, _r: usize) -> Result<Option<RowScoreBound>, CudaError> {
        Ok(None)
    }
}

/// The draws of a pass, grouped by launch.
#[derive(Debug, Default)]
pub(crate) struct DrawItems {
    /// Draws without filters.
    pub(crate) plain: Vec<DrawItem>,
    /// Draws with filters that lists may decide.
    pub(crate) listed: Vec<DrawItem>,
    /// Draws with filters that need stored logits.
    pub(crate) by_logits: Vec<DrawItem>,
    /// The results of a launch.
    pub(crate) draws: Vec<Draw>,
}

impl DrawItems {
    pub(crate) fn clear(&mut self) {
        [&mut self.plain, &mut self.listed, &mut self.by_logits].into_iter().for_each(Vec::clear);
    }
}

/// Runs the passes of calls. Reuses its memory between calls.
#[derive(Debug, Default)]
pub(crate) struct RowScan {
    pub(crate) items: DrawItems,
    /// The rows of a pass over stored logits.
    members: Vec<ScanRow<'static>>,
    queries: StoredQueries,
    /// Allocated for the first row that needs stored logits.
    stored: Option<StoredRows>,
    /// The rows with stored logits or [`NOT_STORED`], and whether the logits are raw. Valid for further passes over the
    /// rows of the same call.
    held: Vec<usize>,
    holds_raw: bool,
}

/// Converts a kernel's draw to a candidate, or to the row's error.
pub(crate) fn candidate(draw: &Draw) -> Result<Candidate, RowError> {
    match draw.status {
        status::DRAWN => Ok(Candidate { winner: Winner::new(draw.score, draw.token), logit: draw.logit }),
        status::NAN => Err(RowError::NaN { token: draw.token }),
        status::POSITIVE_INFINITY => Err(RowError::PositiveInfinity { token: draw.token }),
        _ => Err(RowError::NoFiniteLogit),
    }
}

/// The row's bad logit, if any. A row without a finite logit is no error: other shards may have finite logits.
pub(crate) fn bad_logit(draw: &Draw) -> Option<StagedError> {
    let error = candidate(draw).err().filter(RowError::is_bad_logit)?;
    let stage = if draw.score == 0.0 { Stage::Raw } else { Stage::Transformed };
    Some(StagedError { stage, error })
}

/// The sampler's description and GPU, for the kernels of a pass that do not belong to the source.
#[derive(Debug)]
pub(crate) struct PassPlace<'s> {
    pub(crate) can: &'s Capabilities,
    pub(crate) plan: &'s Plan,
    pub(crate) tokens: Range<u32>,
    pub(crate) vocab_size: u32,
    pub(crate) device: &'s Arc<crate::device::gpu::Device>,
    pub(crate) stream: &'s Arc<CudaStream>,
    /// Whether rows of [`Request::Decide`] get log Z without masses. Such rows cannot be merged with other shards.
    pub(crate) finishes_log_z: bool,
}

impl PassPlace<'_> {
    /// Whether a row without filters is drawn from stored logits. A sampler that is not pathwise draws with its own
    /// kernels.
    fn draws_from_stored(&self, row: &params::Row<'_>) -> bool {
        let needs = self.plan.canonical || row.without_replacement || row.logprobs.is_some();
        needs && self.can.exactness == Exactness::Pathwise
    }
}

/// The filters of a row, if the selection kernels support them and the row requests only draws.
pub(crate) fn quick_filters(row: &params::Row<'_>) -> Option<RowFilters> {
    let draws_only = !row.kept && !row.without_replacement && row.logprobs.is_none();
    row.filters.as_ref().filter(|_| draws_only).and_then(RowFilters::of)
}

impl RowScan {
    /// Runs one pass; see [`Scan`](flash_sampling_core::Scan).
    pub(crate) fn scan(
        &mut self,
        source: &mut impl LogitSource,
        place: &PassPlace<'_>,
        batch: &Batch<'_, '_>,
        requests: &[Request<'_>],
        out: &mut [RowSummary],
    ) -> Result<(), CudaError> {
        let rows = &CallRows::new(batch, place.can, place.plan, place.vocab_size);
        // `requests` may have more entries than rows.
        let requests = &requests[..batch.rows.len()];
        if requests.iter().any(Request::is_overview) {
            self.held.clear();
        }
        for ((row, request), out) in batch.rows.iter().zip(requests).zip(&mut *out) {
            if let (Ok(row), false) = (row, *request == Request::Skip) {
                out.begin(row);
            }
        }
        self.draw(source, place, rows, requests, out)?;
        let scanned = self.scan_stored(source, place, rows, requests, out);
        if scanned.is_err() {
            self.held.clear();
        }
        scanned
    }

    /// Runs the launches for draws that need no stored logits.
    fn draw(
        &mut self,
        source: &mut impl LogitSource,
        place: &PassPlace<'_>,
        rows: &CallRows<'_, '_>,
        requests: &[Request<'_>],
        out: &mut [RowSummary],
    ) -> Result<(), CudaError> {
        self.items.clear();
        let DrawItems { plain, listed, by_logits, draws } = &mut self.items;
        let most = source.most_filtered();
        for (r, (row, request)) in rows.batch.rows.iter().zip(requests).enumerate() {
            let (Ok(row), true) = (row, request.is_overview()) else { continue };
            let quick = quick_filters(row).filter(|_| most > 0 && *request == Request::Decide);
            let (items, filters) = match quick {
                Some(filters) if filters.is_listed() && source.has_lists() => (&mut *listed, filters),
                Some(filters) => (&mut *by_logits, filters),
                None if row.filters.is_some() || place.draws_from_stored(row) => continue,
                None => (&mut *plain, RowFilters::OFF),
            };
            items.extend(DrawItem::of_row(r, row, filters));
        }
        // Every launch reads the weight, so all draws share one launch if they fit.
        let filtered = listed.len() + by_logits.len();
        if filtered > 0 && plain.len() + filtered <= most {
            let items = if by_logits.is_empty() { &mut *listed } else { &mut *by_logits };
            items.append(plain);
            if !by_logits.is_empty() {
                by_logits.append(listed);
            }
        }
        if !plain.is_empty() {
            source.draw(rows, plain, draws)?;
            write_draws(plain, draws, out);
        }
        for from in [FilterSource::Lists, FilterSource::Logits] {
            let items = if from == FilterSource::Lists { &mut *listed } else { &mut *by_logits };
            items.sort_unstable_by_key(|item| (item.row, item.draw));
            for item in &*items {
                let out = &mut out[item.row];
                if out.progress == Progress::Open {
                    out.draws.clear();
                    out.passes += 1;
                    out.progress = Progress::Summarized;
                }
            }
            if !items.is_empty() {
                source.draw_filtered(rows, items, from, draws)?;
                write_draws(items, draws, out);
            }
            if from == FilterSource::Lists {
                by_logits.extend(listed.iter().filter(|item| out[item.row].progress == Progress::Open));
            }
        }
        let filtered = listed.iter().chain(&*by_logits).filter(|item| item.filters != RowFilters::OFF);
        filtered.for_each(|item| decide(&mut out[item.row]));
        Ok(())
    }

    /// Serves the requests that need stored logits, in batches of rows that fit into memory.
    fn scan_stored(
        &mut self,
        source: &mut impl LogitSource,
        place: &PassPlace<'_>,
        rows: &CallRows<'_, '_>,
        requests: &[Request<'_>],
        out: &mut [RowSummary],
    ) -> Result<(), CudaError> {
        for (r, (row, request)) in rows.batch.rows.iter().zip(requests).enumerate() {
            let of_filters = matches!(request, Request::PrefixMass { .. } | Request::List { .. });
            if of_filters && row.is_ok_and(|row| row.filters.is_none()) {
                out[r].refuse();
            }
        }
        for is_raw in [false, true] {
            let mut members = reuse_vec(take(&mut self.members));
            for (r, ((row, &request), out)) in rows.batch.rows.iter().zip(requests).zip(&mut *out).enumerate() {
                let Ok(row) = *row else { continue };
                let draws = place.draws_from_stored(&row);
                let needs = match request {
                    Request::Skip => false,
                    Request::Logits { stage, .. } | Request::PrefixCount { stage, .. } => {
                        is_raw == (stage == Stage::Raw)
                    }
                    _ if is_raw => request.is_overview() && row.raw_logprobs.is_some(),
                    _ => {
                        out.progress == Progress::Summarized
                            && (draws || row.filters.is_some() || row.logprobs.is_some())
                    }
                };
                if needs && out.progress != Progress::Open && out.error.is_none() {
                    let (params, bound) = (&rows.batch.params[r], None);
                    let finishes_log_z = place.finishes_log_z && request == Request::Decide;
                    members.push(ScanRow { at: r, slot: 0, params, row, request, draws, finishes_log_z, bound, out });
                }
            }
            let scanned =
                if members.is_empty() { Ok(()) } else { self.store(source, place, rows, &mut members, is_raw) };
            self.members = reuse_vec(members);
            scanned?;
        }
        Ok(())
    }

    /// Stores the logits of rows in batches, unless they are already stored, and summarizes each batch.
    fn store(
        &mut self,
        source: &mut impl LogitSource,
        place: &PassPlace<'_>,
        rows: &CallRows<'_, '_>,
        members: &mut [ScanRow<'_>],
        is_raw: bool,
    ) -> Result<(), CudaError> {
        let RowScan { queries, stored, held, holds_raw, items: DrawItems { draws, .. }, .. } = self;
        let stored =
            StoredRows::made_in(stored, place.tokens.clone(), place.plan.max_rows, place.device, place.stream)?;
        for part in members.chunks_mut(stored.rows().min(source.most_stored())) {
            let slot = |r: usize| held.iter().position(|&held| held == r).filter(|_| *holds_raw == is_raw);
            let mut inputs = None;
            if !part.iter_mut().all(|member| slot(member.at).map(|slot| member.slot = slot).is_some()) {
                held.clear();
                held.extend(part.iter().map(|member| member.at));
                *holds_raw = is_raw;
                stored.requests().clear();
                stored
                    .requests()
                    .extend(part.iter().map(|member| member.summary_request(is_raw, source.stores_draws())));
                inputs = source.store(rows, held, is_raw, stored, draws)?.filter(|_| place.plan.canonical);
                for (slot, (member, draw)) in part.iter_mut().zip(&*draws).enumerate() {
                    member.slot = slot;
                    if stored.requests()[slot].stores == 0 {
                        held[slot] = NOT_STORED;
                    }
                    // The mask may hide a bad raw logit. The transformed logits have reported all other bad logits.
                    member.out.error = bad_logit(draw).filter(|_| !is_raw);
                    if place.plan.canonical {
                        member.bound = source.score_bound(rows, member.at)?;
                    } else if source.stores_draws() && !is_raw {
                        member.take_draw(draw);
                    }
                }
            }
            let mut scan = StoredScan::new(part, queries, stored, inputs.as_ref(), place.stream);
            if is_raw { scan.find_raw() } else { scan.find() }?;
        }
        Ok(())
    }
}

/// The passes of a call over a source of logits.
#[derive(Debug)]
pub(crate) struct SourcePass<'s, S> {
    pub(crate) source: S,
    pub(crate) place: PassPlace<'s>,
    pub(crate) scan: &'s mut RowScan,
}

impl<S: LogitSource> Scan for SourcePass<'_, S> {
    fn scan(
        &mut self,
        batch: &Batch<'_, '_>,
        requests: &[Request<'_>],
        out: &mut [RowSummary],
    ) -> Result<(), SampleError> {
        Ok(self.scan.scan(&mut self.source, &self.place, batch, requests, out)?)
    }
}

/// Writes the draws of rows, or the bad logits of rows.
pub(crate) fn write_draws(items: &[DrawItem], draws: &[Draw], out: &mut [RowSummary]) {
    for (item, draw) in items.iter().zip(draws) {
        let out = &mut out[item.row];
        match bad_logit(draw) {
            Some(error) => out.error = Some(error),
            None if draw.status == status::UNDECIDED => out.progress = Progress::Open,
            None => out.draws.extend(candidate(draw)),
        }
    }
}

/// Turns the draws of a row with filters into the row's result, unless the row is undecided.
pub(crate) fn decide(out: &mut RowSummary) {
    if out.progress == Progress::Summarized {
        out.progress = Progress::Decided;
        out.result.begin();
        core::mem::swap(&mut out.result.draws, &mut out.draws);
        let is_drawn = !out.result.draws.is_empty();
        out.result.outcome = Some(if is_drawn { Ok(()) } else { Err(RowError::NoFiniteLogit) });
    }
}
