//! The draws of a call from the scans of a backend.
//!
//! ```text
//! check each row once
//! scan: a summary of every row                              Request::Decide
//! while a row with filters is not decided:
//!     scan: what the undecided rows need                    Request::PrefixMass, List or Overview
//! write the results, row by row
//! scan: logits of single tokens, on request                 Request::Logits
//! scan: tokens before the drawn ones, on request            Request::PrefixCount
//! ```
//!
//! Decisions depend on integers and on the row's logits alone. So a driver over several shards, whose scan merges their
//! summaries, makes the same draws as a driver over the whole vocabulary.

use crate::backend::selection::{
    FilterResolver, FilteredRow, FollowUp, LIST_BYTES, PrefixMass, RowView, TailMass, next_pass,
};
use crate::backend::{Batch, CheckedRow, Progress, Request, RowSummary, Scan, by_logit_rank, check_rows};
use crate::error::{RowError, SampleError, Stage};
use crate::matrix::Matrix;
use crate::params::{Row, RowParams};
use crate::sampler::samples::Samples;
use crate::sampler::{Description, reuse_vec};
use crate::summary::winner::{Candidate, LogitRank};
use core::mem::{swap, take};

mod logprobs;

/// The length of the longest list that keeps its memory between calls, in tokens, for calls of `rows` rows.
pub fn kept_list(rows: usize) -> usize {
    LIST_BYTES as usize / size_of::<Candidate>() / rows.max(1)
}

/// What a row needs from the next pass.
#[derive(Clone, Copy, Debug)]
enum RowFollowUp {
    Filters(FollowUp),
    Logits(Stage),
    PrefixCount(Stage),
}

/// The state of a row during a call, except its summary.
#[derive(Clone, Debug, Default)]
struct PendingRow {
    /// The points in doubt, and the mass before each.
    doubts: Vec<PrefixMass>,
    follow_up: Option<RowFollowUp>,
    passes: u32,
    /// Whether a pass read the whole weight in spite of a shadow.
    is_fallback: bool,
    /// The tokens whose logits are requested, and the ranks before which tokens are counted.
    tokens: Vec<u32>,
    ranks: Vec<LogitRank>,
    drawn_ranks: Vec<u32>,
    /// The logits of given tokens, and the raw logits of the draws.
    token_logits: Vec<(u32, f32)>,
    raw_logits: Vec<f32>,
}

/// Draws the rows of a call with a [`Scan`]. Reuses its memory between calls.
#[derive(Debug, Default)]
pub struct Driver {
    checked: Vec<CheckedRow<'static>>,
    /// The first summary of each row.
    overviews: Vec<RowSummary>,
    /// The summaries of the latest further pass.
    further: Vec<RowSummary>,
    pending: Vec<PendingRow>,
    /// The undecided rows, and the pass that each needs.
    undecided: Vec<(usize, FollowUp)>,
    /// The rows of the next pass, ascending.
    members: Vec<usize>,
    requests: Vec<Request<'static>>,
    resolver: FilterResolver,
}

