//! The mass cutoff of rows with top-p, and the bounds that workers share.
//!
//! Top-p keeps the first tokens until their mass reaches `p` of the total mass. It needs bins at and above this limit.
//! The mass below the limit is one number, and its tokens need no noise. The limit is known only at the end of the
//! pass. So one worker estimates a cutoff (a *floor*) for all workers: less than `1 - p` of the mass should be below
//! it. The estimate uses the worker's masses so far, and the largest logit of all workers. At the end, the masses show
//! whether the floor is low enough. If not, the row repeats its pass. Later estimates are more cautious, and become
//! bolder after calls without a miss.
//!
//! Without shared bounds, 16 workers with 64 rows spent more time on this than on all other work for top-p. Each worker
//! made estimates, listed the largest of its 9500 tokens, and added frontier points that other workers beat.

use crate::scan::prefetch::prefetch;
use crate::scan::shared_list::SharedList;
use core::sync::atomic::{AtomicU32, AtomicU64, Ordering};
use flash_sampling_core::backend::selection::TailMass;
use flash_sampling_core::backend::{Candidate, MassHistogram};

/// A worker's number of tokens before the first estimate of a row's floor, and the binary logarithm of the growth of
/// this number until the next estimate.
const FIRST: u32 = 256;
const GROWTH_LOG2: u32 = 2;
/// The rise of a row's largest logit, in nats, that causes another estimate.
const RISE_NATS: f32 = 1.0;
/// The share of `1 - p` that an estimate may leave below the floor: its maximum, its factors after a miss and after a
/// call without a miss, and the minimum share for a floor.
const MAX_SHARE: f32 = 0.9;
const AFTER_MISS: f32 = 0.5;
const AFTER_CALL: f32 = 1.02;
const LEAST: f32 = 0.02;

/// The reduction of the share, divided by the square root of the number of tokens behind the estimate. Without it, one
/// in a thousand estimates from 256 Gaussian logits of deviation 1 left 1.3 times the share below the floor. With
/// deviations 2 and 3, none of 100000 left more than 1.001 times the share: the few largest tokens count once.
const CAUTION: f32 = 6.0;

/// The bounds of all rows, shared by all workers.
#[derive(Debug)]
pub(crate) struct SharedBounds {
    rows: Vec<RowBounds>,
    /// The share that estimates may leave below the floor, as bits.
    share: AtomicU32,
}

/// The bounds of a row, shared by all workers. Logits are stored as integers in the same order. Bounds only prune work
/// and never change a result, so relaxed atomics suffice.
#[derive(Debug)]
#[repr(align(32))]
pub(crate) struct RowBounds {
    largest: AtomicU32,
    /// The highest floor.
    floor: AtomicU32,
    /// The largest logit at the last estimate.
    last_estimate: AtomicU32,
    /// The number of estimates due to the number of tokens.
    estimates: AtomicU32,
    /// A token of the first draw: its score, and its logit in the low half. Without filters, only the best score.
    best_above: AtomicU64,
    /// The first tokens, for rows that draw by upper bounds from a list.
    pub(crate) list: SharedList,
}

/// Returns an integer that rises with a float. Both zeros have one value, as in the order of logits.
pub(crate) fn ordered(logit: f32) -> u32 {
    let bits = (logit + 0.0).to_bits();
    if bits >> 31 == 1 { !bits } else { bits | 1 << 31 }
}

pub(crate) fn of_ordered(bits: u32) -> f32 {
    f32::from_bits(if bits >> 31 == 1 { bits & !(1 << 31) } else { !bits })
}

impl RowBounds {
    fn new() -> Self {
        let none = || AtomicU32::new(ordered(f32::NEG_INFINITY));
        RowBounds {
            largest: none(),
            floor: none(),
            last_estimate: none(),
            estimates: AtomicU32::new(0),
            best_above: AtomicU64::new(0),
            list: SharedList::new(),
        }
    }

    fn begin(&self, list: usize) {
        let none = ordered(f32::NEG_INFINITY);
        let logits = [&self.largest, &self.floor, &self.last_estimate];
        logits.into_iter().for_each(|logit| logit.store(none, Ordering::Relaxed));
        self.estimates.store(0, Ordering::Relaxed);
        self.best_above.store(0, Ordering::Relaxed);
        self.list.begin(list);
    }

    /// Returns the score of a known token of the first draw with a logit above `logit`; -inf if none is known. A token
    /// with a logit up to `logit` and a lower score is never drawn.
    #[inline(always)]
    pub(crate) fn best_above(&self, logit: f32) -> f32 {
        let best_above = self.best_above.load(Ordering::Relaxed);
        if best_above as u32 > ordered(logit) { of_ordered((best_above >> 32) as u32) } else { f32::NEG_INFINITY }
    }

