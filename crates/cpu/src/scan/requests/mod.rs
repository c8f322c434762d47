//! Serves the requests of a scan: one pass for rows of every kind, and the summaries of its rows.

#[cfg(test)]
mod tests;

use crate::dot::Dot;
use crate::isa::Isa;
use crate::scan::engine::Engine;
use crate::scan::filter_state::PassKind;
use crate::scan::finish::Summary;
use crate::scan::packed_input::PackedInput;
use crate::scan::parallel_adjustments::ParallelAdjustments;
use crate::scan::row_state::RowState;
use crate::scan::tile::{Planned, Source};
use core::ops::Range;
use flash_sampling_core::backend::selection::{LIST_BYTES, PrefixMass, SummarySpec};
use flash_sampling_core::backend::{
    Batch, Candidate, IndexedAdjustments, Progress, Request, Row, RowSummary, Stage, by_logit_rank,
};
use flash_sampling_core::{Head, Matrix, RowError};

/// The source of a call's logits: a head and hidden states, or existing logits.
pub(crate) trait Logits {
    /// The tokens that have logits.
    fn tokens(&self) -> Range<u32>;

    /// Size of the whole vocabulary.
    fn vocab_size(&self) -> u32;

    /// Whether calls of this number of rows and draws are faster with upper bounds of logits.
    fn has_bounds(&self, _rows: usize, _draws: usize) -> bool {
        false
    }

    /// Whether small calls read a shadow of the weight.
    fn has_shadow(&self) -> bool {
        false
    }

    /// The logits of some rows of the input, ascending; or, if `with_bounds` and if all rows have them, their upper bounds.
    fn source<'s>(&'s mut self, isa: Isa, input: Matrix<'s>, rows: &'s [usize], with_bounds: bool) -> Source<'s>;

    /// Returns the largest gap below the best score of a canonical candidate.
    fn slack(&mut self, _row: &Row<'_>, _input: &Matrix<'_>, _r: usize) -> f32 {
        0.0
    }

    /// Writes the result of a row without filters to `out`, which [`RowSummary::begin`] prepared.
    fn write(&mut self, row: &Row<'_>, _input: &Matrix<'_>, _r: usize, summary: &Summary<'_>, out: &mut RowSummary) {
        summary.write(row, out);
    }
}

/// A head and its packed hidden states.
#[derive(Debug)]
pub(crate) struct HeadLogits<'w> {
    pub(crate) head: Head<'w>,
    pub(crate) hidden: PackedInput,
}

impl HeadLogits<'_> {
    /// The matmul with packed hidden states.
    pub(crate) fn packed(&self, dot: Dot) -> Source<'_> {
        self.hidden.source(&self.head, dot)
    }
}

impl Logits for HeadLogits<'_> {
    fn tokens(&self) -> Range<u32> {
        self.head.tokens()
    }

    fn vocab_size(&self) -> u32 {
        self.head.vocab_size()
    }

    fn has_bounds(&self, rows: usize, draws: usize) -> bool {
        self.hidden.has_bounds(&self.head, rows, draws)
    }

    fn has_shadow(&self) -> bool {
        self.head.shadow().is_some() && self.hidden.can_have_bounds()
    }

    fn source<'s>(&'s mut self, isa: Isa, input: Matrix<'s>, rows: &'s [usize], with_bounds: bool) -> Source<'s> {
        let (dot, has_bounds) = self.hidden.pack_rows(isa, &self.head, &input, rows, with_bounds);
        if has_bounds { self.hidden.source_of_bounds(&self.head, dot) } else { self.packed(dot) }
    }

    fn slack(&mut self, row: &Row<'_>, input: &Matrix<'_>, r: usize) -> f32 {
        self.hidden.slack(&self.head, row, input, r)
    }

    fn write(&mut self, row: &Row<'_>, input: &Matrix<'_>, r: usize, summary: &Summary<'_>, out: &mut RowSummary) {
        self.hidden.write_canonical(&self.head, row, input, r, summary, out);
    }
}

/// Existing logits with `vocab_size` columns.
#[derive(Debug)]
pub(crate) struct ExistingLogits {
    pub(crate) vocab_size: u32,
}

impl Logits for ExistingLogits {
    fn tokens(&self) -> Range<u32> {
        0..self.vocab_size
    }

    fn vocab_size(&self) -> u32 {
        self.vocab_size
    }

    fn source<'s>(&'s mut self, _: Isa, input: Matrix<'s>, rows: &'s [usize], _: bool) -> Source<'s> {
        Source::Logits { logits: input, rows: Some(rows) }
    }
}

/// With a larger slack of canonical candidates, in nats, nearly every token may be one.
const WIDEST_SLACK: f32 = 2.0;

/// A token with a requested logit. Sorted by token, so that one evaluation serves all rows.
#[derive(Clone, Copy, Debug)]
pub(crate) struct RequestedLogit {
    token: u32,
    row: usize,
    /// The index of the token in the request.
    at: usize,
    logit: f32,
}

