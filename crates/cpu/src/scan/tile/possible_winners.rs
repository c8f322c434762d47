//! Draws from a tile by upper bounds: finds the tokens that may win, and computes their logits.

use super::threshold_scan::draw_tile;
use super::{Planned, Simd, Source, Worker};
use crate::dot::TILE;
use crate::scan::mass_cutoff::{RowBounds, SharedBounds};
use crate::scan::perturb::Keep;
use crate::scan::row_state::RowState;
use crate::simd::{SPAN, Vector};
use crate::upper_bounds::BoundsMemory;
use core::ops::Range;
use flash_sampling_core::backend::{Candidate, RowTransform, Winner};
use flash_sampling_core::{Domain, Matrix, RowError};

/// The largest number of tokens of a tile that get single logits. If more may win, all logits of the tile are computed.
const MAX_TOKENS: usize = TILE / 4;
/// The largest number of possible winners of a tile, of all draws.
const MAX_FOUND: usize = 16 * MAX_TOKENS;
/// The largest number of tiles that a worker evaluates without bounds after tiles whose bounds did not suffice.
const MAX_SKIPPED: u32 = 16;

/// A token that may win.
#[derive(Clone, Copy, Debug)]
struct PossibleWinner {
    token: u32,
    /// The row of the pass.
    row: usize,
    /// The index of the draw in the row.
    draw: usize,
}

/// The tokens of a tile that may win, of all rows.
#[derive(Debug, Default)]
pub(super) struct PossibleWinners {
    found: Vec<PossibleWinner>,
    /// Whether a bound is not finite, or too many tokens may win, so that all logits of the tile are needed.
    needs_all_logits: bool,
    /// The number of consecutive tiles whose bounds did not suffice, and the number of tiles still to skip.
    failed: u32,
    skipped: u32,
    /// Whether the worker has computed logits in this pass.
    has_computed_logits: bool,
    /// The tokens of `found`, ascending, each once.
    tokens: Vec<u32>,
    /// The weight rows of `tokens`.
    weights: Vec<u8>,
    /// The dot products of `tokens`, `[rows, TILE]`.
    logits: Vec<f32>,
}

/// Collects the tokens of one draw that reach a fixed cutoff, up to a limit.
struct Collector<'a> {
    found: &'a mut Vec<PossibleWinner>,
    cut: f32,
    row: usize,
    draw: usize,
    /// The number of possible winners at which the collector stops.
    limit: usize,
}

impl Keep for Collector<'_> {
    #[inline(always)]
    fn cut(&self) -> f32 {
        if self.found.len() < self.limit { self.cut } else { f32::INFINITY }
    }

    #[inline(always)]
    fn offer(&mut self, candidate: Candidate) {
        if self.found.len() == self.limit {
            return;
        }
        self.found.push(PossibleWinner { token: candidate.winner.token, row: self.row, draw: self.draw });
    }
}

impl PossibleWinners {
    /// Begins a pass.
    pub(super) fn reset(&mut self) {
        self.has_computed_logits = false;
        (self.failed, self.skipped) = (0, 0);
    }

    /// Reserves memory for a plan, so that calls allocate none.
    pub(super) fn reserve(&mut self, memory: &BoundsMemory) {
        self.found.reserve(MAX_FOUND);
        self.tokens.reserve(MAX_FOUND);
        self.weights.reserve(MAX_TOKENS * memory.weight_row);
        self.logits.resize(memory.logits, 0.0);
    }

    /// Returns whether to evaluate the next tile without bounds, because those of several tiles did not suffice.
    fn skips(&mut self) -> bool {
        let skips = self.skipped > 0;
        self.skipped = self.skipped.saturating_sub(1);
        skips
    }

    /// Notes whether the bounds of a tile sufficed.
    fn note(&mut self, is_enough: bool) -> bool {
        self.failed = if is_enough { 0 } else { self.failed + 1 };
        // A worker's first tiles often need all logits.
        self.skipped = self.failed.saturating_sub(2).min(MAX_SKIPPED);
        is_enough
    }

    /// Returns whether this is the first call in a pass.
    pub(super) fn is_first_part(&mut self) -> bool {
        !core::mem::replace(&mut self.has_computed_logits, true)
    }

    /// Requests all logits of the tile.
    #[cold]
    pub(super) fn request_all_logits(&mut self) {
        self.needs_all_logits = true;
    }

