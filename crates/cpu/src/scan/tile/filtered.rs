//! Adds a tile to the state of a row with filters: masses, largest logits, and one frontier per draw.
//!
//! For a tile of upper bounds, finds the tokens whose logits may change this state.

use super::SPANS;
use super::possible_winners::TokenSet;
use super::threshold_scan::rank;
use crate::scan::granules::RoundKeys;
use crate::scan::logit_cache::LogitCache;
use crate::scan::mass_cutoff::RowBounds;
use crate::scan::perturb::{Keep, Perturbed};
use crate::scan::row_state::RowState;
use crate::simd::{SPAN, Vector};
use core::ops::Range;
use flash_sampling_core::backend::{Candidate, Filters, Frontier, LogitRank, MassHistogram, Row};

/// Adds a tile to the filter state of a row.
///
/// # Safety
/// The instruction set of `V` is available.
#[inline(always)]
pub(super) unsafe fn add<V: Vector>(
    (row, keys): (&Row<'_>, &RoundKeys),
    filters: &Filters,
    first: u32,
    spans: &[[f32; SPAN]],
    (top, tops): (f32, &[f32]),
    (known, above): (&RowBounds, &mut LogitCache),
    state: &mut RowState,
) {
    let filter = &mut state.filter;
    if filters.need_moments() {
        // SAFETY: by this function's contract.
        unsafe { V::sum_moments(spans, &mut filter.moments) };
    }
    filter.largest_logit = filter.largest_logit.max(top);
    if filter.follows {
        filter.largest_logit = known.largest(filter.largest_logit);
    }
    let drop_threshold = filters.drop_threshold(filter.largest_logit);
    if top < drop_threshold {
        return;
    }
    if let (true, Some(mass)) = (state.weighed, &mut state.mass) {
        let floor = &mut filter.floor;
        if floor.may_rise() {
            floor.follow(mass, known);
        }
        if floor.tail.is_on() {
            let kept = (above, &mut filter.run);
            // SAFETY: by this function's contract.
            floor.tail.add(f64::from(unsafe { V::weigh_above(spans, tops, floor.tail.floor(), mass, kept) }));
        } else {
            if floor.may_rise() {
                above.extend(&mut filter.run, spans.as_flattened().iter().copied());
                floor.holds(MassHistogram::edge(smallest(spans)));
            } else {
                floor.holds(f32::NEG_INFINITY);
            }
            // SAFETY: by this function's contract.
            unsafe { weigh::<V>(spans, top, MassHistogram::edge(drop_threshold), mass) };
        }
    }
    // The pass drops tokens below the mass cutoff. If the cutoff proves too high, the row takes a second pass.
    let floor = if filter.floor.may_rise() { filter.floor.tail.floor() } else { f32::NEG_INFINITY };
    if filter.floor.may_rise() {
        // If the row needs one token, the cutoff is the largest logit of all workers so far. One worker lists its
        // token.
        filter.largest.bound(if filter.largest.wants_one() { filter.largest_logit } else { floor });
    }
    if top < floor {
        return;
    }
    let shared = known.list.floor();
    if shared > f32::NEG_INFINITY {
        filter.largest.bound(shared);
    }
    let cut = filter.largest.threshold(first);
    if top >= cut {
        let (mut next, mut list) = (cut, known.list.open());
        let offer = |c: Candidate| {
            if let Some(list) = &mut list {
                list.push(c.logit, c.winner.token);
            }
            if filter.largest.push(c.logit, c.winner.token) {
                next = filter.largest.threshold(c.winner.token + 1);
            }
            next
        };
        // SAFETY: by this function's contract.
        unsafe { rank::<V>(first, spans, tops, cut, offer) };
    }
    let mut memory = None;
    let (drawn, drawn_tops) = rescale(spans, tops, filters.rescale, &mut memory);
    let follows = filter.follows;
    for (frontier, draw) in filter.frontiers_mut().iter_mut().zip(row.first_draw..) {
        // Workers share bounds for the first draw only.
        let known = Some(known).filter(|_| follows && draw == row.first_draw);
        let mut keep = KeepFrontier::new(frontier, known, first, spans, tops);
        let floor = floor.max(drop_threshold) * filters.rescale;
        let tile = Perturbed { noise: &row.noise, keys, draw, first, spans: drawn, tops: drawn_tops, floor };
        let ahead = Some(&mut state.ahead).filter(|_| draw == row.first_draw);
        // SAFETY: by this function's contract.
        unsafe { tile.offer_to::<V, _>(ahead, &mut keep) };
    }
}

/// Finds the tokens of a tile of upper bounds that may change the state of a row, and adds them to `found` for row `at`
/// of the source.
///
/// The filters drop a token below the min-p of the largest logit so far, and a token below the k-th largest logit so
/// far. Of the other tokens, only those that can win need a logit, unless the row needs a list or masses.
///
/// # Safety
/// The instruction set of `V` is available.
#[inline(always)]
pub(super) unsafe fn find<V: Vector>(
    (row, keys): (&Row<'_>, &RoundKeys),
    filters: &Filters,
    (first, spans, (top, tops)): (u32, &[[f32; SPAN]], (f32, &[f32])),
    (known, state): (&RowBounds, &RowState),
    (found, at): (&mut TokenSet, usize),
) {
    let filter = &state.filter;
    let largest = if filter.follows { known.largest(filter.largest_logit) } else { filter.largest_logit };
    let drop_threshold = filters.drop_threshold(largest);
    if top < drop_threshold {
        return;
    }
    if state.weighed || filter.frontiers().is_empty() {
        let listed = filter.largest.threshold(first).max(known.list.floor());
        let cut = if state.weighed { MassHistogram::edge(drop_threshold) } else { drop_threshold.max(listed) };
        let offer = |c: Candidate| {
            found.insert(c.winner.token, at);
            if found.is_full() { f32::MAX } else { cut }
        };
        // SAFETY: by this function's contract.
        return unsafe { rank::<V>(first, spans, tops, cut, offer) };
    }
    let mut memory = None;
    let (drawn, drawn_tops) = rescale(spans, tops, filters.rescale, &mut memory);
    for (frontier, draw) in filter.frontiers().iter().zip(row.first_draw..) {
        let known = Some(known).filter(|_| filter.follows && draw == row.first_draw);
        let mut keep = PossiblePoints { frontier, known, first, spans, tops, found, at };
        let floor = drop_threshold * filters.rescale;
        let tile = Perturbed { noise: &row.noise, keys, draw, first, spans: drawn, tops: drawn_tops, floor };
        // SAFETY: by this function's contract.
        unsafe { tile.offer_to::<V, _>(None, &mut keep) };
    }
}

/// A tile of logits after a temperature that follows the filters.
struct Rescaled {
    spans: [[f32; SPAN]; SPANS],
    tops: [f32; SPANS],
}

/// Multiplies a tile by `factor`, in `memory` unless it is 1.
#[inline(always)]
fn rescale<'a>(
    spans: &'a [[f32; SPAN]],
    tops: &'a [f32],
    factor: f32,
    memory: &'a mut Option<Rescaled>,
) -> (&'a [[f32; SPAN]], &'a [f32]) {
    if factor == 1.0 {
        return (spans, tops);
    }
    let scaled = memory.insert(Rescaled { spans: [[0.0; SPAN]; SPANS], tops: [0.0; SPANS] });
    for (s, &logit) in scaled.spans.as_flattened_mut().iter_mut().zip(spans.as_flattened()) {
        *s = logit * factor;
    }
    for (s, &top) in scaled.tops.iter_mut().zip(tops) {
        *s = top * factor;
    }
    (&scaled.spans[..spans.len()], &scaled.tops[..tops.len()])
}

/// Returns the score that a token must reach to enter a frontier, for tokens at or after a rank.
#[inline(always)]
fn score_cut(frontier: &Frontier, known: Option<&RowBounds>, rank: LogitRank) -> f32 {
    let own = frontier.winner_from(rank).winner.score;
    own.max(known.map_or(f32::NEG_INFINITY, |known| known.best_above(rank.logit)))
}

/// Returns the first rank of the tokens of these spans.
#[inline(always)]
fn first_rank(first: u32, tops: &[f32], spans: Range<usize>) -> LogitRank {
    let token = first + (spans.start * SPAN) as u32;
    let logit = tops[spans].iter().copied().fold(f32::NEG_INFINITY, |a, b| if b > a { b } else { a });
    LogitRank { logit, token }
}

/// The tokens of a tile of upper bounds that may enter the frontier of a draw.
struct PossiblePoints<'a> {
    frontier: &'a Frontier,
    known: Option<&'a RowBounds>,
    first: u32,
    spans: &'a [[f32; SPAN]],
    tops: &'a [f32],
    found: &'a mut TokenSet,
    at: usize,
}

