//! The logits of requested tokens, and the raw logits and ranks of drawn tokens.
//!
//! A token in the row's list of largest logits needs no further scan. All other tokens share one scan for their logits,
//! and the drawn tokens share a second scan for their ranks. A row with filters and processed log-probabilities needs
//! neither scan: its list contains all kept tokens.

use super::{Driver, RowFollowUp};
use crate::backend::{Batch, CheckedRow, RowSummary, Scan};
use crate::error::{SampleError, Stage};
use crate::params::Row;
use crate::sampler::samples::{RowSample, Samples};
use crate::summary::winner::{Candidate, LogitRank};

/// The stage of the logits under the row's log-probabilities; `None` if the row needs no further logits or ranks.
fn stage_of(row: &Row<'_>) -> Option<Stage> {
    let is_open = row.logprobs.is_some() && row.filters.is_none();
    row.raw_logprobs.map(|_| Stage::Raw).or(is_open.then_some(Stage::Transformed))
}

/// A valid row with log-probabilities: its result, its stage, and the list of largest logits of this stage.
fn parts<'r, 'a, 's, 'o>(
    row: &'r CheckedRow<'a>,
    r: usize,
    summary: &'s RowSummary,
    out: &'o Samples,
) -> Option<(&'r Row<'a>, RowSample<'o>, Stage, &'s [Candidate])> {
    let (row, sample) = (row.as_ref().ok()?, out.row(r).ok()?);
    let stage = stage_of(row)?;
    Some((row, sample, stage, if stage == Stage::Raw { summary.raw_top.as_slice() } else { &summary.list }))
}

fn position(list: &[Candidate], token: u32) -> Option<usize> {
    list.iter().position(|c| c.winner.token == token)
}

/// The rank of a drawn token, if the rank needs no scan.
fn known_rank(row: &Row<'_>, stage: Stage, list: &[Candidate], token: u32) -> Option<u32> {
    let is_first = row.greedy && !row.without_replacement && stage == Stage::Transformed;
    if is_first { Some(1) } else { position(list, token).map(|at| at as u32 + 1) }
}

/// The rank of a drawn token in the order of logits of the row's stage.
fn logit_rank(sample: &RowSample<'_>, draw: usize) -> LogitRank {
    let drawn = sample.draws[draw];
    LogitRank { logit: sample.raw_logits.get(draw).copied().unwrap_or(drawn.logit), token: drawn.token }
}

fn missing(row: usize, what: &str) -> SampleError {
    SampleError::Backend { backend: "driver", source: format!("no scan returned {what} of row {row}").into() }
}

impl Driver {
    /// Finds the logits and ranks of single tokens, for all rows with log-probabilities.
    pub(super) fn find_tokens(
        &mut self,
        scan: &mut dyn Scan,
        batch: &Batch<'_, '_>,
        out: &mut Samples,
    ) -> Result<(), SampleError> {
        if !batch.rows.iter().flatten().any(|row| stage_of(row).is_some()) {
            return Ok(());
        }
        self.members.clear();
        batch.rows.iter().enumerate().for_each(|(r, row)| self.request_logits(r, row, out));
        if !self.members.is_empty() {
            self.pass(scan, batch)?;
        }
        batch.rows.iter().enumerate().try_for_each(|(r, row)| self.take_logits(r, row, out))?;
        self.members.clear();
        batch.rows.iter().enumerate().for_each(|(r, row)| self.request_ranks(r, row, out));
        if !self.members.is_empty() {
            self.pass(scan, batch)?;
        }
        batch.rows.iter().enumerate().try_for_each(|(r, row)| self.write_tokens(r, row, out))
    }