    /// Returns the best shared score of the first draw, and the logit of its token; -inf and +inf before the first.
    #[inline(always)]
    pub(crate) fn best(&self) -> (f32, f32) {
        match self.best_above.load(Ordering::Relaxed) {
            0 => (f32::NEG_INFINITY, f32::INFINITY),
            best_above => (of_ordered((best_above >> 32) as u32), of_ordered(best_above as u32)),
        }
    }

    /// Shares a token of the first draw. Tokens with a large logit and a good score prune most.
    #[inline(always)]
    pub(crate) fn share_token(&self, token: &Candidate) {
        let before = self.best_above.load(Ordering::Relaxed);
        let sum = of_ordered((before >> 32) as u32) + of_ordered(before as u32);
        if before == 0 || token.winner.score + token.logit > sum {
            let best_above = u64::from(ordered(token.winner.score)) << 32 | u64::from(ordered(token.logit));
            // If another worker was faster, its token is as good.
            let _ = self.best_above.compare_exchange(before, best_above, Ordering::Relaxed, Ordering::Relaxed);
        }
    }

    /// Raises the best score of a row without filters, which needs no logits.
    #[inline(always)]
    pub(crate) fn raise_best_score(&self, score: f32) {
        self.best_above.fetch_max(u64::from(ordered(score)) << 32, Ordering::Relaxed);
    }

    /// Returns the largest logit of all workers, after it includes `own`. Stores are rare, because each takes the cache
    /// line from others.
    #[inline(always)]
    pub(crate) fn largest(&self, own: f32) -> f32 {
        let known = of_ordered(self.largest.load(Ordering::Relaxed));
        if own > known {
            self.largest.fetch_max(ordered(own), Ordering::Relaxed);
            return own;
        }
        known
    }

    /// Whether this worker must make an estimate, after `tokens` of the row. True for at most one worker.
    #[inline(always)]
    fn is_estimate_due(&self, tokens: u32, largest: f32) -> bool {
        let estimates = self.estimates.load(Ordering::Relaxed);
        let enough = tokens >> (GROWTH_LOG2 * estimates).min(31) >= FIRST;
        let before = self.last_estimate.load(Ordering::Relaxed);
        let risen = estimates > 0 && largest > of_ordered(before) + RISE_NATS;
        let (to, none) = (ordered(largest), Ordering::Relaxed);
        enough && self.estimates.compare_exchange(estimates, estimates + 1, none, none).is_ok()
            || risen && self.last_estimate.compare_exchange(before, to, none, none).is_ok()
    }
}

impl SharedBounds {
    pub(crate) fn new(rows: usize) -> Self {
        SharedBounds { rows: (0..rows).map(|_| RowBounds::new()).collect(), share: AtomicU32::new(MAX_SHARE.to_bits()) }
    }

    /// Resets the bounds of the rows of a call. `lists`: the length of the list that workers share, for each row.
    pub(crate) fn begin(&self, lists: impl Iterator<Item = usize>) {
        self.rows.iter().zip(lists).for_each(|(row, list)| row.begin(list));
    }

    /// The bounds of row `r`.
    #[inline(always)]
    pub(crate) fn row(&self, r: usize) -> &RowBounds {
        &self.rows[r]
    }

    /// Prefetches the bounds of row `r`.
    #[inline(always)]
    pub(crate) fn prefetch(&self, r: usize) {
        prefetch(&self.rows[r..=r]);
    }

    /// Adapts the share after a call. `missed`: whether the floor of some row was too high.
    pub(crate) fn note(&self, missed: bool) {
        let share = f32::from_bits(self.share.load(Ordering::Relaxed));
        let factor = if missed { AFTER_MISS } else { AFTER_CALL };
        self.share.store((share * factor).clamp(LEAST / 2.0, MAX_SHARE).to_bits(), Ordering::Relaxed);
    }
}

/// A row's floor, the mass below it, and the lowest bin that may hold mass.
#[derive(Clone, Debug)]
pub(crate) struct MassCutoff {
    pub(crate) tail: TailMass,
    /// The `p` of a row that may have a floor.
    p: Option<f32>,
    tokens: u32,
    /// The bins below this edge are empty.
    pub(crate) lowest: f32,
}

impl Default for MassCutoff {
    fn default() -> Self {
        MassCutoff { tail: TailMass::default(), p: None, tokens: 0, lowest: f32::NEG_INFINITY }
    }
}