    /// Adds the tokens of a row whose score, with the upper bound for the logit, reaches the best score of a draw.
    ///
    /// # Safety
    /// The instruction set of `V` is available.
    #[inline(always)]
    pub(super) unsafe fn add<V: Vector>(
        &mut self,
        (planned, (r, known)): (&Planned<'_>, (usize, &SharedBounds)),
        first: u32,
        spans: &[[f32; SPAN]],
        tops: &mut [f32],
        state: &RowState,
    ) {
        if self.needs_all_logits {
            return;
        }
        let Planned { row, keys, .. } = planned;
        // SAFETY: by this function's contract.
        let Some(top) = (unsafe { V::largest(spans, tops) }) else { return self.request_all_logits() };
        let lists = state.best.lists().iter().map(|list| list.threshold());
        let cuts = state.best.winners.iter().map(|best| best.winner.score).chain(lists);
        for ((i, cut), draw) in cuts.enumerate().zip(row.first_draw..) {
            let cut =
                if i == 0 && state.best.lists().is_empty() { cut.max(RowBounds::best(known.row(r)).0) } else { cut };
            if cut == f32::NEG_INFINITY && top > f32::NEG_INFINITY {
                return self.request_all_logits();
            }
            // More than `MAX_TOKENS` tokens of one draw need all logits.
            let limit = (self.found.len() + MAX_TOKENS + 1).min(MAX_FOUND);
            let mut collector = Collector { found: &mut self.found, cut, row: r, draw: i, limit };
            // SAFETY: by this function's contract.
            unsafe { draw_tile::<V>(row, keys, draw, first, spans, (top, tops), &mut collector) };
            if self.found.len() == limit {
                return self.request_all_logits();
            }
        }
    }
}

impl Worker {
    /// Draws from a part of a tile by upper bounds. If all logits are needed, returns false and changes no row.
    pub(super) fn draw_by_bounds(
        &mut self,
        source: &Source<'_>,
        rows: &[Result<Planned<'_>, RowError>],
        part: Range<u32>,
        simd: Simd,
    ) -> bool {
        if self.possible_winners.skips() {
            return false;
        }
        self.possible_winners.found.clear();
        self.possible_winners.needs_all_logits = false;
        self.evaluate_part(source, rows, part, simd);
        let PossibleWinners { found, tokens, needs_all_logits, .. } = &mut self.possible_winners;
        if *needs_all_logits {
            return self.possible_winners.note(false);
        }
        tokens.clear();
        tokens.extend(found.iter().map(|possible| possible.token));
        tokens.sort_unstable();
        tokens.dedup();
        if tokens.len() > MAX_TOKENS {
            return self.possible_winners.note(false);
        }
        if !tokens.is_empty() {
            self.compute_logits(source);
            self.merge_possible_winners(source, rows);
        }
        self.possible_winners.note(true)
    }

    /// Computes the dot products of the tokens that may win, for all rows.
    fn compute_logits(&mut self, source: &Source<'_>) {
        let Source::Head { head, dot, hidden, .. } = source else { return };
        let (weight, PossibleWinners { tokens, weights, logits, .. }) = (head.weight(), &mut self.possible_winners);
        weights.clear();
        tokens.iter().for_each(|&token| weights.extend_from_slice(weight.row_bytes(head.weight_row(token))));
        let gathered = Matrix::from_bytes(weights, weight.dtype(), tokens.len(), weight.cols(), weight.cols());
        let gathered = gathered.expect("these are whole rows");
        dot.tile(&gathered, hidden.all(), &mut logits[..hidden.all().rows() * TILE], &mut self.dot);
    }

    /// Merges the possible winners, with the scores of their logits, into the draws of the rows.
    fn merge_possible_winners(&mut self, source: &Source<'_>, rows: &[Result<Planned<'_>, RowError>]) {
        let Source::Head { head, .. } = source else { return };
        let PossibleWinners { found, tokens, logits, .. } = &self.possible_winners;
        for &PossibleWinner { token, row: r, draw } in found {
            let Ok(Planned { row, at, adjustments, .. }) = &rows[r] else { continue };
            let place = tokens.binary_search(&token).expect("the token is in the list");
            let mut logit = [logits[at * TILE + place]];
            head.transform(token, &mut logit);
            let adjustments = adjustments.near(token..token + 1);
            RowTransform { adjustments, ..row.transform }.apply(token, &mut logit);
            let [logit] = logit;
            if logit == f32::NEG_INFINITY {
                continue;
            }
            let state = &mut self.rows[r];
            state.has_finite = true;
            let noise = |draw: usize| row.noise.gumbel(Domain::Token, row.first_draw + draw as u32, token);
            let score = if row.greedy { logit } else { logit + noise(draw) };
            let candidate = Candidate { winner: Winner::new(score, token), logit };
            match state.best.lists_mut().get_mut(draw) {
                Some(list) => list.push(candidate),
                None => {
                    let winner = &mut state.best.winners[draw];
                    *winner = winner.merge(candidate);
                    if draw == 0 && state.shares {
                        self.known.row(r).raise_best_score(score);
                    }
                }
            }
        }
    }
}
