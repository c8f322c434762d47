//! Cumulative masses of a row: bin by bin from the top, each bin weighted relative to the highest edge.

use super::PrefixMass;
use crate::summary::mass_histogram::{MassHistogram, edge_below, edge_of, weight_of, weights};
use crate::summary::winner::{Candidate, LogitRank, Winner};

/// One bin of the histogram, relative to the highest bin.
#[derive(Clone, Copy, Debug)]
struct Bin {
    edge: f32,
    /// `e^(edge - top)` per unit of mass.
    weight: f64,
    mass: u64,
    /// The mass of this bin and of all bins before it.
    through: f64,
}

/// The cumulative masses of the tokens that are still kept. Reuses its memory between rows.
#[derive(Clone, Debug, Default)]
pub(super) struct CumulativeMass {
    bins: Vec<Bin>,
    /// The cumulative mass of each listed token, from the last call of [`CumulativeMass::sum`].
    through: Vec<f64>,
    /// The highest edge.
    pub(super) top: f32,
}

/// A bound in nats on the error of the logarithm of a logit's mass, which is at most 2.13 times 2^-28.
const NEAR: f64 = 1.0 / (1u64 << 20) as f64;

/// The smallest float of at least `t`.
pub(super) fn round_up(t: f64) -> f32 {
    let x = t as f32;
    if f64::from(x) < t { x.next_up() } else { x }
}

/// The weight of a unit of mass in a bin: 1 is a token at the highest edge.
fn weight(edge: f32, top: f32) -> f64 {
    weight_of(edge, top) * MassHistogram::ONE_UNIT
}

fn sum_of(bins: &[Bin]) -> f64 {
    bins.last().map_or(0.0, |last| last.through)
}

/// Sums the masses through each bin from the top down. This is the only order of summation.
fn sum_through(bins: &mut [Bin], mut sum: f64) {
    for bin in bins {
        sum += bin.weight * bin.mass as f64;
        bin.through = sum;
    }
}

impl CumulativeMass {
    /// Loads the masses of a whole row with the largest logit `largest`.
    pub(super) fn load(&mut self, mass: &MassHistogram, largest: f32) {
        self.top = edge_of(largest);
        let top = self.top;
        self.bins.clear();
        let (_, runs) = mass.run();
        if self.top != mass.top() || mass.descending_from().is_none() {
            let bin = |(edge, mass)| Bin { edge, weight: weight(edge, top), mass, through: 0.0 };
            self.bins.extend(mass.integer_bins().map(bin));
        } else {
            // The same bins by index: with iterators, this loop took a fifth of a rank's host time for rows with top-p.
            self.bins.reserve(runs[0].len() + runs[1].len());
            let mut weights = weights().iter().enumerate();
            for run in runs.into_iter().rev() {
                for (&mass, (below, weight)) in run.iter().rev().zip(&mut weights) {
                    if mass > 0 {
                        let edge = edge_below(top, below);
                        let weight = weight * MassHistogram::ONE_UNIT;
                        self.bins.push(Bin { edge, weight, mass, through: 0.0 });
                    }
                }
            }
        }
        sum_through(&mut self.bins, 0.0);
    }

    /// Removes the masses of tokens.
    pub(super) fn remove(&mut self, tokens: &[Candidate]) {
        for c in tokens {
            let (edge, mass) = self.mass_of(c.logit);
            if let Some(bin) = self.bins.iter_mut().find(|bin| bin.edge == edge) {
                bin.mass = bin.mass.saturating_sub(mass);
            }
        }
        if !tokens.is_empty() {
            sum_through(&mut self.bins, 0.0);
        }
    }

    /// The bin of a logit and its mass there; 0 below the histogram's window.
    fn mass_of(&self, logit: f32) -> (f32, u64) {
        let (edge, mass) = MassHistogram::mass_of(logit);
        (edge, if MassHistogram::in_window(self.top, edge) { mass } else { 0 })
    }

    /// The mass of all bins.
    pub(super) fn whole(&self) -> f64 {
        sum_of(&self.bins)
    }

    /// A lower and an upper bound of the mass of the tokens with a logit of at least `t`. `listed` has the known tokens
    /// among them.
    pub(super) fn above(&self, t: f32, listed: &[Candidate]) -> (f64, f64) {
        let edge = edge_of(t);
        let bins = &self.bins[..self.bins.partition_point(|c| c.edge > edge)];
        let listed = listed.iter().filter(|c| edge_of(c.logit) == edge);
        let listed = listed.map(|c| self.mass_of(c.logit).1).sum::<u64>() as f64;
        let partial = self.bins.get(bins.len()).filter(|c| c.edge == edge);
        let (weight, full) = partial.map_or((0.0, 0.0), |c| (c.weight, c.mass as f64));
        let whole = sum_of(bins);
        (whole + weight * listed, whole + weight * full)
    }

    /// A lower and an upper bound of the mass before a token that is not listed.
    ///
    /// Bins below `floor` are incomplete. `listed` has the known tokens before it, `known` the masses before some
    /// tokens.
    pub(super) fn before(&self, rank: LogitRank, floor: f32, listed: &[Candidate], known: &[PrefixMass]) -> (f64, f64) {
        let (edge, own) = self.mass_of(rank.logit);
        if edge < floor {
            return (sum_of(&self.bins[..self.bins.partition_point(|c| c.edge > edge)]), f64::INFINITY);
        }
        let bins = self.bins.partition_point(|c| c.edge > edge);
        let sum = sum_of(&self.bins[..bins]);
        let bin = self.bins.get(bins).filter(|c| c.edge == edge);
        let (weight, full) = bin.map_or((0.0, own), |c| (c.weight, c.mass));
        if let Some(known) = known.iter().find(|known| known.rank == rank) {
            let mass = sum + weight * known.mass as f64;
            return (mass, mass);
        }
        let listed = listed.iter().filter(|c| edge_of(c.logit) == edge).map(|c| self.mass_of(c.logit).1);
        (sum + weight * listed.sum::<u64>() as f64, sum + weight * (full.saturating_sub(own) as f64))
    }

