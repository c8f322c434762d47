//! Repetitions of a sequence's end, for the DRY penalty.

/// The tokens that would continue a repetition. A reused value keeps its memory.
///
/// A token continues a repetition of length `n` if the last `n` tokens of the sequence also occur right before an
/// earlier occurrence of the token. No repetition contains a *breaker*, and no breaker continues a repetition.
#[derive(Clone, Debug, Default)]
pub(crate) struct Repetitions {
    /// The Z-array of the reversed sequence. Entry `k` is the length of the longest suffix of the sequence that also
    /// ends right before the last `k` tokens.
    matches: Vec<usize>,
    found: Vec<(u32, usize)>,
}

impl Repetitions {
    /// Each token that continues a repetition of at least `least` tokens, ascending, with the longest such length.
    /// `breakers` are ascending. The time is linear in the sequence, plus the sort of the result.
    pub(crate) fn find(&mut self, tokens: &[u32], breakers: &[u32], least: usize) -> &[(u32, usize)] {
        let breaks = |token: &u32| breakers.binary_search(token).is_ok();
        let n = tokens.len();
        // No repetition is longer than the part after the last breaker.
        let longest = tokens.iter().rev().position(breaks).unwrap_or(n);
        self.found.clear();
        if longest < least.max(1) {
            return &self.found;
        }
        self.match_backwards(tokens);
        for (k, &matched) in self.matches.iter().enumerate().skip(1) {
            let (length, next) = (matched.min(longest), tokens[n - k]);
            if length >= least.max(1) && !breaks(&next) {
                self.found.push((next, length));
            }
        }
        self.found.sort_unstable_by_key(|&(token, length)| (token, core::cmp::Reverse(length)));
        self.found.dedup_by_key(|&mut (token, _)| token);
        &self.found
    }

    /// The Z-algorithm. `[left, right)` is the match with the largest end; matches inside it are known.
    fn match_backwards(&mut self, tokens: &[u32]) {
        let n = tokens.len();
        let back = |k: usize| tokens[n - 1 - k];
        self.matches.clear();
        self.matches.resize(n, 0);
        let (mut left, mut right) = (0, 0);
        for k in 1..n {
            let mut length = if k < right { self.matches[k - left].min(right - k) } else { 0 };
            while k + length < n && back(length) == back(k + length) {
                length += 1;
            }
            self.matches[k] = length;
            if k + length > right {
                (left, right) = (k, k + length);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use std::collections::BTreeMap;

    /// The definition, without optimisation.
    fn plainly(tokens: &[u32], breakers: &[u32], least: usize) -> Vec<(u32, usize)> {
        let mut found = BTreeMap::new();
        for at in 1..tokens.len() {
            let repeats = |n: &usize| {
                let end = &tokens[tokens.len() - n..];
                tokens[..at].ends_with(end) && !end.iter().any(|token| breakers.contains(token))
            };
            let length = (0..=at).rev().find(repeats).unwrap_or(0);
            if length >= least && !breakers.contains(&tokens[at]) {
                let longest = found.entry(tokens[at]).or_insert(0);
                *longest = length.max(*longest);
            }
        }
        found.into_iter().collect()
    }

    proptest! {
        #[test]
        fn the_repetitions_are_those_of_the_definition(
            tokens in prop::collection::vec(0u32..4, 0..60), least in 1usize..5,
            breakers in prop::collection::btree_set(2u32..6, 0..3),
        ) {
            let breakers: Vec<u32> = breakers.into_iter().collect();
            let want = plainly(&tokens, &breakers, least);
            let mut repetitions = Repetitions::default();
            prop_assert_eq!(repetitions.find(&tokens, &breakers, least), &want[..]);
        }
    }

    #[test]
    fn a_repetition_is_continued_by_what_followed_it() {
        let mut repetitions = Repetitions::default();
        // "a b c d, a b c": d continues three tokens.
        assert_eq!(repetitions.find(&[1, 2, 3, 4, 9, 1, 2, 3], &[], 2), [(4, 3)]);
        // A breaker ends the run; a run may overlap itself.
        assert_eq!(repetitions.find(&[1, 2, 3, 4, 9, 1, 2, 3], &[2], 2), []);
        assert_eq!(repetitions.find(&[1, 2, 3, 4, 9, 1, 2, 3], &[4], 2), []);
        assert_eq!(repetitions.find(&[7, 7, 7, 7], &[], 2), [(7, 3)]);
        assert_eq!(repetitions.find(&[], &[], 0), []);
    }
}
