//! The first tokens of a row in the order of falling logits.
//!
//! The plain version keeps a sorted list and inserts. Here tokens are appended, and only when twice as many have come as
//! are wanted are the first ones picked: a token costs a store, and a comparison of the span that it stands in.

use core::cmp::Ordering;
use flash_sampling_core::{Candidate, Winner};

/// The first `limit` tokens; more while they are collected.
#[derive(Clone, Debug, Default)]
pub(crate) struct Largest {
    limit: usize,
    items: Vec<Candidate>,
    /// The last of the first `limit` when they were last picked.
    last: Option<Candidate>,
    /// Whether nothing came since they were sorted.
    sorted: bool,
}

/// The order of falling logits.
pub(crate) fn order(a: &Candidate, b: &Candidate) -> Ordering {
    if a.place().reaches(&b.place()) { Ordering::Less } else { Ordering::Greater }
}

impl Largest {
    /// Empties it; at least one token is kept.
    pub(crate) fn begin(&mut self, limit: usize) {
        (self.limit, self.last, self.sorted) = (limit.max(1), None, false);
        self.items.clear();
        self.items.reserve(2 * self.limit);
    }

    /// A logit below this is not among the first, in a token after `first`.
    pub(crate) fn threshold(&self, first: u32) -> f32 {
        match &self.last {
            // Of equal logits the lower token comes first.
            Some(last) if first > last.winner.token => last.logit.next_up(),
            Some(last) => last.logit,
            None => f32::MIN,
        }
    }

    /// Adds a token; true when the threshold has risen.
    pub(crate) fn push(&mut self, logit: f32, token: u32) -> bool {
        self.items.push(Candidate { winner: Winner::new(logit, token), logit });
        self.sorted = false;
        let full = self.items.len() >= 2 * self.limit;
        if full {
            self.pick();
        }
        full
    }

    fn pick(&mut self) {
        if self.items.len() >= self.limit {
            self.items.select_nth_unstable_by(self.limit - 1, order);
            self.items.truncate(self.limit);
            self.last = self.items.last().copied();
        }
    }

    /// Adds what another worker has found.
    pub(crate) fn merge(&mut self, other: &Largest) {
        other.items.iter().for_each(|c| _ = self.push(c.logit, c.winner.token));
    }

    /// Sorts what there is.
    pub(crate) fn finish(&mut self) {
        if !self.sorted {
            self.pick();
            self.items.sort_unstable_by(order);
            self.sorted = true;
        }
    }

    /// How many tokens were asked for.
    pub(crate) fn limit(&self) -> usize {
        self.limit
    }

    /// The tokens, sorted once it is finished.
    pub(crate) fn as_slice(&self) -> &[Candidate] {
        &self.items
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn the_first_tokens_are_those_of_the_sorted_row(
            logits in prop::collection::vec((-6i8..7).prop_map(f32::from), 1..300), limit in 1usize..40, step in 1usize..20,
        ) {
            let of = |chunks: &[usize]| {
                let mut list = Largest::default();
                list.begin(limit);
                for &k in chunks {
                    let first = (k * step) as u32;
                    for (token, &logit) in (first..).zip(&logits[k * step..logits.len().min((k + 1) * step)]) {
                        if logit >= list.threshold(first) {
                            list.push(logit, token);
                        }
                    }
                }
                list
            };
            let chunks: Vec<usize> = (0..logits.len().div_ceil(step)).collect();
            let (even, odd): (Vec<usize>, Vec<usize>) = chunks.iter().partition(|&k| k % 2 == 0);
            let (mut whole, mut merged) = (of(&chunks), of(&odd));
            merged.merge(&of(&even));
            whole.finish();
            merged.finish();
            let mut sorted: Vec<Candidate> = (0..)
                .zip(&logits)
                .map(|(token, &logit)| Candidate { winner: Winner::new(logit, token), logit })
                .collect();
            sorted.sort_by(order);
            sorted.truncate(limit);
            prop_assert_eq!(whole.as_slice(), &sorted[..]);
            prop_assert_eq!(merged.as_slice(), &sorted[..]);
        }
    }
}
