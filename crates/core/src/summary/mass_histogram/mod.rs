//! Log-sum-exp that does not depend on the order: integer masses on an absolute grid of logits.

use crate::summary::log_mass::LogMass;

mod cutoff;
mod grid;
#[cfg(test)]
mod tests;
mod weights;
mod words;

use grid::{BINS, P, PER_NAT, UNIT, WINDOW, edges, mass_in, slot_of};
pub(crate) use grid::{edge_below, edge_of};
pub(crate) use weights::{STEP, weight_below, weight_of, weights};

/// Logits of one vectorized step.
const CHUNK: usize = 64;
/// 2^18: logits below this absolute value have small integers as bin numbers, which the fast paths need.
const FAST: f32 = 262_144.0;

/// The masses `e^l` of a set of logits, as integers in bins of 1/8 nat on an absolute grid.
///
/// Adding and merging are integer sums, so the histogram of a set does not depend on the order, the tiles or the
/// shards: [`merge`](MassHistogram::merge) is associative and commutative with the empty histogram as identity.
/// Bins 64 nats or more below the highest bin are dropped. A token in a dropped bin has less than 2^-92 of the mass.
#[derive(Debug, PartialEq)]
pub struct MassHistogram {
    /// Lower edge of the highest bin, in nats; -inf when empty.
    top: f32,
    /// The bin with lower edge `e` has index `8 e mod BINS`; bins outside `(top - WINDOW, top]` are zero.
    bins: Box<[u64; BINS]>,
}

impl Default for MassHistogram {
    fn default() -> Self {
        MassHistogram { top: f32::NEG_INFINITY, bins: Box::new([0; BINS]) }
    }
}

impl Clone for MassHistogram {
    fn clone(&self) -> Self {
        MassHistogram { top: self.top, bins: self.bins.clone() }
    }

    /// Keeps the memory.
    fn clone_from(&mut self, source: &Self) {
        self.top = source.top;
        self.bins.copy_from_slice(&*source.bins);
    }
}

/// The smallest and the largest logit of a chunk without NaN. Sixteen lanes avoid one long chain of dependent maxima.
#[inline(always)]
fn range(chunk: &[f32; CHUNK]) -> (f32, f32) {
    let (mut low, mut high) = ([f32::INFINITY; 16], [f32::NEG_INFINITY; 16]);
    for block in chunk.as_chunks::<16>().0 {
        for i in 0..16 {
            low[i] = if block[i] < low[i] { block[i] } else { low[i] };
            high[i] = if block[i] > high[i] { block[i] } else { high[i] };
        }
    }
    for half in [8, 4, 2, 1] {
        for i in 0..half {
            low[i] = if low[i + half] < low[i] { low[i + half] } else { low[i] };
            high[i] = if high[i + half] > high[i] { high[i + half] } else { high[i] };
        }
    }
    (low[0], high[0])
}

impl MassHistogram {
    /// Empties the histogram.
    pub fn clear(&mut self) {
        if self.top > f32::NEG_INFINITY {
            self.top = f32::NEG_INFINITY;
            self.bins.fill(0);
        }
    }

    /// Adds the mass of one logit; `-inf` adds nothing. `logit` must not be NaN or +inf.
    #[inline]
    pub fn push(&mut self, logit: f32) {
        if logit == f32::NEG_INFINITY {
            return;
        }
        let edge = edge_of(logit);
        if self.admit(edge) {
            self.bins[slot_of(edge)] += u64::from(mass_in(edge, logit));
        }
    }

    /// Adds the masses of a slice.
    #[inline(always)]
    pub fn extend_from_slice(&mut self, logits: &[f32]) {
        let (chunks, rest) = logits.as_chunks::<CHUNK>();
        for chunk in chunks {
            let (smallest, largest) = range(chunk);
            if largest < FAST && smallest > -FAST {
                self.push_chunk(chunk, largest);
            } else {
                chunk.iter().for_each(|&logit| self.push(logit));
            }
        }
        rest.iter().for_each(|&logit| self.push(logit));
    }

    /// Adds the masses of logits with absolute values below [`FAST`]: first slots and masses in vectors, then the sums.
    #[inline(always)]
    fn push_chunk(&mut self, chunk: &[f32; CHUNK], largest: f32) {
        let edge = edge_of(largest);
        if edge > self.top {
            self.raise(edge);
        }
        let (mut slots, mut masses) = ([0u32; CHUNK], [0u32; CHUNK]);
        for i in 0..CHUNK {
            // The operations of `edge_of`, `slot_of` and `mass_in`. The sum with 1.5 * 2^23 has the integer's low bits.
            let eighths = (chunk[i] * PER_NAT).floor();
            let edge = eighths / PER_NAT + 0.0;
            slots[i] = (eighths + 12_582_912.0).to_bits();
            let mass = mass_in(edge, chunk[i]);
            masses[i] = if self.top - edge < WINDOW { mass } else { 0 };
        }
        for (slot, mass) in slots.into_iter().zip(masses) {
            self.bins[slot as usize % BINS] += u64::from(mass);
        }
    }

