//! The first tokens of a row in the order of descending logits.
//!
//! The plain version inserts into a sorted list. This version appends tokens, and selects the first ones when it has
//! twice as many as needed. So a token costs one store, and one comparison of its span. Tokens are stored as integers,
//! so that selection has no branches. With 16 workers, branches took a fifth of the time of top-p.

use flash_sampling_core::backend::{Candidate, Winner};

/// The first `limit` tokens of a row, and more during the collection.
#[derive(Clone, Debug, Default)]
pub(crate) struct TopKBuffer {
    limit: usize,
    /// The number of first tokens that are complete before a merge, at most `limit`.
    own: usize,
    /// Keys of the tokens.
    keys: Vec<u64>,
    /// The last of the first `own` tokens at the last selection. All pushed tokens up to this one are in the buffer.
    last: Option<u64>,
    /// The sorted tokens, after [`TopKBuffer::finish`].
    sorted: Vec<Candidate>,
}

/// Returns an integer that increases in the order of descending logits.
fn key(logit: f32, token: u32) -> u64 {
    !Winner::new(logit, token).to_ordered_bits()
}

fn candidate(key: u64) -> Candidate {
    let winner = Winner::from_ordered_bits(!key);
    Candidate { winner, logit: winner.score }
}

impl TopKBuffer {
    /// Empties the buffer. Before a merge, it collects `own` tokens, at least one. The merged tokens may be fewer than
    /// `limit`, but have no gap.
    pub(crate) fn begin(&mut self, limit: usize, own: usize) {
        (self.limit, self.own, self.last) = (limit.max(1), own.clamp(1, limit.max(1)), None);
        self.sorted.clear();
        self.keys.clear();
        self.keys.reserve(2 * self.limit);
    }

    /// Returns the smallest logit with which a token from `first` on may be among the first tokens.
    pub(crate) fn threshold(&self, first: u32) -> f32 {
        match self.last.map(candidate) {
            // With equal logits, the lower token comes first.
            Some(last) if first > last.winner.token => last.logit.next_up(),
            Some(last) => last.logit,
            None => f32::MIN,
        }
    }

    /// Returns the logit of the last of the first tokens at the last selection.
    pub(crate) fn last_logit(&self) -> Option<f32> {
        self.last.map(|last| candidate(last).logit)
    }

    /// Whether the buffer collects only the first token.
    #[inline(always)]
    pub(crate) fn wants_one(&self) -> bool {
        self.own == 1
    }

    /// From now on, skips tokens with a logit below `cut`, because enough tokens are at or above it.
    #[inline(always)]
    pub(crate) fn bound(&mut self, cut: f32) {
        let last = key(cut, u32::MAX);
        if self.last.is_none_or(|own| last < own) {
            self.last = Some(last);
        }
    }

    /// Adds a token, and returns whether the threshold has risen.
    pub(crate) fn push(&mut self, logit: f32, token: u32) -> bool {
        self.add(key(logit, token))
    }

    fn add(&mut self, key: u64) -> bool {
        self.keys.push(key);
        let full = self.keys.len() >= 2 * self.own;
        if full {
            self.pick();
        }
        full
    }

    /// Selects the first tokens, so that the threshold is as high as possible.
    pub(crate) fn pick(&mut self) {
        if self.keys.len() >= self.own {
            self.last = Some(*self.keys.select_nth_unstable(self.own - 1).1);
            self.keys.truncate(self.own);
        }
    }

    /// Adds another worker's tokens.
    pub(crate) fn merge(&mut self, other: &TopKBuffer) {
        self.own = self.limit;
        if let Some(last) = other.last.filter(|&theirs| self.last.is_none_or(|ours| theirs < ours)) {
            self.last = Some(last);
            self.keys.retain(|&key| key <= last);
        }
        for &key in &other.keys {
            if self.last.is_none_or(|last| key <= last) {
                self.add(key);
            }
        }
    }

    /// Sorts the tokens. No token may be added afterwards.
    pub(crate) fn finish(&mut self) {
        if self.sorted.is_empty() {
            if let Some(last) = self.last {
                self.keys.retain(|&key| key <= last);
            }
            self.pick();
            self.keys.sort_unstable();
            self.sorted.extend(self.keys.iter().map(|&key| candidate(key)));
        }
    }

    /// Returns the number of tokens if other tokens were skipped, or else the requested number.
    pub(crate) fn limit(&self) -> usize {
        if self.last.is_some() { self.sorted.len() } else { self.limit }
    }

    /// The sorted tokens, after [`TopKBuffer::finish`].
    pub(crate) fn as_slice(&self) -> &[Candidate] {
        &self.sorted
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use flash_sampling_core::backend::by_logit_rank;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn the_first_tokens_are_those_of_the_sorted_row(
            logits in prop::collection::vec((-6i8..7).prop_map(f32::from), 1..300), limit in 1usize..40, own in 1usize..40,
            step in 1usize..60,
        ) {
            let of = |chunks: &[usize], own: usize| {
                let mut list = TopKBuffer::default();
                list.begin(limit, own);
                for &k in chunks {
                    let first = (k * step) as u32;
                    let tile = &logits[k * step..logits.len().min((k + 1) * step)];
                    for (token, &logit) in (first..).zip(tile) {
                        if logit >= list.threshold(first) {
                            list.push(logit, token);
                        }
                    }
                }
                list
            };
            let chunks: Vec<usize> = (0..logits.len().div_ceil(step)).collect();
            let (even, odd): (Vec<usize>, Vec<usize>) = chunks.iter().partition(|&k| k % 2 == 0);
            let (mut whole, mut merged) = (of(&chunks, limit), of(&odd, limit));
            let mut shorter = of(&odd, own);
            merged.merge(&of(&even, limit));
            shorter.merge(&of(&even, own));
            [&mut whole, &mut merged, &mut shorter].into_iter().for_each(TopKBuffer::finish);
            let mut sorted: Vec<Candidate> = (0..)
                .zip(&logits)
                .map(|(token, &logit)| Candidate { winner: Winner::new(logit, token), logit })
                .collect();
            sorted.sort_by(by_logit_rank);
            sorted.truncate(limit);
            prop_assert_eq!(whole.as_slice(), &sorted[..]);
            prop_assert_eq!(merged.as_slice(), &sorted[..]);
            let few = shorter.as_slice();
            prop_assert!(few == &sorted[..few.len()] && few.len() >= own.min(sorted.len()));
            prop_assert!(few.len() == logits.len().min(limit) || shorter.limit() == few.len());
        }
    }
}