impl Driver {
    /// Draws a call that has passed [`check_call`](crate::sampler::check_call).
    ///
    /// `of` describes the sampler that consists of this driver and the scan.
    ///
    /// # Errors
    /// The errors of the scan; [`SampleError::Backend`] if a scan lacks a requested raw logit. On an error `out` is
    /// empty.
    pub fn sample(
        &mut self,
        scan: &mut dyn Scan,
        of: &Description,
        input: Matrix<'_>,
        params: &[RowParams<'_>],
        out: &mut Samples,
    ) -> Result<(), SampleError> {
        out.clear();
        let mut rows = reuse_vec(take(&mut self.checked));
        check_rows(params, of, &mut rows);
        let drawn = self.draw(scan, &Batch { input, params, rows: &rows }, of.shape.vocab_size, out);
        self.checked = reuse_vec(rows);
        if drawn.is_err() {
            out.clear();
        }
        drawn
    }

    fn draw(
        &mut self,
        scan: &mut dyn Scan,
        batch: &Batch<'_, '_>,
        vocab_size: u32,
        out: &mut Samples,
    ) -> Result<(), SampleError> {
        self.overview(scan, batch)?;
        for (r, row) in batch.rows.iter().enumerate() {
            self.decide(r, row, vocab_size);
        }
        while self.next_pass(vocab_size) {
            self.pass(scan, batch)?;
            for i in 0..self.members.len() {
                let r = self.members[i];
                self.settle(r, &batch.rows[r], vocab_size);
            }
            let most = kept_list(batch.rows.len());
            self.further.iter_mut().for_each(|summary| summary.trim(most));
        }
        for (r, row) in batch.rows.iter().enumerate() {
            if let Err(error) = row.and_then(|row| self.emit(r, &row, vocab_size, out)) {
                out.push_error(error);
            }
        }
        self.find_tokens(scan, batch, out)?;
        let rows = &self.pending[..batch.rows.len()];
        out.set_fallback_rows(rows.iter().filter(|pending| pending.is_fallback).count());
        Ok(())
    }

    /// Makes the first pass.
    fn overview(&mut self, scan: &mut dyn Scan, batch: &Batch<'_, '_>) -> Result<(), SampleError> {
        let count = batch.rows.len();
        self.undecided.clear();
        self.overviews.resize_with(count.max(self.overviews.len()), RowSummary::default);
        self.pending.resize_with(count.max(self.pending.len()), PendingRow::default);
        let mut requests = reuse_vec(take(&mut self.requests));
        let request = |row: &CheckedRow<'_>| if row.is_ok() { Request::Decide } else { Request::Skip };
        requests.extend(batch.rows.iter().map(request));
        let scanned = scan.scan(batch, &requests, &mut self.overviews);
        self.requests = reuse_vec(requests);
        scanned
    }

    /// Decides a row with filters from its overview, unless the scan did.
    fn decide(&mut self, r: usize, row: &CheckedRow<'_>, vocab_size: u32) {
        let (summary, pending) = (&mut self.overviews[r], &mut self.pending[r]);
        pending.passes = summary.passes.max(1);
        pending.doubts.clear();
        pending.is_fallback = row.is_ok() && summary.is_fallback;
        let Ok(row) = row else { return };
        let follow_up = match (summary.progress, &row.filters) {
            (_, None) => {
                summary.merge_lists(row.logprobs.unwrap_or(0) as usize);
                None
            }
            (Progress::Decided, _) => None,
            (Progress::Open, Some(_)) => Some(FollowUp::Overview),
            (Progress::Summarized, Some(_)) => decide(summary, &mut self.resolver, row, pending, vocab_size),
        };
        self.undecided.extend(follow_up.map(|follow_up| (r, follow_up)));
    }

    /// Selects the rows of the next pass, as many as their lists have room for; false if all rows are decided.
    fn next_pass(&mut self, vocab_size: u32) -> bool {
        let Driver { pending, undecided, members, .. } = self;
        members.clear();
        next_pass(undecided, vocab_size.into(), |r, follow_up| {
            pending[r].follow_up = Some(RowFollowUp::Filters(follow_up));
            members.push(r);
        });
        members.sort_unstable();
        !members.is_empty()
    }

    /// Makes a further pass for the selected rows.
    fn pass(&mut self, scan: &mut dyn Scan, batch: &Batch<'_, '_>) -> Result<(), SampleError> {
        let Driver { pending, members, requests, further, overviews, .. } = self;
        further.resize_with(batch.rows.len().max(further.len()), RowSummary::default);
        let mut next = reuse_vec(take(requests));
        next.resize(batch.rows.len(), Request::Skip);
        for &r in &*members {
            next[r] = match pending[r].follow_up {
                Some(RowFollowUp::Filters(FollowUp::Overview)) => Request::Overview,
                Some(RowFollowUp::Filters(FollowUp::PrefixMass)) => {
                    Request::PrefixMass { points: &pending[r].doubts, below: overviews[r].tail.floor() }
                }
                Some(RowFollowUp::Filters(FollowUp::List { floor, .. })) => Request::List { floor },
                Some(RowFollowUp::Logits(stage)) => Request::Logits { tokens: &pending[r].tokens, stage },
                Some(RowFollowUp::PrefixCount(stage)) => Request::PrefixCount { ranks: &pending[r].ranks, stage },
                None => Request::Skip,
            };
        }
        let scanned = scan.scan(batch, &next, further);
        *requests = reuse_vec(next);
        members.iter().for_each(|&r| pending[r].is_fallback |= further[r].is_fallback);
        scanned
    }

    /// Decides a row from its overview and the summary of a further pass.
    fn settle(&mut self, r: usize, row: &CheckedRow<'_>, vocab_size: u32) {
        let Ok(row @ Row { filters: Some(filters), .. }) = row else { return };
        let Driver { overviews, further, pending, resolver, .. } = self;
        let (overview, further, pending) = (&mut overviews[r], &mut further[r], &mut pending[r]);
        pending.passes += 1;
        let follow_up = match pending.follow_up.take() {
            Some(RowFollowUp::Filters(FollowUp::Overview)) => {
                swap(overview, further);
                decide(overview, resolver, row, pending, vocab_size)
            }
            Some(RowFollowUp::Filters(FollowUp::PrefixMass)) => {
                pending.doubts.iter_mut().zip(&further.prefix_masses).for_each(|(a, b)| a.merge(b));
                if overview.tail.is_on() {
                    overview.mass.clear_below(overview.tail.floor());
                    overview.mass.merge(&further.mass);
                    overview.tail = TailMass::default();
                }
                decide(overview, resolver, row, pending, vocab_size)
            }
            Some(RowFollowUp::Filters(FollowUp::List { floor, .. })) => {
                further.merge_lists(usize::MAX);
                debug_assert!(further.list.is_sorted_by(|a, b| by_logit_rank(a, b).is_lt()));
                if further.list.is_empty() && floor == f32::NEG_INFINITY {
                    // Only inconsistent shards: their overviews had a finite logit.
                    overview.result.outcome = Some(Err(RowError::NoFiniteLogit));
                    return;
                }
                let (mass, moments) = (&overview.mass, &overview.moments);
                let view = RowView { list: &further.list, floor, mass, tail: TailMass::default(), moments };
                let of = FilteredRow { row, filters, vocab_size, passes: pending.passes };
                resolver.resolve_list(&of, &view, &mut overview.result)
            }
            Some(RowFollowUp::Logits(_) | RowFollowUp::PrefixCount(_)) | None => None,
        };
        self.undecided.extend(follow_up.map(|follow_up| (r, follow_up)));
    }

    /// Appends the result of a row.
    fn emit(&self, r: usize, row: &Row<'_>, vocab_size: u32, out: &mut Samples) -> Result<(), RowError> {
        let (summary, passes) = (&self.overviews[r], self.pending[r].passes);
        if let Some(error) = summary.error {
            return Err(error.error);
        }
        if row.filters.is_some() {
            return summary.result.emit(passes, vocab_size, out);
        }
        let available = summary.draws.len() as u32;
        if available == 0 {
            return Err(RowError::NoFiniteLogit);
        }
        if row.without_replacement && available < row.draws {
            return Err(RowError::SupportTooSmall { draws: row.draws, available });
        }
        let log_z = summary.log_mass.filter(|_| row.logprobs.is_some());
        let mass = (row.logprobs.is_some() && log_z.is_none()).then_some(&summary.mass);
        out.push_row(summary.draws.iter().copied(), mass, &summary.list);
        if let Some(log_z) = log_z {
            out.set_log_z(log_z);
        }
        Ok(())
    }
}

/// Decides a row from its overview and the mass before its points in doubt; returns the pass that an open row needs.
fn decide(
    summary: &mut RowSummary,
    resolver: &mut FilterResolver,
    row: &Row<'_>,
    pending: &mut PendingRow,
    vocab_size: u32,
) -> Option<FollowUp> {
    let filters = row.filters.as_ref()?;
    if summary.error.is_some() {
        return None;
    }
    let of = FilteredRow { row, filters, vocab_size, passes: pending.passes };
    summary.decide(resolver, &of, &mut pending.doubts)
}
