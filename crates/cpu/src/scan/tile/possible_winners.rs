//! Draws from a tile by upper bounds: finds the tokens that may win, and computes their logits.

use super::threshold_scan::draw_tile;
use super::{Planned, Simd, Source, Worker, filtered};
use crate::dot::TILE;
use crate::scan::mass_cutoff::{RowBounds, SharedBounds};
use crate::scan::perturb::Keep;
use crate::scan::row_state::RowState;
use crate::simd::{SPAN, Vector};
use crate::upper_bounds::{BoundsMemory, MAX_ROWS};
use core::ops::Range;
use flash_sampling_core::backend::Candidate;
use flash_sampling_core::{Matrix, RowError};

/// The largest number of tokens of a tile that get single logits. If more may win, all logits of the tile are computed.
const MAX_TOKENS: usize = TILE / 4;
/// The largest number of tiles that a worker evaluates without bounds after tiles whose bounds did not suffice.
const MAX_SKIPPED: u32 = 32;

/// The tokens of a tile that may win in some row.
#[derive(Debug, Default)]
pub(super) struct PossibleWinners {
    found: TokenSet,
    /// Whether a bound is not finite, so that all logits of the tile are needed.
    needs_all_logits: bool,
    /// The number of consecutive tiles whose bounds did not suffice, over all calls.
    failed: u32,
    /// The number of next tiles to evaluate without bounds.
    left_to_skip: u32,
    /// Whether the worker has computed logits in this pass.
    has_computed_logits: bool,
    /// The weight rows of the tokens.
    weights: Vec<u8>,
    /// The dot products of the tokens, `[rows, TILE]`.
    logits: Vec<f32>,
}

/// A set of tokens of a tile, and the rows in which one of them may win.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct TokenSet {
    /// The first token of the tile, a multiple of [`SPAN`].
    first: u32,
    /// One bit per token.
    tokens: [u64; TILE / SPAN],
    count: usize,
    /// One bit per row of the source.
    rows: u64,
}

const _: () = assert!(MAX_ROWS <= u64::BITS as usize);

impl TokenSet {
    /// Adds a token that may win in row `at` of the source.
    #[inline(always)]
    pub(super) fn insert(&mut self, token: u32, at: usize) {
        let i = (token - self.first) as usize;
        let (word, bit) = (&mut self.tokens[i / SPAN], 1 << (i % SPAN));
        self.count += usize::from(*word & bit == 0);
        *word |= bit;
        self.rows |= 1 << at;
    }

    /// Whether the tokens are too many for single logits.
    #[inline(always)]
    pub(super) fn is_full(&self) -> bool {
        self.count > MAX_TOKENS
    }

    /// The tokens from the first span with a token of the set to the last one.
    fn span_range(&self) -> Range<u32> {
        let is_used = |&at: &usize| self.tokens[at] != 0;
        let [start, end] =
            [(0..self.tokens.len()).find(is_used), (0..self.tokens.len()).rfind(is_used).map(|at| at + 1)]
                .map(|at| self.first + (at.unwrap_or(0) * SPAN) as u32);
        start..end
    }

    /// The tokens, ascending.
    fn iter(&self) -> impl Iterator<Item = u32> {
        self.tokens.iter().zip((self.first..).step_by(SPAN)).flat_map(|(&word, first)| {
            let mut left = word;
            core::iter::from_fn(move || {
                let i = (left != 0).then(|| left.trailing_zeros())?;
                left &= left - 1;
                Some(first + i)
            })
        })
    }
}

/// Collects the tokens that reach a fixed cutoff.
struct Collector<'a> {
    found: &'a mut TokenSet,
    cut: f32,
    /// The row of the source.
    at: usize,
}

impl Keep for Collector<'_> {
    #[inline(always)]
    fn cut(&self) -> f32 {
        if self.found.is_full() { f32::MAX } else { self.cut }
    }

    #[inline(always)]
    fn offer(&mut self, candidate: Candidate) {
        self.found.insert(candidate.winner.token, self.at);
    }
}

impl PossibleWinners {
    /// Begins a pass.
    pub(super) fn reset(&mut self) {
        self.has_computed_logits = false;
    }

