//! Histograms as words that ranks send.

use super::{BINS, FAST, MassHistogram, PER_NAT, edge_of, slot_of};

impl MassHistogram {
    /// The number of words that [`MassHistogram::to_words`] writes.
    pub const WORDS: usize = BINS + 1;

    /// Appends the histogram as words: the bits of the top edge, then the bins by slot.
    pub fn to_words(&self, words: &mut Vec<u64>) {
        words.push(u64::from(self.top.to_bits()));
        words.extend_from_slice(&*self.bins);
    }

    /// The inverse of [`MassHistogram::to_words`]; `None` if no histogram has these words.
    pub fn from_words(words: &[u64]) -> Option<Self> {
        let mut histogram = MassHistogram::default();
        histogram.assign_words(words).then_some(histogram)
    }

    /// [`MassHistogram::from_words`] in place. If no histogram has these words: returns false, empties the histogram.
    pub fn assign_words(&mut self, words: &[u64]) -> bool {
        let possible = match words.split_first() {
            Some((&top, bins)) if bins.len() == BINS && u32::try_from(top).is_ok() => {
                self.top = f32::from_bits(top as u32);
                self.bins.copy_from_slice(bins);
                if self.top == f32::NEG_INFINITY {
                    bins.iter().all(|&mass| mass == 0)
                } else {
                    // The highest bin is the bin of some logit.
                    self.top.is_finite() && self.top == edge_of(self.top) && bins[slot_of(self.top)] > 0
                }
            }
            _ => false,
        };
        if !possible {
            self.top = f32::NEG_INFINITY;
            self.bins.fill(0);
        }
        possible
    }

    /// The input of [`MassHistogram::add_run`]: the highest edge, and the masses from the lowest bin with mass to the
    /// highest bin, in two runs of memory. An empty histogram has -inf and empty runs.
    pub fn run(&self) -> (f32, [&[u64]; 2]) {
        if self.is_empty() {
            return (self.top, [&[], &[]]);
        }
        // The slots form a ring; in it, the lowest bin of the window follows the highest bin.
        let (below, upwards) = self.bins.split_at(slot_of(self.top) + 1);
        let first = |run: &[u64]| run.iter().position(|&mass| mass > 0);
        let runs = match (first(upwards), first(below)) {
            (Some(at), _) => [&upwards[at..], below],
            (None, at) => [&[], &below[at.unwrap_or(below.len())..]],
        };
        (self.top, runs)
    }

    /// Adds the masses of another histogram, given as its highest edge and its run of bins. Returns `false`, and adds
    /// nothing, if no histogram has this edge and run.
    pub fn add_run(&mut self, top: f32, run: &[[u8; 8]]) -> bool {
        let Some(&last) = run.last() else { return top == f32::NEG_INFINITY };
        let possible = top.is_finite() && top == edge_of(top) && run.len() <= BINS && u64::from_le_bytes(last) > 0;
        if !possible {
            return false;
        }
        // From the highest bin down, by slots. A run has at most one bin per slot.
        let descending = (0..BINS).map(|below| (slot_of(top) + BINS - below) % BINS).zip(run.iter().rev());
        if !self.admit(top) || self.top.abs() >= FAST || top.abs() >= FAST {
            let mut other = MassHistogram { top, ..MassHistogram::default() };
            descending.for_each(|(slot, mass)| other.bins[slot] = u64::from_le_bytes(*mass));
            self.merge(&other);
            return true;
        }
        // Every slot belongs to one edge. Bins below this window are skipped.
        let room = BINS - (((self.top - top) * PER_NAT) as usize).min(BINS);
        let run = &run[run.len() - run.len().min(room)..];
        // The highest bin's slot is `end - 1`.
        let end = slot_of(top) + 1;
        let (below, upwards) = self.bins.split_at_mut(end);
        let (wrapped, run) = run.split_at(run.len().saturating_sub(end));
        let add = |bins: &mut [u64], run: &[[u8; 8]]| {
            let at = bins.len() - run.len();
            bins[at..].iter_mut().zip(run).for_each(|(bin, mass)| *bin += u64::from_le_bytes(*mass));
        };
        add(below, run);
        add(upwards, wrapped);
        true
    }
}