    /// The mass of listed tokens, summed in the order of the bins. [`CumulativeMass::reached`] reads the partial sums.
    pub(super) fn sum(&mut self, listed: &[Candidate]) -> f64 {
        let mut through = core::mem::take(&mut self.through);
        through.clear();
        self.run(listed, |_, mass| {
            through.push(mass);
            false
        });
        self.through = through;
        self.through.last().copied().unwrap_or(0.0)
    }

    /// [`CumulativeMass::reach`] for the listed tokens of the last [`CumulativeMass::sum`].
    pub(super) fn reached(&self, limit: f64) -> Option<usize> {
        self.through.iter().position(|mass| *mass >= limit).map(|i| i + 1)
    }

    /// Calls `visit` with each token's index and cumulative mass, until `visit` returns true.
    fn run(&self, listed: &[Candidate], mut visit: impl FnMut(usize, f64) -> bool) {
        let (mut done, mut at, mut factor, mut mass) = (0.0, f32::INFINITY, 0.0, 0u64);
        for (i, c) in listed.iter().enumerate() {
            let (edge, own) = self.mass_of(c.logit);
            if edge != at {
                done += factor * mass as f64;
                (at, factor, mass) = (edge, weight(edge, self.top), 0);
            }
            mass += own;
            if visit(i, done + factor * mass as f64) {
                return;
            }
        }
    }

    /// The length of the shortest run of listed tokens whose mass reaches `limit`.
    pub(super) fn reach(&self, listed: &[Candidate], limit: f64) -> Option<usize> {
        let mut end = None;
        self.run(listed, |i, mass| {
            end = (mass >= limit).then_some(i + 1);
            end.is_some()
        });
        end
    }

    /// The smallest logit whose mass reaches `limit`, also below the histogram's window.
    pub(super) fn least_logit(&self, limit: f64) -> f32 {
        let reaches = |logit| {
            let (edge, mass) = MassHistogram::mass_of(logit);
            weight(edge, self.top) * mass as f64 >= limit
        };
        // Bisects the floats near the logarithm of the limit: masses rise with logits. The last float needs no test.
        let near = f64::from(self.top) + limit.ln();
        let bits = |t: f32| (Winner::new(t, 0).to_ordered_bits() >> 32) as u32;
        let logit = |bits: u32| Winner::from_ordered_bits(u64::from(bits) << 32).score;
        let (low, high) = (round_up(near - NEAR).max(f32::MIN), round_up(near + NEAR).next_up());
        let (mut low, mut high) = (bits(low), bits(high));
        while low < high {
            let middle = low.midpoint(high);
            if reaches(logit(middle)) {
                high = middle;
            } else {
                low = middle + 1;
            }
        }
        logit(high)
    }

    /// The edge of the bin in which the mass from the top reaches `limit`.
    pub(super) fn floor_of(&self, limit: f64) -> f32 {
        self.bins.iter().find(|c| c.through >= limit).map_or(f32::NEG_INFINITY, |c| c.edge)
    }

    /// The highest edge with certainly `k` tokens at or above it.
    pub(super) fn floor_of_count(&self, k: u32) -> f32 {
        let mut count = 0;
        let reached = self.bins.iter().find(|c| {
            count += MassHistogram::least_count(c.mass);
            count >= u64::from(k)
        });
        reached.map_or(f32::NEG_INFINITY, |c| c.edge)
    }

    /// An upper bound of the number of tokens with a logit of at least `floor`.
    pub(super) fn max_count(&self, floor: f32) -> u64 {
        let edge = edge_of(floor);
        if floor == f32::NEG_INFINITY || self.bins.last().is_none_or(|last| last.edge > edge) {
            return u64::MAX;
        }
        let bins = self.bins.iter().take_while(|c| c.edge >= edge);
        bins.map(|c| MassHistogram::max_count(c.mass)).sum()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(20_000))]
        #[test]
        fn the_least_logit_reaches_its_limit_and_the_float_below_it_does_not(
            top in prop_oneof![-100f32..100.0, 0f32..0.2, -3e5f32..3e5, -3e38f32..3e38],
            below in prop_oneof![0f64..60.0, 0f64..1e-3],
            above in 0u32..3,
        ) {
            let (mut mass, mut bins) = <(MassHistogram, CumulativeMass)>::default();
            mass.push(top);
            bins.load(&mass, top);
            let weighed = |logit| {
                let (edge, mass) = MassHistogram::mass_of(logit);
                weight(edge, bins.top) * mass as f64
            };
            // The mass of a logit, or the next floats above it.
            let logit = (f64::from(top) - below) as f32;
            let limit = (0..above).fold(weighed(logit), |limit, _| limit.next_up());
            let least = bins.least_logit(limit);
            prop_assert!(weighed(least) >= limit && weighed(least.next_down()) < limit, "{} for {}", least, limit);
            prop_assert_eq!(least <= logit, above == 0);
        }
    }
}
