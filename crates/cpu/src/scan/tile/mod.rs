//! Evaluates one tile: computes logits, applies transforms, and updates the state of each row.

use crate::dot::{DotScratch, TILE};
use crate::scan::filter_state::{FilterState, ListBudget, PassKind};
use crate::scan::granules::{BLOCKS, RoundKeys, round_keys};
use crate::scan::logit_cache::LogitCache;
use crate::scan::mass_cutoff::{RowBounds, SharedBounds};
use crate::scan::parallel_adjustments::ParallelAdjustments;
use crate::scan::perturb::MAX_SPANS;
use crate::scan::prefetch::prefetch;
use crate::scan::row_groups::{GroupWinner, RowGroups};
use crate::scan::row_state::RowState;
use crate::simd::{SPAN, Vector};
use crate::upper_bounds::BoundsMemory;
use core::ops::Range;
pub(crate) use dispatch::Simd;
use flash_sampling_core::RowError;
use flash_sampling_core::backend::{
    Candidate, IndexedAdjustments, Row, RowTransform, Stage, StagedError, any_invalid, first_invalid,
};
use possible_winners::PossibleWinners;
pub(crate) use source::Source;
use std::sync::Arc;
use threshold_scan::{KeepWinner, draw_tile, rank};

mod dispatch;
mod filtered;
mod possible_winners;
mod source;
mod threshold_scan;

/// Tokens per tile of existing logits.
///
/// Larger than [`TILE`], because with 256 tokens half of a tile's time is its fixed cost.
pub(crate) const LOGITS_TILE: usize = 4096;
const SPANS: usize = (LOGITS_TILE / SPAN).next_multiple_of(BLOCKS);
const _: () = assert!(SPANS <= MAX_SPANS);

/// A row of a pass.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Planned<'a> {
    pub(crate) row: Row<'a>,
    /// The Philox round keys of the row's seed.
    pub(crate) keys: RoundKeys,
    /// The row's adjustments of single tokens.
    pub(crate) adjustments: IndexedAdjustments<'a>,
    /// The largest gap below the best score of a possible canonical winner; 0 = not canonical.
    pub(crate) slack: f32,
    /// The index of the row in the source.
    pub(crate) at: usize,
    pub(crate) kind: PassKind,
    /// Whether the pass is over the whole vocabulary, so that it alone may decide the row.
    pub(crate) is_whole: bool,
}

impl<'a> Planned<'a> {
    /// Creates row `r` of a call, for its summary, without a slack.
    pub(crate) fn new(row: &Row<'a>, r: usize, adjustments: &'a ParallelAdjustments) -> Self {
        Planned {
            row: row.with_adjustments(adjustments.row(r)),
            keys: round_keys(&row.noise),
            adjustments: adjustments.indexed(r),
            slack: 0.0,
            at: r,
            kind: PassKind::Summary,
            is_whole: false,
        }
    }
}

/// The buffers of one worker.
#[derive(Debug)]
pub(crate) struct Worker {
    /// The logits of a tile.
    ///
    /// A head fills `[rows, TILE]`, plus one span for a tile that begins off the grid. Existing logits fill
    /// [`LOGITS_TILE`] of one row.
    logits: Vec<f32>,
    dot: DotScratch,
    /// The tokens of a tile whose upper bounds may win.
    possible_winners: PossibleWinners,
    pub(crate) rows: Vec<RowState>,
    /// The token lists of a pass, one per row with a list.
    pub(crate) lists: Vec<Vec<Candidate>>,
    /// The state of the groups so far, one per row, for variants that draw a group.
    pub(crate) groups: Vec<RowGroups<GroupWinner>>,
    /// The cached logits at or above the mass cutoffs of rows.
    pub(crate) above: LogitCache,
    /// The tiles of a pass with upper bounds: those whose bounds sufficed, and all.
    pub(crate) tiles: [u32; 2],
    known: Arc<SharedBounds>,
}

impl Worker {
    pub(crate) fn new(rows: Vec<RowState>, dot: DotScratch, known: Arc<SharedBounds>) -> Self {
        let logits = vec![0.0; (rows.len() * TILE + SPAN).max(LOGITS_TILE)];
        let (lists, groups) = (Vec::new(), Vec::new());
        let (above, possible_winners) = (LogitCache::default(), PossibleWinners::default());
        Worker { logits, dot, possible_winners, rows, lists, groups, above, tiles: [0; 2], known }
    }

