//! The winner above every threshold at once.

use crate::summary::winner::{Candidate, LogitRank};

/// The candidates that no other candidate beats in both [`LogitRank`] and score.
///
/// For **every** rank `p`, the winner among the tokens [at or before](LogitRank::is_at_or_before) `p` is on the
/// frontier. So a filter that keeps the first tokens in the order of descending logits may choose their number after
/// the pass. The frontier of a union is the frontier of the merged frontiers. A frontier is the record sequence of
/// Cohen's bottom-1 sketch; its expected size is at most `1 + ln(1 / p_max)`.
///
/// Merging is associative, commutative and idempotent; the identity is the empty frontier.
#[derive(Debug, Default, PartialEq)]
pub struct Frontier {
    /// In the order of descending logits and ascending scores: the largest logit first, the best score last.
    points: Vec<Candidate>,
}

impl Clone for Frontier {
    fn clone(&self) -> Self {
        Frontier { points: self.points.clone() }
    }

    /// Keeps the memory.
    fn clone_from(&mut self, source: &Self) {
        self.points.clone_from(&source.points);
    }
}

impl Frontier {
    /// Whether `a` makes `b` superfluous: every threshold that admits `b` admits `a`, and `a` wins.
    fn covers(a: &Candidate, b: &Candidate) -> bool {
        a.logit_rank().is_at_or_before(&b.logit_rank()) && (a.winner == b.winner || a.winner.beats(&b.winner))
    }

    /// Offers a candidate.
    pub fn push(&mut self, candidate: Candidate) {
        let rank = candidate.logit_rank();
        // Of the points before the candidate, the last has the best score.
        let at = self.points.partition_point(|p| p.logit_rank().is_at_or_before(&rank));
        if at > 0 && Frontier::covers(&self.points[at - 1], &candidate) {
            return;
        }
        let covered = self.points[at..].iter().take_while(|p| Frontier::covers(&candidate, p)).count();
        self.points.splice(at..at + covered, [candidate]);
    }

    /// Adds the points of another frontier.
    pub fn merge(&mut self, other: &Frontier) {
        for &point in &other.points {
            self.push(point);
        }
    }

    /// The winner among the tokens at or before a rank; [`Candidate::NONE`] if there is none.
    #[inline]
    pub fn winner_from(&self, rank: LogitRank) -> Candidate {
        let admitted = self.points.partition_point(|p| p.logit_rank().is_at_or_before(&rank));
        admitted.checked_sub(1).map_or(Candidate::NONE, |last| self.points[last])
    }

    /// The points, the largest logit first, for prefetching.
    #[inline(always)]
    pub fn as_slice(&self) -> &[Candidate] {
        &self.points
    }

    /// The points, best score first.
    pub fn iter(&self) -> impl Iterator<Item = &Candidate> {
        self.points.iter().rev()
    }

    /// Number of points.
    pub fn len(&self) -> usize {
        self.points.len()
    }

    /// Whether the frontier has no points.
    pub fn is_empty(&self) -> bool {
        self.points.is_empty()
    }

    /// Removes all points and keeps the memory.
    pub fn clear(&mut self) {
        self.points.clear();
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::summary::winner::Winner;
    use proptest::prelude::*;

    fn candidates() -> impl Strategy<Value = Vec<Candidate>> {
        prop::collection::vec((-4i8..5, -4i8..5), 0..24).prop_map(|v| {
            v.into_iter()
                .enumerate()
                .map(|(i, (l, s))| Candidate { winner: Winner::new(f32::from(s), i as u32), logit: f32::from(l) })
                .collect()
        })
    }

    fn frontier(c: &[Candidate]) -> Frontier {
        let mut f = Frontier::default();
        c.iter().for_each(|&c| f.push(c));
        f
    }

    proptest! {
        #[test]
        fn the_winner_of_every_rank_is_on_the_frontier(c in candidates()) {
            let f = frontier(&c);
            for t in -5i8..6 {
                for token in [0, 3, 11, u32::MAX] {
                    let rank = LogitRank { logit: f32::from(t), token };
                    let admitted = c.iter().filter(|c| c.logit_rank().is_at_or_before(&rank));
                    prop_assert_eq!(f.winner_from(rank), admitted.fold(Candidate::NONE, |w, c| w.merge(*c)));
                }
            }
        }

        #[test]
        fn merge_is_a_semilattice(c in candidates(), i in 0usize..24, j in 0usize..24) {
            let (i, j) = (i.min(j).min(c.len()), i.max(j).min(c.len()));
            let [a, b, d] = [&c[..i], &c[i..j], &c[j..]].map(frontier);
            let merged = |x: &Frontier, y: &Frontier| { let mut m = x.clone(); m.merge(y); m };
            prop_assert_eq!(merged(&a, &b), merged(&b, &a));
            prop_assert_eq!(merged(&a, &a), a.clone());
            prop_assert_eq!(merged(&a, &Frontier::default()), a.clone());
            prop_assert_eq!(merged(&merged(&a, &b), &d), merged(&a, &merged(&b, &d)));
            prop_assert_eq!(merged(&merged(&a, &b), &d), frontier(&c));
        }

        #[test]
        fn no_point_covers_another(c in candidates()) {
            let f = frontier(&c);
            for (i, a) in f.points.iter().enumerate() {
                for (j, b) in f.points.iter().enumerate() {
                    prop_assert!(i == j || !Frontier::covers(a, b));
                }
            }
        }
    }
}