impl Engine {
    /// Makes one pass over the tokens, for the rows with a request. A worker claims `chunk` tokens at a time.
    pub(crate) fn scan(
        &mut self,
        logits: &mut impl Logits,
        chunk: u32,
        batch: &Batch<'_, '_>,
        requests: &[Request<'_>],
        out: &mut [RowSummary],
    ) {
        // There may be more entries than rows.
        let requests = &requests[..batch.rows.len()];
        let adjustments = self.adjustments(batch.params);
        let mut rows = self.take_rows();
        let mut members = core::mem::take(&mut self.members);
        members.clear();
        let (mut lists, mut is_fallback) = (0, false);
        rows.extend(batch.rows.iter().zip(requests).enumerate().map(|(r, (row, request))| {
            let row = (*row)?;
            let kind = match request {
                // The logits of single tokens need no pass.
                Request::Skip | Request::Logits { .. } => return Err(RowError::NoFiniteLogit),
                Request::Overview | Request::Decide => PassKind::Summary,
                Request::PrefixCount { .. } => PassKind::PrefixCount,
                _ if row.filters.is_none() => return Err(RowError::NoFiniteLogit),
                Request::PrefixMass { below, .. } => PassKind::PrefixMass { below: *below },
                Request::List { floor } => {
                    lists += 1;
                    PassKind::List { floor: *floor, slot: lists - 1 }
                }
            };
            members.push(r);
            let (slack, is_whole) = (logits.slack(&row, &batch.input, r), *request == Request::Decide);
            let planned =
                Planned { slack, at: members.len() - 1, kind, is_whole, ..Planned::new(&row, r, &adjustments) };
            Ok(match request {
                Request::PrefixCount { stage: Stage::Raw, .. } => {
                    Planned { row: row.without_transforms(), adjustments: IndexedAdjustments::default(), ..planned }
                }
                _ => planned,
            })
        }));
        if !members.is_empty() {
            for worker in &mut self.workers {
                worker.lists.resize_with(lists.max(worker.lists.len()), Vec::new);
                worker.lists.iter_mut().for_each(Vec::clear);
            }
            let begin_row = |r: usize, state: &mut RowState| match requests.get(r) {
                Some(Request::PrefixMass { points, .. }) => {
                    state.filter.doubts.clear();
                    state.filter.doubts.extend(points.iter().map(|doubt| PrefixMass::new(doubt.rank)));
                }
                Some(Request::PrefixCount { ranks, .. }) => {
                    state.prefix_counts.clear();
                    state.prefix_counts.extend(ranks.iter().map(|&rank| (rank, 0)));
                }
                _ => {}
            };
            let (tokens, vocab_size) = (logits.tokens(), logits.vocab_size());
            let draws = rows.iter().flatten().map(|planned| planned.row.draws as usize).sum();
            let with_bounds = rows.iter().flatten().all(needs_only_largest) && logits.has_bounds(members.len(), draws);
            let has_shadow = logits.has_shadow();
            let source = logits.source(self.isa, batch.input, &members, with_bounds);
            self.pass(&source, &rows, tokens, chunk, begin_row);
            is_fallback = has_shadow && !(source.has_bounds() && self.most_tiles_have_bounds());
            self.gather_and_decide(&rows, vocab_size);
        }
        for (r, (summary, request)) in out.iter_mut().zip(requests).enumerate() {
            match (request, &rows[r], &batch.rows[r]) {
                (Request::Skip, ..) | (.., Err(_)) => {}
                (Request::Logits { .. }, ..) => summary.clear(),
                (_, Ok(planned), _) => {
                    self.write(r, planned, logits, &batch.input, summary);
                    summary.is_fallback = is_fallback;
                }
                (_, Err(_), Ok(row)) => {
                    summary.begin(row);
                    summary.refuse();
                }
            }
        }
        self.trim();
        self.end(rows);
        self.write_logits(logits, batch, requests, &adjustments, &mut members, out);
        self.keep(adjustments);
        self.members = members;
    }

    /// Writes the logits of requested tokens. They have the bits of a pass, because the kernel is the same.
    fn write_logits(
        &mut self,
        logits: &mut impl Logits,
        batch: &Batch<'_, '_>,
        requests: &[Request<'_>],
        adjustments: &ParallelAdjustments,
        members: &mut Vec<usize>,
        out: &mut [RowSummary],
    ) {
        let (own, mut requested) = (logits.tokens(), core::mem::take(&mut self.requested_logits));
        requested.clear();
        members.clear();
        for (r, request) in requests.iter().enumerate() {
            let (Request::Logits { tokens, .. }, Ok(_)) = (request, &batch.rows[r]) else { continue };
            let tokens = tokens.iter().filter(|token| own.contains(token)).enumerate();
            requested.extend(tokens.map(|(at, &token)| RequestedLogit { token, row: members.len(), at, logit: 0.0 }));
            members.push(r);
        }
        if !requested.is_empty() {
            let source = logits.source(self.isa, batch.input, members, false);
            requested.sort_unstable_by_key(|d| d.token);
            for same in requested.chunk_by_mut(|a, b| a.token == b.token) {
                let logits = self.workers[0].raw_logits(&source, same[0].token);
                same.iter_mut().for_each(|d| d.logit = logits(d.row));
            }
            requested.sort_unstable_by_key(|d| (d.row, d.at));
            for &RequestedLogit { token, row, logit, .. } in &requested {
                let (r, mut logit) = (members[row], [logit]);
                if let (Request::Logits { stage: Stage::Transformed, .. }, Ok(row)) = (requests[r], &batch.rows[r]) {
                    row.with_adjustments(adjustments.row(r)).transform.apply(token, &mut logit);
                }
                out[r].logits.push((token, logit[0]));
            }
        }
        self.requested_logits = requested;
    }

    /// Writes the summary of a row after the pass.
    fn write(
        &mut self,
        r: usize,
        planned: &Planned<'_>,
        logits: &mut impl Logits,
        input: &Matrix<'_>,
        summary: &mut RowSummary,
    ) {
        let row = &planned.row;
        summary.begin(row);
        let Some((first, others)) = self.workers.split_first_mut() else { return };
        if first.rows[r].invalid.is_some() {
            summary.error = first.rows[r].invalid;
            return;
        }
        match planned.kind {
            PassKind::Summary => {
                let state = &mut first.rows[r];
                if let Some((mass, top)) = state.raw.kept() {
                    summary.raw_mass.get_or_insert_default().clone_from(mass);
                    summary.raw_top.merge(top);
                }
                match row.filters {
                    None => logits.write(row, input, r, &Summary::from(&*state), summary),
                    Some(_) => write_overview(planned, state, summary),
                }
            }
            PassKind::PrefixMass { .. } => {
                let RowState { filter, mass, .. } = &mut first.rows[r];
                others.iter().for_each(|other| filter.merge_prefix_mass(&other.rows[r].filter));
                summary.prefix_masses.extend_from_slice(&filter.doubts);
                mass.iter().for_each(|mass| summary.mass.clone_from(mass));
            }
            PassKind::PrefixCount => {
                let total = |i: usize, own: u32| own + others.iter().map(|o| o.rows[r].prefix_counts[i].1).sum::<u32>();
                let counts = first.rows[r].prefix_counts.iter().enumerate().map(|(i, (_, own))| total(i, *own));
                summary.prefix_counts.extend(counts);
            }
            PassKind::List { slot, .. } => {
                summary.list.append(&mut first.lists[slot]);
                others.iter_mut().for_each(|other| summary.list.append(&mut other.lists[slot]));
                summary.list.sort_unstable_by(by_logit_rank);
            }
        }
    }

    /// Frees the lists if they hold more memory than one pass needs.
    fn trim(&mut self) {
        let bytes = |list: &Vec<Candidate>| (list.capacity() * size_of::<Candidate>()) as u64;
        let held: u64 = self.workers.iter().flat_map(|worker| &worker.lists).map(bytes).sum();
        if held > 4 * LIST_BYTES {
            self.workers.iter_mut().for_each(|worker| worker.lists.clear());
        }
    }
}

/// Whether upper bounds of logits give the results of a row. They do not give the masses of all tokens.
fn needs_only_largest(planned: &Planned<'_>) -> bool {
    let row = &planned.row;
    let from_draws = match &row.filters {
        None => row.logprobs.is_none(),
        // Log-probabilities after filters are those of the kept tokens.
        Some(filters) => filters.need_only_largest(SummarySpec::of(row, filters).list),
    };
    planned.kind == PassKind::Summary && planned.slack <= WIDEST_SLACK && row.raw_logprobs.is_none() && from_draws
}

/// Writes the result of a decided row with filters, or its overview.
fn write_overview(planned: &Planned<'_>, state: &mut RowState, summary: &mut RowSummary) {
    let RowState { filter, mass, weighed, .. } = state;
    if planned.is_whole && filter.follow_up.is_none() {
        summary.progress = Progress::Decided;
        core::mem::swap(&mut summary.result, &mut filter.result);
        return;
    }
    if planned.is_whole {
        if filter.missed {
            summary.progress = Progress::Open;
            return;
        }
        (summary.tail, summary.listed) = (filter.floor.tail, Some(filter.largest.limit()));
    }
    filter.largest.finish();
    summary.list.extend_from_slice(filter.largest.as_slice());
    if let (true, Some(mass)) = (*weighed, mass) {
        summary.mass.clone_from(mass);
    }
    summary.moments = filter.moments;
    summary.frontiers_mut().iter_mut().zip(&filter.frontiers).for_each(|(a, b)| a.clone_from(b));
}