    /// Requests the logits of requested tokens, and the raw logits of drawn tokens.
    fn request_logits(&mut self, r: usize, row: &CheckedRow<'_>, out: &Samples) {
        let Some((row, sample, stage, list)) = parts(row, r, &self.overviews[r], out) else { return };
        let pending = &mut self.pending[r];
        let drawn = sample.draws.iter().filter(|_| stage == Stage::Raw).map(|draw| draw.token);
        pending.tokens.clear();
        let wanted = row.logprob_token_ids.iter().copied().chain(drawn);
        pending.tokens.extend(wanted.filter(|&token| position(list, token).is_none()));
        if !pending.tokens.is_empty() {
            pending.follow_up = Some(RowFollowUp::Logits(stage));
            self.members.push(r);
        }
    }

    /// Reads the logits from the scan, and writes raw log-probabilities.
    fn take_logits(&mut self, r: usize, row: &CheckedRow<'_>, out: &mut Samples) -> Result<(), SampleError> {
        let summary = &self.overviews[r];
        let Some((row, sample, stage, list)) = parts(row, r, summary, out) else { return Ok(()) };
        let pending = &mut self.pending[r];
        let scanned = if pending.tokens.is_empty() { &mut [][..] } else { &mut self.further[r].logits };
        scanned.sort_unstable_by_key(|(token, _)| *token);
        let logit = |token: u32| {
            let listed = position(list, token).map(|at| list[at].logit);
            listed.or_else(|| scanned.binary_search_by_key(&token, |(own, _)| *own).ok().map(|at| scanned[at].1))
        };
        pending.token_logits.clear();
        // A token without a logit from any scan cannot be drawn.
        let of_token = |&token: &u32| (token, logit(token).unwrap_or(f32::NEG_INFINITY));
        pending.token_logits.extend(row.logprob_token_ids.iter().map(of_token));
        if stage == Stage::Raw {
            pending.raw_logits.clear();
            for draw in sample.draws {
                let raw =
                    logit(draw.token).ok_or_else(|| missing(r, &format!("the raw logit of token {}", draw.token)));
                pending.raw_logits.push(raw?);
            }
            let mass = summary.raw_mass.as_ref().ok_or_else(|| missing(r, "the mass of the raw logits"))?;
            out.set_raw(r, mass, list, pending.raw_logits.iter().copied());
        }
        Ok(())
    }

    /// Requests the ranks of drawn tokens, as counts of the tokens before them.
    fn request_ranks(&mut self, r: usize, row: &CheckedRow<'_>, out: &Samples) {
        let Some((row, sample, stage, list)) = parts(row, r, &self.overviews[r], out) else { return };
        let pending = &mut self.pending[r];
        pending.ranks.clear();
        if !row.ranks {
            return;
        }
        let ranks = (0..sample.draws.len()).map(|draw| logit_rank(&sample, draw));
        pending.ranks.extend(ranks.filter(|rank| known_rank(row, stage, list, rank.token).is_none()));
        if !pending.ranks.is_empty() {
            pending.follow_up = Some(RowFollowUp::PrefixCount(stage));
            self.members.push(r);
        }
    }

    /// Writes the logits of requested tokens and the ranks of drawn tokens.
    fn write_tokens(&mut self, r: usize, row: &CheckedRow<'_>, out: &mut Samples) -> Result<(), SampleError> {
        let Some((row, sample, stage, list)) = parts(row, r, &self.overviews[r], out) else { return Ok(()) };
        let pending = &mut self.pending[r];
        let counts = if pending.ranks.is_empty() { &[][..] } else { &self.further[r].prefix_counts };
        if counts.len() != pending.ranks.len() {
            return Err(missing(r, "the ranks of drawn tokens"));
        }
        pending.drawn_ranks.clear();
        let mut counts = counts.iter();
        for draw in sample.draws.iter().filter(|_| row.ranks) {
            let known = known_rank(row, stage, list, draw.token);
            pending.drawn_ranks.extend(known.or_else(|| counts.next().map(|count| count + 1)));
        }
        out.set_tokens(r, pending.token_logits.iter().copied(), pending.drawn_ranks.iter().copied());
        Ok(())
    }
}
