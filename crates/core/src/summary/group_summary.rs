//! The summary of a group of tokens, and the binary merge.

use crate::summary::log_mass::LogMass;

/// The log-mass of a group and an exact local sample from it (paper section D.1).
///
/// [`merge`](GroupSummary::merge) is exact *in distribution*, not pathwise: the merged token follows the softmax over
/// the union (Lemma D.3). The identity is [`GroupSummary::EMPTY`].
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct GroupSummary<T = u32> {
    /// The group's log-mass.
    pub mass: LogMass,
    /// A draw from the softmax over the group; `None` when the group has no mass.
    pub sample: Option<T>,
}

/// The default number of tokens per group for a vocabulary: 512, doubled until there are at most 300 groups.
///
/// The limit keeps the summaries small. On a GPU, a row takes 24 bytes per group and 24 bytes per multiprocessor. With
/// 132 multiprocessors, 100 rows stay below 1 MiB.
pub fn group_size(vocab: usize) -> u32 {
    let mut size = 512;
    while vocab.div_ceil(size) > 300 {
        size *= 2;
    }
    u32::try_from(size).unwrap_or(1 << 31)
}

impl<T> GroupSummary<T> {
    /// The summary of a group without mass.
    pub const EMPTY: GroupSummary<T> = GroupSummary { mass: LogMass::EMPTY, sample: None };

    /// Whether the binary merge of `self` = A with a group of mass `b` takes B's sample. `coin` is uniform in (0, 1).
    ///
    /// The result does not depend on B's sample, so a caller may draw only taken samples (paper Alg. I.3, line 12).
    pub fn takes(&self, b: &LogMass, coin: f64) -> bool {
        coin < self.mass.replace_probability(b)
    }

    /// The binary merge: keeps B's sample with probability `e^L_B / (e^L_A + e^L_B)`.
    #[must_use]
    pub fn merge(self, b: GroupSummary<T>, coin: f64) -> GroupSummary<T> {
        let sample = if self.takes(&b.mass, coin) { b.sample } else { self.sample };
        GroupSummary { mass: self.mass.merge(b.mass), sample }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The exact law of a merge, by enumeration: P(token) of the union, from the laws of both sides and the coin.
    fn merged_law(a: &[f32], b: &[f32]) -> Vec<f64> {
        let softmax = |l: &[f32]| -> Vec<f64> {
            let mass: f64 = l.iter().map(|&l| f64::from(l).exp()).sum();
            l.iter().map(|&l| f64::from(l).exp() / mass).collect()
        };
        let p = LogMass::of_slice(a).replace_probability(&LogMass::of_slice(b));
        let keep = softmax(a).into_iter().map(|q| q * (1.0 - p));
        let take = softmax(b).into_iter().map(|q| q * p);
        keep.chain(take).collect()
    }

    #[test]
    fn lemma_d3_by_enumeration() {
        let grid = [-20.0f32, -1.5, 0.0, 0.25, 9.0];
        for &x in &grid {
            for &y in &grid {
                for &z in &grid {
                    for (a, b) in [(vec![x], vec![y, z]), (vec![x, y], vec![z]), (vec![x, y], vec![z, x])] {
                        let all: Vec<f64> = a.iter().chain(&b).map(|&l| f64::from(l).exp()).collect();
                        let mass: f64 = all.iter().sum();
                        for (law, e) in merged_law(&a, &b).iter().zip(&all) {
                            assert!((law - e / mass).abs() < 1e-12, "{a:?} with {b:?}");
                        }
                    }
                }
            }
        }
    }

    #[test]
    fn the_coin_decides_at_the_replace_probability() {
        let a = GroupSummary { mass: LogMass::of(0.0), sample: Some(1) };
        let b = GroupSummary { mass: LogMass::of(3f32.ln()), sample: Some(2) };
        // P(take B) = 3/4.
        assert_eq!(a.merge(b, 0.7499).sample, Some(2));
        assert_eq!(a.merge(b, 0.7501).sample, Some(1));
    }

    #[test]
    fn the_empty_group_is_the_identity() {
        let a = GroupSummary { mass: LogMass::of(-700.0), sample: Some(1) };
        for coin in [f64::MIN_POSITIVE, 0.5, 1.0 - f64::EPSILON] {
            assert_eq!(a.merge(GroupSummary::EMPTY, coin), a);
            assert_eq!(GroupSummary::EMPTY.merge(a, coin), a);
        }
        assert!(GroupSummary::<u32>::EMPTY.merge(GroupSummary::EMPTY, 0.5).sample.is_none());
    }
}