    /// Makes room for logits up to `largest`, and returns the lowest logit of the window.
    ///
    /// Logits from the returned value up may be added as entries; lower logits add no mass. `None` if there are no
    /// logits, or if their absolute values are so large that only [`MassHistogram::push`] may add them.
    #[inline(always)]
    pub fn make_room(&mut self, largest: f32) -> Option<f32> {
        // Then every logit in the window below `largest` has an absolute value below `FAST`.
        if !(largest < FAST && largest > WINDOW - FAST) {
            return None;
        }
        let edge = edge_of(largest);
        if edge > self.top {
            self.raise(edge);
        }
        // The edges in the window are the multiples of 1/8 above `top - WINDOW`; the lowest edge begins its bin.
        Some(self.top - (WINDOW - 1.0 / PER_NAT))
    }

    /// The entry of a logit below 2^18 in absolute value: bin number in the highest 9 bits, mass in the lowest 32 bits.
    ///
    /// Vectorized code must give the same bits, with `fma` for `mul_add`. Let `n = floor(8 l)` and `r = l - n / 8`. The
    /// bin number is `n mod 512`. The mass is `2^30 + floor((r^2 p(r) + r) 2^30)`; the coefficients of `p` are
    /// [`MassHistogram::POLYNOMIAL`].
    #[inline(always)]
    pub fn entry_of(logit: f32) -> u64 {
        let edge = edge_of(logit);
        (slot_of(edge) as u64) << 55 | u64::from(mass_in(edge, logit))
    }

    /// The coefficients of `p`, lowest first, where `e^r = 1 + r + r^2 p(r)`.
    pub const POLYNOMIAL: [f32; 3] = P;

    /// Adds the [entries](MassHistogram::entry_of) of logits; call [`MassHistogram::make_room`] first. Entry 0 adds
    /// nothing.
    #[inline(always)]
    pub fn add_entries(&mut self, entries: &[u64]) {
        for &entry in entries {
            self.bins[(entry >> 55) as usize] += u64::from(entry as u32);
        }
    }

    /// The memory of the `count` highest bins (at most 512) in two runs, for prefetching.
    #[inline(always)]
    pub fn highest(&self, count: usize) -> [&[u64]; 2] {
        if self.is_empty() {
            return [&[], &[]];
        }
        let end = slot_of(self.top) % BINS + 1;
        let (low, high) = self.bins.split_at(end);
        let below = count.min(BINS).saturating_sub(end);
        [&low[end.saturating_sub(count)..], &high[high.len() - below..]]
    }

    /// Makes room for a bin. Returns false if the bin is below the window.
    #[inline(always)]
    fn admit(&mut self, edge: f32) -> bool {
        if edge > self.top {
            self.raise(edge);
        }
        self.top - edge < WINDOW
    }

    #[cold]
    fn raise(&mut self, edge: f32) {
        let risen = edge - self.top;
        if risen < WINDOW {
            // By slot, not by edge: floats far from zero do not reach every slot, but any slot may hold an old bin.
            let old = slot_of(self.top);
            for step in 1..=(risen * PER_NAT) as usize {
                self.bins[(old + step) % BINS] = 0;
            }
        } else {
            self.bins.fill(0);
        }
        self.top = edge;
    }

    /// Adds the masses of another histogram.
    pub fn merge(&mut self, other: &MassHistogram) {
        self.merge_from(other, f32::NEG_INFINITY);
    }

    /// Adds the masses of another histogram that holds nothing below `edge`, the edge of a bin.
    pub fn merge_from(&mut self, other: &MassHistogram, edge: f32) {
        if other.is_empty() {
            return;
        }
        self.admit(other.top);
        if self.top.abs() < FAST && other.top.abs() < FAST {
            // Every slot belongs to one edge. Bins of `other` below this window are skipped.
            let below = (((self.top - other.top) * PER_NAT) as usize).min(BINS).max(BINS - other.count_from(edge));
            let lowest = (slot_of(other.top) + 1 + below) % BINS;
            let count = BINS - below;
            let until_end = count.min(BINS - lowest);
            for (from, count) in [(lowest, until_end), (0, count - until_end)] {
                let theirs = &other.bins[from..from + count];
                self.bins[from..from + count].iter_mut().zip(theirs).for_each(|(a, b)| *a += b);
            }
            return;
        }
        for edge in edges(other.top) {
            let mass = other.bins[slot_of(edge)];
            if mass > 0 && self.admit(edge) {
                self.bins[slot_of(edge)] += mass;
            }
        }
    }

