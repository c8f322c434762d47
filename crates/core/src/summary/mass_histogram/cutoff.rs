//! The bins of a mass histogram above and below a cutoff.

use super::{BINS, FAST, MassHistogram, PER_NAT, STEP, edges, slot_of};

impl MassHistogram {
    /// The number of bins from the highest down to `edge`, if the highest edge is small ([`FAST`]).
    #[inline(always)]
    pub(crate) fn count_from(&self, edge: f32) -> usize {
        // Conversions saturate: all bins for -inf, none for an edge above the highest.
        (((self.top - edge) * PER_NAT + 1.0).max(0.0) as usize).min(BINS)
    }

    /// Empties a histogram that holds nothing below `edge`, the edge of a bin, and touches no bin below it.
    pub fn clear_from(&mut self, edge: f32) {
        let count = self.count_from(edge);
        if self.top.abs() >= FAST || count == BINS {
            return self.clear();
        }
        let slot = slot_of(self.top) + BINS;
        for below in 0..count {
            self.bins[(slot - below) % BINS] = 0;
        }
        self.top = f32::NEG_INFINITY;
    }

    /// Empties the bins below `edge`, the edge of a bin.
    pub fn clear_below(&mut self, edge: f32) {
        if edge > self.top {
            return self.clear();
        }
        for below in edges(self.top).filter(|&below| below < edge) {
            self.bins[slot_of(below)] = 0;
        }
    }

    /// Empties the bins below `edge`, the edge of a bin, and returns their mass in units of `e^edge`. The bins below
    /// `lowest` must be empty.
    pub fn drain_below(&mut self, edge: f32, lowest: f32) -> f64 {
        if self.is_empty() {
            return 0.0;
        }
        if self.top.abs() >= FAST || edge > self.top {
            let mut sum = 0.0;
            for at in edges(self.top).filter(|&at| at < edge) {
                let mass = core::mem::take(&mut self.bins[slot_of(at)]) as f64;
                sum += mass * MassHistogram::ONE_UNIT * (f64::from(at) - f64::from(edge)).exp();
            }
            if edge > self.top {
                self.top = f32::NEG_INFINITY;
            }
            return sum;
        }
        let (slot, kept, count) = (slot_of(self.top) + BINS, self.count_from(edge), self.count_from(lowest));
        let (mut weight, mut sum) = (MassHistogram::ONE_UNIT, 0.0);
        for below in kept..count {
            weight *= STEP;
            sum += weight * core::mem::take(&mut self.bins[(slot - below) % BINS]) as f64;
        }
        sum
    }

    /// Adds the masses of the logits below `floor`.
    pub fn extend_below(&mut self, logits: &[f32], floor: f32) {
        logits.iter().filter(|&&logit| logit < floor).for_each(|&logit| self.push(logit));
    }

    /// The memory of `count` bins (at most 512) from `edge` upwards, for prefetching. The highest edge must be small.
    #[inline(always)]
    pub fn upwards(&self, edge: f32, count: usize) -> [&[u64]; 2] {
        let from = slot_of(edge) % BINS;
        let end = from + count.min(BINS);
        [&self.bins[from..end.min(BINS)], &self.bins[..end.saturating_sub(BINS)]]
    }
}