    /// Reserves memory for upper bounds.
    pub(crate) fn reserve_for_bounds(&mut self, memory: &BoundsMemory) {
        self.possible_winners.reserve(memory);
        self.dot.reserve_for_bounds(memory);
    }

    /// Resets the states for the rows of a pass.
    ///
    /// `short` and `shares` go to [`RowState::begin`].
    pub(crate) fn begin(&mut self, rows: &[Result<Planned<'_>, RowError>], short: Option<ListBudget>, shares: bool) {
        self.possible_winners.reset();
        self.tiles = [0; 2];
        for (state, row) in self.rows.iter_mut().zip(rows) {
            if let Ok(planned) = row {
                state.begin(&planned.row, planned.slack, short.filter(|_| planned.is_whole), shares);
            }
        }
    }

    /// Computes the raw logits of a token as a pass over `source` does, and returns them as a function of the row.
    pub(crate) fn raw_logits(&mut self, source: &Source<'_>, token: u32) -> impl Fn(usize) -> f32 {
        source.fill(token..token + 1, &mut self.logits, &mut self.dot);
        move |r| {
            let mut logit = [self.logits[r * TILE]];
            if let Source::Head { head, .. } = source {
                head.transform(token, &mut logit);
            }
            logit[0]
        }
    }

    /// Evaluates `tokens` and adds their logits to the states of the rows.
    pub(crate) fn evaluate(
        &mut self,
        source: &Source<'_>,
        rows: &[Result<Planned<'_>, RowError>],
        mut tokens: Range<u32>,
        simd: Simd,
    ) {
        if source.has_bounds() && self.possible_winners.is_first_part() {
            // The first logits give the scores that the bounds of other tokens must reach.
            let end = (tokens.start / SPAN as u32 + 1).saturating_mul(SPAN as u32).min(tokens.end);
            self.evaluate_part(&source.without_bounds(), rows, tokens.start..end, simd);
            tokens.start = end;
        }
        let size = source.tile();
        while tokens.start < tokens.end {
            let grid = tokens.start / SPAN as u32 * SPAN as u32;
            let part = tokens.start..grid.saturating_add(size as u32).min(tokens.end);
            let by_bounds = source.has_bounds() && self.draw_by_bounds(source, rows, part.clone(), simd);
            if !by_bounds {
                self.evaluate_part(&source.without_bounds(), rows, part.clone(), simd);
            }
            self.tiles = [self.tiles[0] + u32::from(by_bounds), self.tiles[1] + 1];
            tokens.start = part.end;
        }
    }

    /// Evaluates tokens of one tile, which begins at a multiple of [`SPAN`].
    fn evaluate_part(
        &mut self,
        source: &Source<'_>,
        rows: &[Result<Planned<'_>, RowError>],
        part: Range<u32>,
        simd: Simd,
    ) {
        if let Source::Head { .. } = source {
            let at = part.start as usize % SPAN;
            source.fill(part.clone(), &mut self.logits[at..], &mut self.dot);
        }
        self.summarize(source, rows, part, simd, |_| true);
    }

    /// Adds the products of a part of a tile to the states of some rows: those whose row of the source `is_included`.
    fn summarize(
        &mut self,
        source: &Source<'_>,
        rows: &[Result<Planned<'_>, RowError>],
        part: Range<u32>,
        simd: Simd,
        is_included: impl Fn(usize) -> bool,
    ) {
        let first = part.start / SPAN as u32 * SPAN as u32;
        let at = (part.start - first) as usize;
        for (r, row) in rows.iter().enumerate() {
            let Ok(planned) = row else { continue };
            if !is_included(planned.at) {
                continue;
            }
            prefetch(self.above.next());
            // Pointers lead to a row's state. Each step follows pointers that the previous step prefetched.
            if let (Some(state), Some(Ok(third))) = (self.rows.get(r + 3), rows.get(r + 3)) {
                state.prefetch();
                self.known.prefetch(r + 3);
                prefetch(third.adjustments.near_index(part.clone()));
            }
            if let (Some(state), Some(Ok(second))) = (self.rows.get(r + 2), rows.get(r + 2)) {
                state.prefetch_parts();
                let near = second.adjustments.near(part.clone());
                prefetch(&near[..near.len().min(16)]);
            }
            if let (Some(state), Some(Ok(_))) = (self.rows.get(r + 1), rows.get(r + 1)) {
                state.prefetch_points();
            }
            let logits = match source {
                Source::Head { .. } => &mut self.logits[planned.at * TILE..][..TILE],
                Source::Logits { .. } => &mut self.logits[..LOGITS_TILE],
            };
            let (lists, above, known) = (&mut self.lists, &mut self.above, (r, &*self.known));
            let possible_winners = source.has_bounds().then_some(&mut self.possible_winners);
            let span =
                Span { source, planned, first, at, len: part.len(), logits, lists, above, known, possible_winners };
            simd.summarize(span, &mut self.rows[r]);
        }
    }
}

/// One row of one tile.
///
/// `logits[at .. at + len]` belongs to tokens `first + at ..`. For a head, `logits` already holds the products.
struct Span<'a, 'b> {
    source: &'a Source<'b>,
    planned: &'a Planned<'b>,
    first: u32,
    at: usize,
    len: usize,
    logits: &'a mut [f32],
    lists: &'a mut [Vec<Candidate>],
    above: &'a mut LogitCache,
    /// The index of the row, and the shared bounds.
    known: (usize, &'a SharedBounds),
    /// If `logits` are upper bounds: the tokens that may win.
    possible_winners: Option<&'a mut PossibleWinners>,
}

/// Transforms the logits of one row of one tile, and adds the logits to the row's state.
///
/// # Safety
/// The instruction set of `V` is available.
#[inline(always)]
unsafe fn summarize<V: Vector>(span: Span<'_, '_>, state: &mut RowState) {
    let Span { source, planned, first, at, len, logits, lists, above, known, possible_winners } = span;
    let row = &planned.row;
    let (token, end) = (first + at as u32, at + len);
    let tokens = token..token + len as u32;
    let invalid = |stage, logits: &[f32]| first_invalid(token, logits).map(|error| StagedError { stage, error });
    let transform = RowTransform { adjustments: planned.adjustments.near(tokens.clone()), ..row.transform };
    let needs_raw = matches!(planned.kind, PassKind::Summary) && state.raw.is_on();
    let is_scaled = transform.mask.is_none() && transform.adjustments.is_empty() && !needs_raw;
    // Without a transform, `V::largest` also detects invalid raw logits.
    let is_raw = is_scaled && transform.inv_temperature == 1.0;
    let spans = match source.spans(planned.at, tokens.clone()).filter(|_| is_scaled) {
        Some(spans) if is_raw => spans,
        Some(spans) => {
            if !scale(spans.as_flattened(), transform.inv_temperature, logits) {
                state.invalid = StagedError::first(state.invalid, invalid(Stage::Raw, spans.as_flattened()));
                return;
            }
            logits[..len].as_chunks::<SPAN>().0
        }
        None => {
            match source {
                Source::Head { .. } => source.transform(token, &mut logits[at..end]),
                Source::Logits { .. } => source.read(planned.at, tokens, &mut logits[at..end]),
            }
            if !is_raw {
                if any_invalid(&logits[at..end]) {
                    if let Some(possible_winners) = possible_winners {
                        return possible_winners.request_all_logits();
                    }
                    state.invalid = StagedError::first(state.invalid, invalid(Stage::Raw, &logits[at..end]));
                    return;
                }
                if needs_raw {
                    state.raw.add(token, &logits[at..end]);
                }
                // All logits are finite or -inf here. The transform produces no NaN, but may overflow.
                transform.apply(token, &mut logits[at..end]);
            }
            logits[..at].fill(f32::NEG_INFINITY);
            let whole = end.next_multiple_of(SPAN);
            logits[end..whole].fill(f32::NEG_INFINITY);
            logits[..whole].as_chunks::<SPAN>().0
        }
    };
    let mut tops = [f32::NEG_INFINITY; SPANS];
    let tops = &mut tops[..spans.len().next_multiple_of(BLOCKS)];
    if let Some(possible_winners) = possible_winners {
        // SAFETY: by this function's contract.
        return unsafe { possible_winners.add::<V>((planned, known), first, spans, tops, state) };
    }
    // SAFETY: by this function's contract.
    let Some(top) = (unsafe { V::largest(spans, tops) }) else {
        let invalid = invalid(if is_raw { Stage::Raw } else { Stage::Transformed }, &spans.as_flattened()[at..end]);
        state.invalid = StagedError::first(state.invalid, invalid);
        return;
    };
    let tops = (top, &*tops);
    match planned.kind {
        PassKind::Summary if top > f32::NEG_INFINITY => {
            state.has_finite = true;
            // SAFETY: by this function's contract.
            unsafe { add::<V>(planned, first, spans, tops, (known.1.row(known.0), above), state) };
            if let (Some(_), Some(mass)) = (&row.filters, &mut state.mass) {
                let FilterState { floor, largest_logit, .. } = &mut state.filter;
                floor.learn(mass, len as u32, source.tokens(), *largest_logit, known.0, known.1);
            }
        }
        PassKind::Summary => {}
        PassKind::PrefixMass { below } => {
            state.filter.add_prefix_mass(first, spans, top);
            if let (Some(mass), true) = (&mut state.mass, below > f32::NEG_INFINITY) {
                mass.extend_below(spans.as_flattened(), below);
            }
        }
        PassKind::PrefixCount => {
            for (rank, count) in state.prefix_counts.iter_mut().filter(|(rank, _)| top >= rank.logit) {
                *count += rank.count_before(first, spans.as_flattened());
            }
        }
        // SAFETY: by this function's contract.
        PassKind::List { floor, slot } => unsafe {
            rank::<V>(first, spans, tops.1, floor, |c| {
                lists[slot].push(c);
                floor
            });
        },
    }
}

/// Writes `logits` times `factor` to `to`; returns false if any logit is NaN or +inf.
#[inline(always)]
fn scale(logits: &[f32], factor: f32, to: &mut [f32]) -> bool {
    let mut invalid = false;
    for (to, &logit) in to.iter_mut().zip(logits) {
        invalid |= logit.is_nan() | (logit == f32::INFINITY);
        *to = logit * factor;
    }
    !invalid
}

/// Adds a tile of transformed logits to the state of the row; `tops` has the largest logit of each span.
///
/// # Safety
/// The instruction set of `V` is available.
#[inline(always)]
unsafe fn add<V: Vector>(
    Planned { row, keys, .. }: &Planned<'_>,
    first: u32,
    spans: &[[f32; SPAN]],
    (top, tops): (f32, &[f32]),
    (known, above): (&RowBounds, &mut LogitCache),
    state: &mut RowState,
) {
    if let Some(filters) = &row.filters {
        // SAFETY: by this function's contract.
        return unsafe { filtered::add::<V>((row, keys), filters, first, spans, (top, tops), (known, above), state) };
    }
    if let (true, Some(mass)) = (state.weighed, &mut state.mass) {
        // SAFETY: by this function's contract.
        unsafe { V::weigh(spans, top, mass) };
    }
    let cut = state.top.threshold();
    if top >= cut {
        let offer = |c| {
            state.top.push(c);
            state.top.threshold()
        };
        // SAFETY: by this function's contract.
        unsafe { rank::<V>(first, spans, tops, cut, offer) };
    }
    for (winner, draw) in state.best.winners.iter_mut().zip(row.first_draw..) {
        // Workers share only the first draw.
        let known = Some(known).filter(|_| state.shares && draw == row.first_draw);
        let mut keep = KeepWinner::new(winner, known);
        let ahead = Some(&mut state.ahead).filter(|_| draw == row.first_draw);
        // SAFETY: by this function's contract.
        unsafe { draw_tile::<V>((row, keys), draw, first, spans, (top, tops), ahead, &mut keep) };
    }
    for (list, draw) in state.best.lists_mut().iter_mut().zip(row.first_draw..) {
        // SAFETY: by this function's contract.
        unsafe { draw_tile::<V>((row, keys), draw, first, spans, (top, tops), None, list) };
    }
}