impl Keep for PossiblePoints<'_> {
    /// No cutoff holds for all logits. A full set ends the search.
    #[inline(always)]
    fn cut(&self) -> f32 {
        if self.found.is_full() { f32::MAX } else { f32::NEG_INFINITY }
    }

    #[inline(always)]
    fn cut_in(&self, spans: Range<usize>) -> f32 {
        self.cut().max(score_cut(self.frontier, self.known, first_rank(self.first, self.tops, spans)))
    }

    #[inline(always)]
    fn offer(&mut self, c: Candidate) {
        let token = c.winner.token;
        let logit = self.spans.as_flattened()[(token - self.first) as usize];
        if c.winner.score >= score_cut(self.frontier, self.known, LogitRank { logit, token }) {
            self.found.insert(token, self.at);
        }
    }
}

/// The frontier of a draw, and a tile of the logits that enter the filters.
///
/// If the temperature follows the filters, these logits are not yet divided by the temperature.
struct KeepFrontier<'a> {
    frontier: &'a mut Frontier,
    /// The bounds that workers share for this draw, if any: a token of one worker prunes tokens of all workers.
    known: Option<&'a RowBounds>,
    first: u32,
    spans: &'a [[f32; SPAN]],
    tops: &'a [f32],
    /// The best score of the frontier or of the shared bounds, and the logit of the token with this score.
    best: (f32, f32),
}

