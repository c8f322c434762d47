//! The floor below which the masses of a row with top-p are summed without bins, and what workers tell each other of rows.
//!
//! A row that keeps the first tokens until their mass reaches `p` of the whole needs its bins where that limit lies, and
//! above; what is below the limit counts as one number, and takes no noise. Where it lies is known only in the end, so the
//! workers guess it, one for all, from what one has seen, and from the largest logit that any has seen: a floor, under
//! which less than `1 - p` of the mass will lie. In the end the masses tell whether it does. A row whose floor was too high
//! takes its pass again; guesses become more cautious after that, and bolder after calls without.
//!
//! Sixteen workers that each find out about 64 rows by themselves spent more on that than on all the rest of top-p: each
//! guessed, each listed the largest of its own 9500 tokens, and each looked for points of the frontier among tokens that
//! those of other workers beat.

use crate::scan::prefetch::prefetch;
use core::sync::atomic::{AtomicU32, AtomicU64, Ordering};
use flash_sampling_core::backend::selection::TailMass;
use flash_sampling_core::{Candidate, MassHistogram};

/// Tokens of a worker after which a row's floor is guessed first, and the binary logarithm of the factor by which they grow
/// until it is guessed again.
const FIRST: u32 = 256;
const AGAIN: u32 = 2;
/// Nats by which a row's largest logit must rise for another guess.
const RISE: f32 = 1.0;
/// The share of `1 - p` that a guess may leave below: at most, and what it is multiplied by after a miss and after a call
/// without one. Below the least there is no floor.
const BOLDEST: f32 = 0.9;
const AFTER_MISS: f32 = 0.5;
const AFTER_CALL: f32 = 1.02;
const LEAST: f32 = 0.02;

/// By which share guesses are more cautious, over the square root of the tokens that they are made from. Without it one of a
/// thousand guesses from 256 tokens of a Gaussian of deviation 1 left 1.3 of what it asked for below, and none of 100000 with
/// deviations 2 and 3 more than 1.001: the few largest, which say least of the rest, count once.
const CAUTION: f32 = 6.0;

/// What workers know of each other's rows.
#[derive(Debug)]
pub(crate) struct SharedBounds {
    rows: Vec<RowBounds>,
    /// The share that guesses may take, as bits.
    share: AtomicU32,
}

/// What workers know of a row; logits are integers in the same order. Whatever a worker reads here of another spares it
/// work and decides nothing, so no order between workers is needed.
#[derive(Debug)]
#[repr(align(32))]
pub(crate) struct RowBounds {
    largest: AtomicU32,
    /// The highest floor.
    floor: AtomicU32,
    /// A logit that some worker has listed enough tokens from.
    cut: AtomicU32,
    /// The largest logit at the last guess.
    guessed: AtomicU32,
    /// Guesses by number of tokens.
    guesses: AtomicU32,
    /// A token of the first draw: its score, and its logit in the low half. Of rows without filters the best score alone.
    rival: AtomicU64,
}

/// An integer that rises with a float; both zeros are one, as in the order of places.
fn ordered(logit: f32) -> u32 {
    let bits = (logit + 0.0).to_bits();
    if bits >> 31 == 1 { !bits } else { bits | 1 << 31 }
}

fn of_ordered(bits: u32) -> f32 {
    f32::from_bits(if bits >> 31 == 1 { bits & !(1 << 31) } else { !bits })
}

/// Raises a logit to `own`, and returns the larger one. A store takes the line from all other workers, so it is the
/// exception.
#[inline(always)]
fn raised(logit: &AtomicU32, own: f32) -> f32 {
    let known = of_ordered(logit.load(Ordering::Relaxed));
    if own > known {
        logit.fetch_max(ordered(own), Ordering::Relaxed);
        return own;
    }
    known
}

impl RowBounds {
    fn new() -> Self {
        let none = || AtomicU32::new(ordered(f32::NEG_INFINITY));
        RowBounds {
            largest: none(),
            floor: none(),
            cut: none(),
            guessed: none(),
            guesses: AtomicU32::new(0),
            rival: AtomicU64::new(0),
        }
    }

    fn begin(&self) {
        let none = ordered(f32::NEG_INFINITY);
        let logits = [&self.largest, &self.floor, &self.cut, &self.guessed];
        logits.into_iter().for_each(|logit| logit.store(none, Ordering::Relaxed));
        self.guesses.store(0, Ordering::Relaxed);
        self.rival.store(0, Ordering::Relaxed);
    }

    /// The score of a token of the first draw with a logit above `logit`, which some worker keeps: no token up to `logit`
    /// with a lower score is ever drawn. -inf where none is known.
    #[inline(always)]
    pub(crate) fn rival(&self, logit: f32) -> f32 {
        let rival = self.rival.load(Ordering::Relaxed);
        if rival as u32 > ordered(logit) { of_ordered((rival >> 32) as u32) } else { f32::NEG_INFINITY }
    }

    /// Returns the best score of the first draw that workers share, and the logit of its token; -inf and +inf before any.
    #[inline(always)]
    pub(crate) fn best(&self) -> (f32, f32) {
        match self.rival.load(Ordering::Relaxed) {
            0 => (f32::NEG_INFINITY, f32::INFINITY),
            rival => (of_ordered((rival >> 32) as u32), of_ordered(rival as u32)),
        }
    }

