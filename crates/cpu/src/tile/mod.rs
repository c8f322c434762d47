//! One tile: its logits, their transforms, and what each row keeps of them.

use crate::above::Above;
use crate::dot::{DotScratch, TILE};
use crate::filtered::{Ask, FilterState, Short};
use crate::floor::{Known, KnownRow};
use crate::grouped::Chosen;
use crate::isa::Isa;
use crate::prefetch::prefetch;
use crate::state::{Fault, RowState};
use crate::words::{Lanes, SPAN, portable};
#[cfg(target_arch = "x86_64")]
use crate::words::{avx2, avx512};
use core::ops::Range;
use flash_sampling_core::params::Row;
use flash_sampling_core::transform::{RowTransform, any_invalid, first_invalid};
use flash_sampling_core::{Candidate, IndexedAdjustments, RowError};
use rank::{draw_tile, rank};
pub(crate) use source::Source;
use std::sync::Arc;

mod filtered;
mod rank;
mod source;

/// A row that takes part in a pass.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Planned<'a> {
    pub(crate) row: Row<'a>,
    /// What the row's transform says of single tokens.
    pub(crate) adjustments: IndexedAdjustments<'a>,
    /// How far below the best a candidate may be and still be the canonical winner; 0 = not canonical.
    pub(crate) slack: f32,
    /// Where the source has the row.
    pub(crate) at: usize,
    pub(crate) ask: Ask,
}

/// The memory of one worker.
#[derive(Debug)]
pub(crate) struct Worker {
    /// Logits of a tile, `[rows, TILE]`, and a span of margin for tiles that do not begin on the grid.
    logits: Vec<f32>,
    dot: DotScratch,
    pub(crate) rows: Vec<RowState>,
    /// The tokens of rows that a pass lists.
    pub(crate) lists: Vec<Vec<Candidate>>,
    /// The groups seen so far, for variants that draw a group.
    pub(crate) chosen: Vec<Chosen>,
    /// The logits above the floors of rows.
    pub(crate) above: Above,
    known: Arc<Known>,
}

impl Worker {
    pub(crate) fn new(rows: Vec<RowState>, dot: DotScratch, known: Arc<Known>) -> Self {
        let logits = vec![0.0; rows.len() * TILE + SPAN];
        Worker { logits, dot, rows, lists: Vec::new(), chosen: Vec::new(), above: Above::default(), known }
    }

