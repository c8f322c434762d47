//! The floor below which the masses of a row with top-p are summed without bins.
//!
//! A row that keeps the first tokens until their mass reaches `p` of the whole needs its bins where that limit lies, and
//! above; what is below the limit counts as one number. Where it lies is known only in the end, so each worker guesses
//! from what it has seen, and from the largest logit that any worker has seen: a floor, under which less than `1 - p` of
//! the mass will lie. A guess that was too high costs the row another pass if its winner is below the floor; guesses
//! become more cautious after that, and bolder after calls without.

use core::sync::atomic::{AtomicU32, Ordering};
use flash_sampling_core::MassHistogram;
use flash_sampling_core::selection::Below;

/// Tokens after which a worker guesses first, and by which factor they grow until it guesses again.
const FIRST: u32 = 1024;
const AGAIN: u32 = 8;
/// Nats by which a row's largest logit must rise for another guess.
const RISE: f32 = 1.0;
/// The share of `1 - p` that a guess may leave below: at most, and what it is multiplied by after a miss and after a call
/// without one. Below the least there is no floor.
const BOLDEST: f32 = 0.7;
const AFTER_MISS: f32 = 0.5;
const AFTER_CALL: f32 = 1.02;
const LEAST: f32 = 0.02;

/// What workers know of each other's rows.
#[derive(Debug)]
pub(crate) struct Known {
    /// The largest logit of each row, as integers in the same order.
    largest: Vec<AtomicU32>,
    /// The share that guesses may take, as bits.
    share: AtomicU32,
}

/// An integer that rises with a float.
fn ordered(logit: f32) -> u32 {
    let bits = logit.to_bits();
    if bits >> 31 == 1 { !bits } else { bits | 1 << 31 }
}

fn of_ordered(bits: u32) -> f32 {
    f32::from_bits(if bits >> 31 == 1 { bits & !(1 << 31) } else { !bits })
}

impl Known {
    pub(crate) fn new(rows: usize) -> Self {
        Known { largest: (0..rows).map(|_| AtomicU32::new(0)).collect(), share: AtomicU32::new(BOLDEST.to_bits()) }
    }

    /// Forgets the rows of the call before.
    pub(crate) fn begin(&self, rows: usize) {
        let none = ordered(f32::NEG_INFINITY);
        self.largest[..rows].iter().for_each(|largest| largest.store(none, Ordering::Relaxed));
    }

    /// The largest logit of row `r`, `own` of one worker among them.
    #[inline(always)]
    fn largest(&self, r: usize, own: f32) -> f32 {
        let known = of_ordered(self.largest[r].load(Ordering::Relaxed));
        if own > known {
            self.largest[r].fetch_max(ordered(own), Ordering::Relaxed);
        }
        known.max(own)
    }

    /// Takes note of a call in which floors were too high for a row, or for none.
    pub(crate) fn note(&self, missed: bool) {
        let share = f32::from_bits(self.share.load(Ordering::Relaxed));
        let factor = if missed { AFTER_MISS } else { AFTER_CALL };
        self.share.store((share * factor).clamp(LEAST / 2.0, BOLDEST).to_bits(), Ordering::Relaxed);
    }
}

/// A row's floor, and what it was guessed from.
#[derive(Clone, Debug, Default)]
pub(crate) struct Floor {
    pub(crate) below: Below,
    /// The `p` of rows that may have a floor.
    p: Option<f32>,
    tokens: u32,
    next: u32,
    largest: f32,
}

impl Floor {
    pub(crate) fn begin(&mut self, p: Option<f32>) {
        *self = Floor { p, next: FIRST, largest: f32::NEG_INFINITY, ..Floor::default() };
    }

    /// Guesses again, if there is reason to, after a tile of `tokens` in `of`; `largest` is the largest logit of row `r` that
    /// this worker has seen.
    #[inline(always)]
    pub(crate) fn learn(&mut self, mass: &MassHistogram, tokens: u32, of: u32, r: usize, largest: f32, known: &Known) {
        if let Some(p) = self.p {
            self.tokens += tokens;
            let largest = known.largest(r, largest);
            if self.tokens >= self.next || self.tokens >= FIRST && largest > self.largest + RISE {
                let share = f32::from_bits(known.share.load(Ordering::Relaxed));
                self.guess(mass, of, largest, share, p);
            }
        }
    }

    #[cold]
    fn guess(&mut self, mass: &MassHistogram, of: u32, largest: f32, share: f32, p: f32) {
        if self.tokens >= self.next {
            self.next = self.tokens.saturating_mul(AGAIN);
        }
        self.largest = largest;
        if share < LEAST {
            return;
        }
        let share = f64::from(share) * (1.0 - f64::from(p));
        if let Some(floor) = self.below.guess(mass, u64::from(self.tokens), u64::from(of), largest, share) {
            self.below.raise(floor);
        }
    }
}
