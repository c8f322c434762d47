//! Draws from a tile by upper bounds: finds the tokens that may win, and computes their logits.

use super::threshold_scan::draw_tile;
use super::{Planned, Simd, Source, Worker};
use crate::dot::TILE;
use crate::scan::mass_cutoff::{RowBounds, SharedBounds};
use crate::scan::perturb::Keep;
use crate::scan::row_state::RowState;
use crate::simd::{SPAN, Vector};
use core::ops::Range;
use flash_sampling_core::backend::{Candidate, RowTransform, Winner};
use flash_sampling_core::{Domain, Matrix, RowError};

/// The largest number of tokens of a tile that get single logits. If more may win, all logits of the tile are computed.
const MAX_TOKENS: usize = TILE / 4;

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
    /// Whether a bound is not finite, so that all logits of the tile are needed.
    needs_all_logits: bool,
    /// Whether the worker has computed logits in this pass.
    has_computed_logits: bool,
    /// The tokens of `found`, ascending, each once.
    tokens: Vec<u32>,
    /// The weight rows of `tokens`.
    weights: Vec<u8>,
    /// The dot products of `tokens`, `[rows, TILE]`.
    logits: Vec<f32>,
}

/// Collects the tokens of one draw that reach a fixed cutoff.
struct Collector<'a> {
    found: &'a mut Vec<PossibleWinner>,
    cut: f32,
    row: usize,
    draw: usize,
}

impl Keep for Collector<'_> {
    #[inline(always)]
    fn cut(&self) -> f32 {
        self.cut
    }

    #[inline(always)]
    fn offer(&mut self, candidate: Candidate) {
        self.found.push(PossibleWinner { token: candidate.winner.token, row: self.row, draw: self.draw });
    }
}

impl PossibleWinners {
    /// Begins a pass.
    pub(super) fn reset(&mut self) {
        self.has_computed_logits = false;
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
            let mut collector = Collector { found: &mut self.found, cut, row: r, draw: i };
            // SAFETY: by this function's contract.
            unsafe { draw_tile::<V>(row, keys, draw, first, spans, (top, tops), &mut collector) };
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
        self.possible_winners.found.clear();
        self.possible_winners.needs_all_logits = false;
        self.evaluate_part(source, rows, part, simd);
        let PossibleWinners { found, tokens, needs_all_logits, .. } = &mut self.possible_winners;
        if *needs_all_logits {
            return false;
        }
        tokens.clear();
        tokens.extend(found.iter().map(|possible| possible.token));
        tokens.sort_unstable();
        tokens.dedup();
        if tokens.len() > MAX_TOKENS {
            return false;
        }
        if !tokens.is_empty() {
            self.compute_logits(source);
            self.merge_possible_winners(source, rows);
        }
        true
    }

    /// Computes the dot products of the tokens that may win, for all rows.
    fn compute_logits(&mut self, source: &Source<'_>) {
        let Source::Head { head, dot, hidden, .. } = source else { return };
        let (weight, PossibleWinners { tokens, weights, logits, .. }) = (head.weight(), &mut self.possible_winners);
        weights.clear();
        tokens.iter().for_each(|&token| weights.extend_from_slice(weight.row_bytes(head.weight_row(token))));
        let gathered = Matrix::from_bytes(weights, weight.dtype(), tokens.len(), weight.cols(), weight.cols());
        let gathered = gathered.expect("these are whole rows");
        logits.resize(hidden.all().rows() * TILE, 0.0);
        dot.tile(&gathered, hidden.all(), logits, &mut self.dot);
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