    /// Empties the states for the rows of a pass; `short` as for [`FilterState::begin`](crate::filtered::FilterState::begin).
    pub(crate) fn begin(&mut self, rows: &[Result<Planned<'_>, RowError>], short: Option<Short>) {
        for (state, row) in self.rows.iter_mut().zip(rows) {
            if let Ok(planned) = row {
                state.begin(&planned.row, planned.slack, short);
            }
        }
    }

    /// The raw logit of a token, as a pass over `source` has it, by row.
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

    /// Adds `tokens` to the states.
    pub(crate) fn evaluate(
        &mut self,
        source: &Source<'_>,
        rows: &[Result<Planned<'_>, RowError>],
        tokens: Range<u32>,
        simd: Simd,
    ) {
        let grid = tokens.start / SPAN as u32 * SPAN as u32;
        for first in (grid..tokens.end).step_by(TILE) {
            let part = first.max(tokens.start)..first.saturating_add(TILE as u32).min(tokens.end);
            let at = (part.start - first) as usize;
            source.fill(part.clone(), &mut self.logits[at..], &mut self.dot);
            for (r, row) in rows.iter().enumerate() {
                let Ok(planned) = row else { continue };
                prefetch(self.above.next());
                // A row's memory lies behind pointers: each step looks at what the step before has fetched.
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
                let logits = &mut self.logits[planned.at * TILE..][..TILE];
                let (lists, above, known) = (&mut self.lists, &mut self.above, (r, &*self.known));
                let span = Span { source, planned, first, at, len: part.len(), logits, lists, above, known };
                simd.summarize(span, &mut self.rows[r]);
            }
        }
    }
}

/// The raw logits of one row and tile: `logits[at .. at + len]` belong to tokens `first + at ..`.
struct Span<'a, 'b> {
    source: &'a Source<'b>,
    planned: &'a Planned<'b>,
    first: u32,
    at: usize,
    len: usize,
    logits: &'a mut [f32],
    lists: &'a mut [Vec<Candidate>],
    above: &'a mut Above,
    /// The row's number, and what workers know of each other.
    known: (usize, &'a Known),
}

/// Instruction set of everything but the dot products. The results do not depend on it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Simd {
    Portable,
    #[cfg(target_arch = "x86_64")]
    Avx2,
    #[cfg(target_arch = "x86_64")]
    Avx512,
}

impl Simd {
    /// The vectors that go with an available instruction set.
    pub(crate) fn of(isa: Isa) -> Simd {
        match isa {
            #[cfg(target_arch = "x86_64")]
            Isa::Avx2 => Simd::Avx2,
            #[cfg(target_arch = "x86_64")]
            Isa::Avx512 | Isa::Avx512Bf16 | Isa::Amx => Simd::Avx512,
            _ => Simd::Portable,
        }
    }

    fn summarize(self, span: Span<'_, '_>, state: &mut RowState) {
        match self {
            // SAFETY: plain Rust is always available.
            Simd::Portable => unsafe { summarize::<portable::Portable>(span, state) },
            // SAFETY: `of` was given an available instruction set.
            #[cfg(target_arch = "x86_64")]
            Simd::Avx2 => unsafe { summarize_avx2(span, state) },
            // SAFETY: as above.
            #[cfg(target_arch = "x86_64")]
            Simd::Avx512 => unsafe { summarize_avx512(span, state) },
        }
    }
}

/// # Safety
/// AVX2 and FMA are available.
#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx2,fma,f16c")]
unsafe fn summarize_avx2(span: Span<'_, '_>, state: &mut RowState) {
    // SAFETY: by this function's contract.
    unsafe { summarize::<avx2::Avx2>(span, state) };
}

/// # Safety
/// AVX-512 F, BW, DQ and VL, and POPCNT are available.
#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx2,fma,f16c,popcnt")]
unsafe fn summarize_avx512(span: Span<'_, '_>, state: &mut RowState) {
    // SAFETY: by this function's contract.
    unsafe { summarize::<avx512::Avx512>(span, state) };
}

/// Transforms the logits of one row and tile, and adds them to the row's state.
///
/// # Safety
/// The instruction set of `L` is available.
#[inline(always)]
unsafe fn summarize<L: Lanes>(span: Span<'_, '_>, state: &mut RowState) {
    let Span { source, planned, first, at, len, logits, lists, above, known } = span;
    let row = &planned.row;
    let (token, end) = (first + at as u32, at + len);
    if let Source::Head { head, .. } = source {
        head.transform(token, &mut logits[at..end]);
    }
    if any_invalid(&logits[at..end]) {
        let fault = first_invalid(token, &logits[at..end]).map(|error| Fault { stage: 0, error });
        state.fault = Fault::first(state.fault, fault);
        return;
    }
    if matches!(planned.ask, Ask::Summary) {
        state.raw.add(token, &logits[at..end]);
    }
    // Logits that are finite or -inf: the transform makes no NaN of these.
    let adjustments = planned.adjustments.near(token..token + len as u32);
    RowTransform { adjustments, ..row.transform }.apply(token, &mut logits[at..end]);
    logits[..at].fill(f32::NEG_INFINITY);
    let whole = end.next_multiple_of(SPAN);
    logits[end..whole].fill(f32::NEG_INFINITY);
    let spans = logits[..whole].as_chunks::<SPAN>().0;
    let mut tops = [f32::NEG_INFINITY; TILE / SPAN + 1];
    for (top, span) in tops.iter_mut().zip(spans) {
        // SAFETY: by this function's contract.
        *top = unsafe { L::largest(span) };
    }
    let top = tops.into_iter().fold(f32::NEG_INFINITY, f32::max);
    if top == f32::INFINITY {
        let fault = first_invalid(first, &logits[..whole]).map(|error| Fault { stage: 1, error });
        state.fault = Fault::first(state.fault, fault);
        return;
    }
    match planned.ask {
        Ask::Summary if top > f32::NEG_INFINITY => {
            state.alive = true;
            // SAFETY: by this function's contract.
            unsafe { add::<L>(row, first, spans, &tops, (known.1.row(known.0), above), state) };
            if let (Some(_), Some(mass)) = (&row.filters, &mut state.mass) {
                let FilterState { floor, largest_logit, .. } = &mut state.filter;
                floor.learn(mass, len as u32, source.tokens(), *largest_logit, known.0, known.1);
            }
        }
        Ask::Summary => {}
        Ask::Before => {
            state.filter.add_before(first, spans, top);
            let floor = state.filter.floor.below.floor();
            if let (Some(mass), true) = (&mut state.mass, floor > f32::NEG_INFINITY) {
                mass.extend_below(spans.as_flattened(), floor);
            }
        }
        // SAFETY: by this function's contract.
        Ask::List { floor, slot } => unsafe {
            rank::<L>(first, spans, &tops, floor, |c| {
                lists[slot].push(c);
                floor
            });
        },
    }
}

/// Adds a tile of transformed logits, the largest of each span in `tops`, to what the row keeps.
///
/// # Safety
/// The instruction set of `L` is available.
#[inline(always)]
unsafe fn add<L: Lanes>(
    row: &Row<'_>,
    first: u32,
    spans: &[[f32; SPAN]],
    tops: &[f32; TILE / SPAN + 1],
    shared: (&KnownRow, &mut Above),
    state: &mut RowState,
) {
    if let Some(filters) = &row.filters {
        // SAFETY: by this function's contract.
        return unsafe { filtered::add::<L>(row, filters, first, spans, tops, shared, state) };
    }
    let top = tops.iter().copied().fold(f32::NEG_INFINITY, f32::max);
    if let (true, Some(mass)) = (state.weighed, &mut state.mass) {
        // SAFETY: by this function's contract.
        unsafe { L::weigh(spans, top, mass) };
    }
    let cut = state.top.threshold();
    if top >= cut {
        let offer = |c| {
            state.top.push(c);
            state.top.threshold()
        };
        // SAFETY: by this function's contract.
        unsafe { rank::<L>(first, spans, tops, cut, offer) };
    }
    for (winner, draw) in state.best.winners.iter_mut().zip(row.first_draw..) {
        let cut = winner.winner.score;
        let offer = |c| {
            *winner = winner.merge(c);
            winner.winner.score
        };
        // SAFETY: by this function's contract.
        unsafe { draw_tile::<L>(row, draw, first, spans, tops, cut, offer) };
    }
    for (list, draw) in state.best.lists_mut().iter_mut().zip(row.first_draw..) {
        let cut = list.threshold();
        let offer = |c| {
            list.push(c);
            list.threshold()
        };
        // SAFETY: by this function's contract.
        unsafe { draw_tile::<L>(row, draw, first, spans, tops, cut, offer) };
    }
}