    /// Reserves memory for a plan, so that calls allocate none.
    pub(super) fn reserve(&mut self, memory: &BoundsMemory) {
        self.weights.reserve(MAX_TOKENS * memory.weight_row);
        self.logits.resize(memory.logits, 0.0);
    }

    /// Returns whether to evaluate the next tile without bounds, because the bounds of several tiles did not suffice.
    fn skips_bounds(&mut self) -> bool {
        let skips = self.left_to_skip > 0;
        self.left_to_skip = self.left_to_skip.saturating_sub(1);
        skips
    }

    /// Records whether the bounds of a tile sufficed, and returns it.
    fn record(&mut self, is_enough: bool) -> bool {
        self.failed = if is_enough { 0 } else { self.failed + 1 };
        // A worker's first tiles often need all logits.
        self.left_to_skip = if self.failed > 2 { 1u32.checked_shl(self.failed - 3).unwrap_or(MAX_SKIPPED) } else { 0 };
        self.left_to_skip = self.left_to_skip.min(MAX_SKIPPED);
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

    /// Adds the tokens of a row that may win, by their upper bounds.
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
        if self.needs_all_logits || self.found.is_full() {
            return;
        }
        let Planned { row, keys, at, .. } = planned;
        // SAFETY: by this function's contract.
        let Some(top) = (unsafe { V::largest(spans, tops) }) else { return self.request_all_logits() };
        let (found, known) = (&mut self.found, known.row(r));
        if let Some(filters) = &row.filters {
            let tile = (first, spans, (top, &*tops));
            // SAFETY: by this function's contract.
            return unsafe { filtered::find::<V>((row, keys), filters, tile, (known, state), (found, *at)) };
        }
        let lists = state.best.lists().iter().map(|list| list.threshold());
        let cuts = state.best.winners.iter().map(|best| best.winner.score).chain(lists);
        for ((i, cut), draw) in cuts.enumerate().zip(row.first_draw..) {
            let shares = i == 0 && state.best.lists().is_empty();
            let cut = if shares { cut.max(RowBounds::best(known).0) } else { cut };
            if cut == f32::NEG_INFINITY && top > f32::NEG_INFINITY {
                return self.request_all_logits();
            }
            let mut collector = Collector { found, cut, at: *at };
            // SAFETY: by this function's contract.
            unsafe { draw_tile::<V>((row, keys), draw, first, spans, (top, tops), None, &mut collector) };
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
        if self.possible_winners.skips_bounds() {
            return false;
        }
        self.possible_winners.found = TokenSet { first: part.start / SPAN as u32 * SPAN as u32, ..TokenSet::default() };
        self.possible_winners.needs_all_logits = false;
        self.evaluate_part(source, rows, part.clone(), simd);
        let PossibleWinners { found, needs_all_logits, .. } = self.possible_winners;
        if needs_all_logits || found.is_full() {
            return self.possible_winners.record(false);
        }
        if found.count > 0 {
            let spans = found.span_range();
            self.compute_logits(source, &found, &spans);
            let part = part.start.max(spans.start)..part.end.min(spans.end);
            self.summarize(&source.without_bounds(), rows, part, simd, |at| found.rows >> at & 1 == 1);
        }
        self.possible_winners.record(true)
    }

    /// Computes the dot products of the tokens that may win. All other tokens of `spans` get -inf.
    fn compute_logits(&mut self, source: &Source<'_>, found: &TokenSet, spans: &Range<u32>) {
        let Source::Head { head, dot, hidden, .. } = source else { return };
        let (weight, PossibleWinners { weights, logits, .. }) = (head.weight(), &mut self.possible_winners);
        weights.clear();
        found.iter().for_each(|token| weights.extend_from_slice(weight.row_bytes(head.weight_row(token))));
        let gathered = Matrix::from_bytes(weights, weight.dtype(), found.count, weight.cols(), weight.cols());
        let gathered = gathered.expect("these are whole rows");
        let rows = hidden.all().rows();
        dot.tile(&gathered, hidden.all(), &mut logits[..rows * TILE], &mut self.dot);
        for (to, from) in self.logits.chunks_mut(TILE).zip(logits.chunks(TILE)).take(rows) {
            to[..spans.len()].fill(f32::NEG_INFINITY);
            found.iter().zip(from).for_each(|(token, &logit)| to[(token - spans.start) as usize] = logit);
        }
    }
}
