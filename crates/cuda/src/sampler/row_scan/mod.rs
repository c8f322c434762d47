//! One pass over the rows of a call on a GPU.
//!
//! A [`LogitSource`] launches the kernels: a head with hidden states on the host or on the device, or existing logits.
//!
//! | request of a row | served by |
//! | --- | --- |
//! | draws | the fused kernel |
//! | draws with min-p, top-k or top-p | the fused kernel and the selection kernels; undecided rows take a second pass |
//! | log-probabilities, other filters, draws without replacement, canonical draws, raw logits | stored logits |

mod draws;
mod scan_row;
mod source;
mod stored_scan;

use crate::abi::RowFilters;
use crate::device::Device;
use crate::error::CudaError;
use crate::first_use::get_or_make;
use crate::selection::StoredRows;
use core::mem::take;
use cudarc::driver::CudaStream;
use draws::bad_logit;
pub(crate) use draws::{DrawItems, candidate, decide, mark_fallbacks, quick_filters, write_draws};
use flash_sampling_core::backend::{Batch, Progress, Request, RowSummary, Scan, Stage, reuse_vec};
use flash_sampling_core::{Description, Exactness, SampleError, backend};
pub(crate) use scan_row::ScanRow;
pub(crate) use source::{CallRows, DrawItem, FilterSource, LogitSource, idle};
use std::sync::Arc;
pub(crate) use stored_scan::{StoredQueries, StoredScan};

/// Marks a row that was summarized without stored logits.
const NOT_STORED: usize = usize::MAX;

/// The memory of passes, reused between calls.
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

/// The sampler's description and GPU, for the kernels of a pass that do not belong to the source.
#[derive(Debug)]
pub(crate) struct PassPlace<'s> {
    pub(crate) of: &'s Description,
    pub(crate) device: &'s Arc<Device>,
    pub(crate) stream: &'s Arc<CudaStream>,
    /// Whether rows of [`Request::Decide`] get log Z without masses. Such rows cannot be merged with other shards.
    pub(crate) finishes_log_z: bool,
}

impl PassPlace<'_> {
    /// Whether a row without filters is drawn from stored logits. A sampler that is not pathwise draws with its own
    /// kernels.
    fn draws_from_stored(&self, row: &backend::Row<'_>) -> bool {
        let needs = self.of.plan.canonical || row.without_replacement || row.logprobs.is_some();
        needs && self.of.capabilities.exactness == Exactness::Pathwise
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
        let rows = &CallRows::new(batch, self.place.of);
        // `requests` may have more entries than rows.
        let requests = &requests[..batch.rows.len()];
        if requests.iter().any(Request::is_overview) {
            self.scan.held.clear();
        }
        for ((row, request), out) in batch.rows.iter().zip(requests).zip(&mut *out) {
            if let (Ok(row), false) = (row, *request == Request::Skip) {
                out.begin(row);
            }
        }
        self.draw(rows, requests, out)?;
        let scanned = self.scan_stored(rows, requests, out);
        if scanned.is_err() {
            self.scan.held.clear();
        }
        Ok(scanned?)
    }
}

impl<S: LogitSource> SourcePass<'_, S> {
    /// Runs the launches for draws that need no stored logits.
    fn draw(
        &mut self,
        rows: &CallRows<'_, '_>,
        requests: &[Request<'_>],
        out: &mut [RowSummary],
    ) -> Result<(), CudaError> {
        let SourcePass { source, place, scan } = self;
        scan.items.clear();
        let DrawItems { plain, listed, by_logits, draws } = &mut scan.items;
        let most = source.max_filtered();
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
            let fallbacks = source.draw(rows, plain, None, draws)?;
            write_draws(plain, draws, out);
            mark_fallbacks(plain, fallbacks, out);
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
                let fallbacks = source.draw(rows, items, Some(from), draws)?;
                write_draws(items, draws, out);
                mark_fallbacks(items, fallbacks, out);
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
            let mut members = reuse_vec(take(&mut self.scan.members));
            for (r, ((row, &request), out)) in rows.batch.rows.iter().zip(requests).zip(&mut *out).enumerate() {
                let Ok(row) = *row else { continue };
                let draws = self.place.draws_from_stored(&row);
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
                    let finishes_log_z = self.place.finishes_log_z && request == Request::Decide;
                    members.push(ScanRow { at: r, slot: 0, params, row, request, draws, finishes_log_z, bound, out });
                }
            }
            let scanned = if members.is_empty() { Ok(()) } else { self.store(rows, &mut members, is_raw) };
            self.scan.members = reuse_vec(members);
            scanned?;
        }
        Ok(())
    }

    /// Stores the logits of rows in batches, unless they are already stored, and summarizes each batch.
    fn store(&mut self, rows: &CallRows<'_, '_>, members: &mut [ScanRow<'_>], is_raw: bool) -> Result<(), CudaError> {
        let SourcePass { source, place, scan } = self;
        let RowScan { queries, stored, held, holds_raw, items: DrawItems { draws, .. }, .. } = &mut **scan;
        let PassPlace { of: Description { capabilities, shape, plan }, device, stream, .. } = place;
        let stored = get_or_make(stored, || StoredRows::new(shape.tokens.clone(), plan.max_rows, device, stream))?;
        for part in members.chunks_mut(stored.rows().min(source.max_stored())) {
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
                stored.upload_requests()?;
                inputs = source.store(rows, held, is_raw, stored, draws)?.filter(|_| plan.canonical);
                for (slot, (member, draw)) in part.iter_mut().zip(&*draws).enumerate() {
                    member.slot = slot;
                    if stored.requests()[slot].stores == 0 {
                        held[slot] = NOT_STORED;
                    }
                    // The mask may hide a bad raw logit. The transformed logits have reported all other bad logits.
                    member.out.error = bad_logit(draw).filter(|_| !is_raw);
                    member.out.is_fallback |= capabilities.shadow;
                    if plan.canonical {
                        member.bound = source.score_bound(rows, member.at)?;
                    } else if source.stores_draws() && !is_raw {
                        member.take_draw(draw);
                    }
                }
            }
            let mut scan = StoredScan { part, memory: queries, stored, canonical: inputs.as_ref() };
            if is_raw { scan.find_raw() } else { scan.find() }?;
        }
        Ok(())
    }
}