impl<'a> KeepFrontier<'a> {
    #[inline(always)]
    fn new(
        frontier: &'a mut Frontier,
        known: Option<&'a RowBounds>,
        first: u32,
        spans: &'a [[f32; SPAN]],
        tops: &'a [f32],
    ) -> Self {
        let mut keep = KeepFrontier { frontier, known, first, spans, tops, best: (f32::NEG_INFINITY, f32::INFINITY) };
        keep.refresh();
        keep
    }

    #[inline(always)]
    fn refresh(&mut self) {
        let own = self.frontier.as_slice().last().map(|best| (best.winner.score, best.logit));
        let rival = self.known.map(RowBounds::best).unwrap_or((f32::NEG_INFINITY, f32::INFINITY));
        self.best = own.filter(|own| own.0 >= rival.0).unwrap_or(rival);
    }
}

impl Keep for KeepFrontier<'_> {
    #[inline(always)]
    fn cut(&self) -> f32 {
        self.best.0
    }

    #[inline(always)]
    fn cut_in(&self, spans: Range<usize>) -> f32 {
        // Tokens arrive in ascending order, so a frontier point with a logit of at least `top` ranks before the spans.
        let rank = first_rank(self.first, self.tops, spans);
        if rank.logit < self.best.1 { self.best.0 } else { score_cut(self.frontier, self.known, rank) }
    }

    #[inline(always)]
    fn offer(&mut self, c: Candidate) {
        let c = Candidate { logit: self.spans.as_flattened()[(c.winner.token - self.first) as usize], ..c };
        self.frontier.push(c);
        if let Some(known) = self.known {
            known.share_token(&c);
        }
        self.refresh();
    }

    #[inline(always)]
    fn offer_first(&mut self, c: Candidate, spans: Range<usize>) -> f32 {
        let at = (c.winner.token - self.first) as usize;
        let (logit, tops) = (self.spans.as_flattened()[at], &self.tops[spans.clone()]);
        self.offer(c);
        // The first of the largest logits ranks before all other tokens of the spans, so lower scores do not count.
        let is_largest = spans.contains(&(at / SPAN)) && tops.iter().all(|&top| top <= logit);
        self.cut_in(spans).max(if is_largest { c.winner.score } else { f32::NEG_INFINITY })
    }
}

/// Returns the smallest finite logit.
///
/// Sixteen running minima shorten the dependency chain.
#[inline(always)]
fn smallest(spans: &[[f32; SPAN]]) -> f32 {
    let mut least = [f32::INFINITY; 16];
    for block in spans.as_flattened().as_chunks::<16>().0 {
        for i in 0..16 {
            let logit = if block[i] == f32::NEG_INFINITY { f32::INFINITY } else { block[i] };
            least[i] = if logit < least[i] { logit } else { least[i] };
        }
    }
    least.into_iter().fold(f32::INFINITY, f32::min)
}

/// Adds the masses of logits that reach `floor`; `top` is the largest logit.
///
/// # Safety
/// The instruction set of `V` is available.
#[inline(always)]
unsafe fn weigh<V: Vector>(spans: &[[f32; SPAN]], top: f32, floor: f32, mass: &mut MassHistogram) {
    if floor == f32::NEG_INFINITY {
        // SAFETY: by this function's contract.
        return unsafe { V::weigh(spans, top, mass) };
    }
    for span in spans {
        // SAFETY: by this function's contract.
        let mut hits = unsafe { V::at_least(span, [floor; 4]) };
        while hits != 0 {
            mass.push(span[hits.trailing_zeros() as usize]);
            hits &= hits - 1;
        }
    }
}
