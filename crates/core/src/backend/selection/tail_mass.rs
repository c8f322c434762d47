//! The mass below a cutoff, summed without bins.

use crate::summary::mass_histogram::{MassHistogram, STEP, edge_below, edge_of, weight_of};

/// The relative error of a sum of exponentials in float32, compared with the sum of the integer masses.
const ERROR: f64 = 1.0 / 32_768.0;
/// The error of truncated bins and float64 roundings, relative to a token at the highest edge plus all masses.
const SLACK: f64 = 1.0 / (1u64 << 40) as f64;

/// The number of bins that an estimate reads: 30 nats.
const READ: usize = 240;
/// The number of largest tokens that an estimate does not extrapolate to the rest of the row.
const OUT: u64 = 8;
/// The weights of the bins relative to the highest.
const WEIGHTS: [f64; READ] = {
    let (mut weights, mut i) = ([1.0; READ], 1);
    while i < READ {
        weights[i] = weights[i - 1] * STEP;
        i += 1;
    }
    weights
};

/// The mass of logits below a floor, as one sum. Adding each logit to its bin takes longer than all other work for a
/// row with top-p. Bins at and above the floor are complete.
///
/// Masses of different floors merge, and the higher floor applies. The caller adds the bins below it to the sum.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct TailMass {
    /// Lower edge of a bin; -inf: nothing is below it.
    floor: f32,
    /// In units of `e^floor`; the relative error is at most 2^-15.
    sum: f64,
}

impl Default for TailMass {
    fn default() -> Self {
        TailMass { floor: f32::NEG_INFINITY, sum: 0.0 }
    }
}

impl TailMass {
    /// The floor.
    #[inline(always)]
    pub fn floor(&self) -> f32 {
        self.floor
    }

    /// Whether there is a floor.
    #[inline(always)]
    pub fn is_on(&self) -> bool {
        self.floor > f32::NEG_INFINITY
    }

    /// Raises the floor to the edge of this logit's bin, if the edge is higher.
    pub fn raise(&mut self, logit: f32) {
        let floor = edge_of(logit);
        if floor > self.floor {
            self.sum *= (f64::from(self.floor) - f64::from(floor)).exp();
            self.floor = floor;
        }
    }

    /// Adds the mass of logits below the floor, in units of `e^floor`.
    #[inline(always)]
    pub fn add(&mut self, sum: f64) {
        self.sum += sum;
    }

    /// Adds the mass of other tokens.
    pub fn merge(&mut self, other: &TailMass) {
        if other.is_on() {
            self.raise(other.floor);
            self.sum += other.sum * (f64::from(other.floor) - f64::from(self.floor)).exp();
        }
    }

    /// The mass, in units of `e^logit`.
    pub fn mass(&self, logit: f32) -> f64 {
        if self.is_on() { self.sum * (f64::from(self.floor) - f64::from(logit)).exp() } else { 0.0 }
    }

    /// Bounds of the whole mass relative to `top`, the highest edge; `binned` is the mass in bins.
    pub(super) fn whole(&self, top: f32, binned: f64) -> (f64, f64) {
        let (mass, slack) = (self.mass(top), SLACK * (1.0 + binned));
        (binned + mass * (1.0 - ERROR) - slack, binned + mass * (1.0 + ERROR) + slack)
    }

    /// Whether the tokens at or above the floor certainly have the share `p` of the whole mass. A prefix of this share
    /// then has no token below the floor. `binned` has the complete bins, and masses below the floor that are not in
    /// this sum.
    pub fn is_below_prefix(&self, binned: &MassHistogram, p: f32) -> bool {
        if !self.is_on() {
            return true;
        }
        let none = (0.0, 0.0, f32::NEG_INFINITY);
        let (above, all, top) = binned.integer_bins().fold(none, |(above, all, top), (edge, mass)| {
            // The first edge is the highest.
            let top = top.max(edge);
            let mass = weight_of(edge, top) * MassHistogram::ONE_UNIT * mass as f64;
            (above + if edge >= self.floor { mass } else { 0.0 }, all + mass, top)
        });
        above * (1.0 - SLACK) >= f64::from(p) * self.whole(top, all).1
    }

    /// Estimates a floor with at most `share` of the row's mass below it, after `tokens` of `of` tokens.
    ///
    /// The estimate extrapolates the masses so far. The few largest tokens count once, with a mass of at least
    /// `e^largest`. A floor that is too high costs a second pass.
    pub fn estimate_floor(&self, seen: &MassHistogram, tokens: u64, of: u64, largest: f32, share: f64) -> Option<f32> {
        let top = seen.descending_from()?;
        let times = of as f64 / tokens.max(1) as f64;
        let (mut count, mut few, mut at) = (0, 0.0, 0);
        let mut masses = [0; READ];
        let masses = &mut masses[..seen.count_from(self.floor).min(READ)];
        seen.write_descending(masses);
        for (part, weights) in masses.iter().zip(&WEIGHTS) {
            if count >= OUT {
                break;
            }
            few += weights * *part as f64;
            count += MassHistogram::max_count(*part);
            at += 1;
        }
        // Four independent sums, to hide the latency of an addition.
        let mut sums = [0.0; 4];
        for (part, weights) in masses[at..].chunks(4).zip(WEIGHTS[at..].chunks(4)) {
            for (sum, (&mass, weight)) in sums.iter_mut().zip(part.iter().zip(weights)) {
                *sum += weight * mass as f64;
            }
        }
        let rest: f64 = sums.iter().sum();
        // Relative to the highest edge.
        let unit = MassHistogram::ONE_UNIT;
        let least = (f64::from(largest) - f64::from(top)).exp() / unit;
        let below = self.mass(top) / unit;
        let limit = share * (few.max(least) + (rest + below) * times) / times - below;
        let mut under = few + rest;
        for (i, (&mass, weight)) in masses.iter().zip(&WEIGHTS).enumerate() {
            under -= weight * mass as f64;
            // At the few largest tokens, more unseen tokens are likely, so a floor saves nothing.
            if i + 1 >= at && under <= limit {
                let edge = edge_below(top, i);
                return (edge > self.floor).then_some(edge);
            }
        }
        None
    }
}