    /// Whether the histogram has no mass.
    pub fn is_empty(&self) -> bool {
        self.top == f32::NEG_INFINITY
    }

    /// The bins with mass, highest first: lower edge in nats, and mass in units of one token at the edge.
    pub fn bins(&self) -> impl Iterator<Item = (f64, f64)> + '_ {
        self.integer_bins().map(|(edge, mass)| (f64::from(edge), mass as f64 / f64::from(UNIT)))
    }

    /// One unit of mass, relative to its bin's edge.
    pub(crate) const ONE_UNIT: f64 = 1.0 / UNIT as f64;

    /// The bins with mass, highest first: lower edge in nats, and mass in units.
    pub(crate) fn integer_bins(&self) -> impl Iterator<Item = (f32, u64)> + '_ {
        let small = self.descending_from().map(|top| {
            let (_, [low, high]) = self.run();
            let masses = high.iter().rev().chain(low.iter().rev());
            masses.enumerate().map(move |(below, &mass)| (edge_below(top, below), mass))
        });
        let large = if small.is_none() { self.top } else { f32::NEG_INFINITY };
        let large = (large > f32::NEG_INFINITY).then(|| edges(large).map(|edge| (edge, self.bins[slot_of(edge)])));
        small.into_iter().flatten().chain(large.into_iter().flatten()).filter(|(_, mass)| *mass > 0)
    }

    /// The highest edge; -inf when empty.
    pub(crate) fn top(&self) -> f32 {
        self.top
    }

    /// The highest edge, if it is small enough for [`MassHistogram::write_descending`].
    pub(crate) fn descending_from(&self) -> Option<f32> {
        (self.top.abs() < FAST).then_some(self.top)
    }

    /// Writes the masses of bins from the top down, in units. The highest edge must be small.
    #[inline(always)]
    pub(crate) fn write_descending(&self, masses: &mut [u64]) {
        let slot = slot_of(self.top) + BINS;
        masses.iter_mut().enumerate().for_each(|(i, mass)| *mass = self.bins[(slot - i) % BINS]);
    }

    /// [`MassHistogram::add_entries`] with separate bin numbers (modulo 512) and masses.
    #[inline(always)]
    pub fn add_masses(&mut self, slots: &[u32], masses: &[u32]) {
        for (&slot, &mass) in slots.iter().zip(masses) {
            self.bins[slot as usize % BINS] += u64::from(mass);
        }
    }

    /// The lower edge of the bin of a logit, in nats; -inf for -inf.
    pub fn edge(logit: f32) -> f32 {
        edge_of(logit)
    }

    /// The bin of a finite logit, and its mass there in units.
    pub(crate) fn mass_of(logit: f32) -> (f32, u64) {
        let edge = edge_of(logit);
        (edge, u64::from(mass_in(edge, logit)))
    }

    /// The mass of a logit in the bin with this edge, in units. For a logit outside the bin, the result is arbitrary.
    #[inline(always)]
    pub(crate) fn mass_above(edge: f32, logit: f32) -> u64 {
        u64::from(mass_in(edge, logit))
    }

    /// Whether a bin is in the window of a histogram with the highest edge `top`.
    pub(crate) fn in_window(top: f32, edge: f32) -> bool {
        top - edge < WINDOW
    }

    /// A lower bound for the number of tokens of a mass in one bin.
    pub(crate) fn least_count(mass: u64) -> u64 {
        // A token has at most e^(1/8) < 1.1332 units of 2^30.
        (mass as f64 / (1.1332 * f64::from(UNIT))) as u64
    }

    /// An upper bound for the number of tokens of a mass in one bin.
    pub(crate) fn max_count(mass: u64) -> u64 {
        mass / UNIT as u64
    }

    /// The whole mass, summed in the fixed order of the bins.
    pub fn log_mass(&self) -> LogMass {
        let mass = |(units, weight): (u64, f64)| units as f64 * Self::ONE_UNIT * weight;
        let sum = if self.descending_from().is_some() {
            let (_, [low, high]) = self.run();
            high.iter()
                .rev()
                .chain(low.iter().rev())
                .zip(weights())
                .map(|(&units, &weight)| mass((units, weight)))
                .sum()
        } else {
            self.integer_bins().map(|(edge, units)| mass((units, weight_of(edge, self.top)))).sum()
        };
        LogMass { max: self.top, sum }
    }

    /// The weights `e^(-n/8)` of the bins, from the highest down. For implementers: [`MassHistogram::log_mass`] adds
    /// `mass * 2^-30 * weight` in this order; each operation is a float64 operation rounded to nearest.
    pub fn weights() -> &'static [f64] {
        weights()
    }

    /// `ln sum e^l` in nats; -inf when empty. The error is below 1e-8 plus 2^-53 of the absolute value.
    pub fn log_z(&self) -> f64 {
        self.log_mass().value()
    }
}