    /// Makes a token of the first draw known: one with a large logit and a good score spares others most.
    #[inline(always)]
    pub(crate) fn tell(&self, token: &Candidate) {
        let before = self.rival.load(Ordering::Relaxed);
        let sum = of_ordered((before >> 32) as u32) + of_ordered(before as u32);
        if before == 0 || token.winner.score + token.logit > sum {
            let rival = u64::from(ordered(token.winner.score)) << 32 | u64::from(ordered(token.logit));
            // Where another worker was faster, its token is as good.
            let _ = self.rival.compare_exchange(before, rival, Ordering::Relaxed, Ordering::Relaxed);
        }
    }

    /// Raises the best score of a row without filters, in which no logit is compared.
    #[inline(always)]
    pub(crate) fn raise_best_score(&self, score: f32) {
        self.rival.fetch_max(u64::from(ordered(score)) << 32, Ordering::Relaxed);
    }

    /// The largest logit that any worker has seen, `own` of one worker among them.
    #[inline(always)]
    pub(crate) fn largest(&self, own: f32) -> f32 {
        raised(&self.largest, own)
    }

    /// A logit from which some worker has listed enough tokens, `own` of one worker among them; -inf where rows list none.
    #[inline(always)]
    pub(crate) fn cut(&self, own: f32) -> f32 {
        raised(&self.cut, own)
    }

    /// Whether this worker, of `tokens` in this row, is the one that guesses.
    #[inline(always)]
    fn is_asked(&self, tokens: u32, largest: f32) -> bool {
        let guesses = self.guesses.load(Ordering::Relaxed);
        let enough = tokens >> (AGAIN * guesses).min(31) >= FIRST;
        let before = self.guessed.load(Ordering::Relaxed);
        let risen = guesses > 0 && largest > of_ordered(before) + RISE;
        let (to, none) = (ordered(largest), Ordering::Relaxed);
        enough && self.guesses.compare_exchange(guesses, guesses + 1, none, none).is_ok()
            || risen && self.guessed.compare_exchange(before, to, none, none).is_ok()
    }
}

impl SharedBounds {
    pub(crate) fn new(rows: usize) -> Self {
        SharedBounds { rows: (0..rows).map(|_| RowBounds::new()).collect(), share: AtomicU32::new(BOLDEST.to_bits()) }
    }

    /// Forgets the rows of the call before.
    pub(crate) fn begin(&self, rows: usize) {
        self.rows[..rows].iter().for_each(RowBounds::begin);
    }

    /// What is known of row `r`.
    #[inline(always)]
    pub(crate) fn row(&self, r: usize) -> &RowBounds {
        &self.rows[r]
    }

    /// Fetches what is known of row `r`.
    #[inline(always)]
    pub(crate) fn prefetch(&self, r: usize) {
        prefetch(&self.rows[r..=r]);
    }

    /// Takes note of a call in which floors were too high for a row, or for none.
    pub(crate) fn note(&self, missed: bool) {
        let share = f32::from_bits(self.share.load(Ordering::Relaxed));
        let factor = if missed { AFTER_MISS } else { AFTER_CALL };
        self.share.store((share * factor).clamp(LEAST / 2.0, BOLDEST).to_bits(), Ordering::Relaxed);
    }
}

/// A row's floor, and the lowest bin that may hold anything.
#[derive(Clone, Debug)]
pub(crate) struct MassCutoff {
    pub(crate) tail: TailMass,
    /// The `p` of rows that may have a floor.
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

    /// Whether the floor was too high: the row may keep tokens below it, and nothing is known of their scores.
    pub(crate) fn is_too_high(&self, mass: &MassHistogram) -> bool {
        self.p.is_some_and(|p| !self.tail.is_spared(mass, p))
    }

    /// Takes over the floor that a worker has guessed, if it is above this one.
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
        self.tail.add(mass.take_below(floor, self.lowest));
        self.lowest = floor;
    }

    /// Takes note that a tile went into the bins, its smallest finite logit in the bin of this edge or above.
    #[inline(always)]
    pub(crate) fn holds(&mut self, edge: f32) {
        self.lowest = self.lowest.min(edge);
    }

    /// Guesses, if there is reason to, after a tile of `tokens` in `of`; `largest` is the row's largest logit so far.
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
            if row.is_asked(self.tokens, largest) {
                let share = f32::from_bits(known.share.load(Ordering::Relaxed));
                self.guess(mass, of, largest, share, p, row);
            }
        }
    }

    #[cold]
    fn guess(&mut self, mass: &mut MassHistogram, of: u32, largest: f32, share: f32, p: f32, known: &RowBounds) {
        known.guessed.fetch_max(ordered(largest), Ordering::Relaxed);
        if share < LEAST {
            return;
        }
        let share = f64::from(share * (1.0 - CAUTION / (self.tokens as f32).sqrt())) * (1.0 - f64::from(p));
        if let Some(floor) = self.tail.guess(mass, u64::from(self.tokens), u64::from(of), largest, share) {
            known.floor.fetch_max(ordered(floor), Ordering::Relaxed);
            self.raise(mass, floor);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use flash_sampling_core::Winner;

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
        assert_eq!(row.rival(-5.0), f32::NEG_INFINITY);
        row.tell(&token(0.0, 3.5));
        assert_eq!(row.rival(-1.0), 3.5);
        // A token of the same logit may come before it, whatever its zero's sign.
        assert_eq!([row.rival(-0.0), row.rival(0.0), row.rival(1.0)], [f32::NEG_INFINITY; 3]);
        // A better score of a smaller logit spares less; a larger logit more.
        row.tell(&token(-3.0, 4.0));
        assert_eq!(row.rival(-1.0), 3.5);
        row.tell(&token(8.0, 7.5));
        assert_eq!((row.rival(7.0), row.rival(8.0)), (7.5, f32::NEG_INFINITY));
        row.begin();
        assert_eq!(row.rival(-5.0), f32::NEG_INFINITY);
    }
}