impl MassCutoff {
    pub(crate) fn begin(&mut self, p: Option<f32>) {
        let lowest = if p.is_some() { f32::INFINITY } else { f32::NEG_INFINITY };
        *self = MassCutoff { p, lowest, ..MassCutoff::default() };
    }

    /// Whether the row may have a floor.
    #[inline(always)]
    pub(crate) fn may_rise(&self) -> bool {
        self.p.is_some()
    }

    /// Whether the floor is too high: the row may keep tokens below it, whose scores are unknown.
    pub(crate) fn is_too_high(&self, mass: &MassHistogram) -> bool {
        self.p.is_some_and(|p| !self.tail.is_below_prefix(mass, p))
    }

    /// Adopts the shared floor, if it is above this floor.
    #[inline(always)]
    pub(crate) fn follow(&mut self, mass: &mut MassHistogram, known: &RowBounds) {
        let floor = of_ordered(known.floor.load(Ordering::Relaxed));
        if floor > self.tail.floor() {
            self.raise(mass, floor);
        }
    }

    #[cold]
    fn raise(&mut self, mass: &mut MassHistogram, floor: f32) {
        self.tail.raise(floor);
        self.tail.add(mass.drain_below(floor, self.lowest));
        self.lowest = floor;
    }

    /// Records that bins from this edge on may hold mass.
    #[inline(always)]
    pub(crate) fn holds(&mut self, edge: f32) {
        self.lowest = self.lowest.min(edge);
    }

    /// Counts a tile of `tokens` out of `of`, and estimates a floor if one is due. `largest` is the row's largest
    /// logit.
    #[inline(always)]
    pub(crate) fn learn(
        &mut self,
        mass: &mut MassHistogram,
        tokens: u32,
        of: u32,
        largest: f32,
        r: usize,
        known: &SharedBounds,
    ) {
        if let Some(p) = self.p {
            self.tokens += tokens;
            let row = known.row(r);
            if row.is_estimate_due(self.tokens, largest) {
                let share = f32::from_bits(known.share.load(Ordering::Relaxed));
                self.raise_floor(mass, of, largest, share, p, row);
            }
        }
    }

    #[cold]
    fn raise_floor(&mut self, mass: &mut MassHistogram, of: u32, largest: f32, share: f32, p: f32, known: &RowBounds) {
        known.last_estimate.fetch_max(ordered(largest), Ordering::Relaxed);
        if share < LEAST {
            return;
        }
        let share = f64::from(share * (1.0 - CAUTION / (self.tokens as f32).sqrt())) * (1.0 - f64::from(p));
        if let Some(floor) = self.tail.estimate_floor(mass, u64::from(self.tokens), u64::from(of), largest, share) {
            known.floor.fetch_max(ordered(floor), Ordering::Relaxed);
            self.raise(mass, floor);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use flash_sampling_core::backend::Winner;

    #[test]
    fn integers_rise_with_floats_and_both_zeros_are_one() {
        let floats = [f32::NEG_INFINITY, f32::MIN, -2.5, -f32::MIN_POSITIVE, 0.0, f32::MIN_POSITIVE, 1.0, f32::MAX];
        assert!(floats.windows(2).all(|pair| ordered(pair[0]) < ordered(pair[1])));
        assert!(floats.iter().all(|&float| of_ordered(ordered(float)) == float));
        assert_eq!(ordered(-0.0), ordered(0.0));
    }

    #[test]
    fn a_rival_spares_what_is_below_it_alone() {
        let row = RowBounds::new();
        let token = |logit, score| Candidate { winner: Winner::new(score, 9), logit };
        assert_eq!(row.best_above(-5.0), f32::NEG_INFINITY);
        row.share_token(&token(0.0, 3.5));
        assert_eq!(row.best_above(-1.0), 3.5);
        // A token with the same logit may precede it, whatever the sign of its zero.
        assert_eq!([row.best_above(-0.0), row.best_above(0.0), row.best_above(1.0)], [f32::NEG_INFINITY; 3]);
        // A better score with a smaller logit prunes less; one with a larger logit prunes more.
        row.share_token(&token(-3.0, 4.0));
        assert_eq!(row.best_above(-1.0), 3.5);
        row.share_token(&token(8.0, 7.5));
        assert_eq!((row.best_above(7.0), row.best_above(8.0)), (7.5, f32::NEG_INFINITY));
        row.begin(0);
        assert_eq!(row.best_above(-5.0), f32::NEG_INFINITY);
    }
}
