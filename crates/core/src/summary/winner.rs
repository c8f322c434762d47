//! The maximum of perturbed scores ([`Winner`]), its merge, and lists of the best candidates.

/// The maximum of perturbed scores over a set of tokens (paper Lemma D.5).
///
/// [`merge`](Winner::merge) is associative, commutative and idempotent with identity [`Winner::NONE`]; the larger score
/// wins, then the smaller token. Scores are never NaN, and zero is always `+0`.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Winner {
    /// Transformed logit plus Gumbel noise, in nats; the transformed logit itself for a greedy row.
    pub score: f32,
    /// Global token id.
    pub token: u32,
}

impl Winner {
    /// The winner of the empty set.
    pub const NONE: Winner = Winner { score: f32::NEG_INFINITY, token: u32::MAX };

    /// A winner; `score` must not be NaN.
    #[inline(always)]
    pub fn new(score: f32, token: u32) -> Self {
        // -0 + 0 = +0: equal scores then have equal bits.
        Winner { score: score + 0.0, token }
    }

    /// Whether no token has won.
    pub fn is_none(&self) -> bool {
        self.token == u32::MAX
    }

    /// Whether `self` wins over `other`.
    #[inline(always)]
    pub fn beats(&self, other: &Winner) -> bool {
        self.score > other.score || (self.score == other.score && self.token < other.token)
    }

    /// The winner of the union of two sets.
    #[inline(always)]
    #[must_use]
    pub fn merge(self, other: Winner) -> Winner {
        if other.beats(&self) { other } else { self }
    }

    /// An integer with the order of winners, for atomics and integer max reductions: the score's bits in monotone form
    /// in the high half, the inverted token in the low half.
    pub fn to_ordered_bits(self) -> u64 {
        let bits = self.score.to_bits();
        let monotone = if bits >> 31 == 1 { !bits } else { bits | 1 << 31 };
        u64::from(monotone) << 32 | u64::from(!self.token)
    }

    /// The inverse of [`Winner::to_ordered_bits`].
    pub fn from_ordered_bits(bits: u64) -> Winner {
        let monotone = (bits >> 32) as u32;
        let score = if monotone >> 31 == 1 { monotone & !(1 << 31) } else { !monotone };
        Winner { score: f32::from_bits(score), token: !(bits as u32) }
    }
}

/// A token's rank in the order of descending logits: the larger logit first, then the lower token id. Filters keep runs
/// of this order, so of equal logits the lower token comes first.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct LogitRank {
    /// The logit that filters compare, in nats; never NaN.
    pub logit: f32,
    /// Global token id.
    pub token: u32,
}

impl LogitRank {
    /// Whether `self` comes before `other` or equals it.
    #[inline(always)]
    pub fn is_at_or_before(&self, other: &LogitRank) -> bool {
        self.logit > other.logit || (self.logit == other.logit && self.token <= other.token)
    }

    /// The number of the tokens `first ..` with these logits that come before this rank. Its own token never counts.
    #[inline(always)]
    pub fn count_before(&self, first: u32, logits: &[f32]) -> u32 {
        let is_before = |(token, &logit): (u32, &f32)| {
            (logit > self.logit) & (token != self.token) | (logit == self.logit) & (token < self.token)
        };
        (first..).zip(logits).map(|of| u32::from(is_before(of))).sum()
    }
}

/// A winner and its transformed logit.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Candidate {
    /// Score and token.
    pub winner: Winner,
    /// The transformed logit, in nats.
    pub logit: f32,
}

impl Candidate {
    /// The candidate of the empty set.
    pub const NONE: Candidate = Candidate { winner: Winner::NONE, logit: f32::NEG_INFINITY };

    /// The candidate's rank in the order of descending logits.
    #[inline(always)]
    pub fn logit_rank(&self) -> LogitRank {
        LogitRank { logit: self.logit, token: self.winner.token }
    }

    /// The candidate of the union of two sets.
    #[inline(always)]
    #[must_use]
    pub fn merge(self, other: Candidate) -> Candidate {
        if other.winner.beats(&self.winner) { other } else { self }
    }
}

/// The best candidates of a set, best first.
///
/// The list has the `limit` best candidates. With a `slack`, it also has every candidate with a score at most `slack`
/// below the last of these, for the canonical re-evaluation of near ties. Merging is associative, commutative and
/// idempotent like [`Winner::merge`], if no token has two scores.
#[derive(Clone, Debug, Default)]
pub struct TopList {
    limit: usize,
    slack: f32,
    /// Best first.
    items: Vec<Candidate>,
}

impl TopList {
    /// An empty list of the `limit` best.
    pub fn new(limit: usize, slack: f32) -> Self {
        TopList { limit, slack, items: Vec::with_capacity(limit + 1) }
    }

    /// Empties the list and sets its limit and slack; keeps the memory.
    pub fn reset(&mut self, limit: usize, slack: f32) {
        self.limit = limit;
        self.slack = slack;
        self.items.clear();
    }

    /// The lowest score that can enter the list; -inf while the list has room.
    #[inline]
    pub fn threshold(&self) -> f32 {
        match self.limit {
            0 => f32::INFINITY,
            n if self.items.len() < n => f32::NEG_INFINITY,
            n => self.items[n - 1].winner.score - self.slack,
        }
    }

    /// Offers a candidate.
    pub fn push(&mut self, candidate: Candidate) {
        if self.limit == 0 || candidate.winner.score < self.threshold() {
            return;
        }
        let at = self.items.partition_point(|c| c.winner.beats(&candidate.winner));
        if self.items.get(at).is_some_and(|c| c.winner == candidate.winner) {
            return;
        }
        self.items.insert(at, candidate);
        let cut = self.threshold();
        let keep = if self.slack > 0.0 { self.items.partition_point(|c| c.winner.score >= cut) } else { self.limit };
        self.items.truncate(keep.max(self.limit));
    }

    /// Adds the candidates of another list.
    pub fn merge(&mut self, other: &TopList) {
        for &candidate in &other.items {
            self.push(candidate);
        }
    }

    /// The candidates, best first. Only a list with a slack has more than `limit`.
    pub fn as_slice(&self) -> &[Candidate] {
        &self.items
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    /// Few distinct scores, so that ties are common.
    fn winner() -> impl Strategy<Value = Winner> {
        prop_oneof![
            8 => (-3i8..4, 0u32..9).prop_map(|(s, t)| Winner::new(f32::from(s) * 0.5, t)),
            1 => Just(Winner::NONE),
        ]
    }

    proptest! {
        #[test]
        fn merge_is_a_semilattice(a in winner(), b in winner(), c in winner()) {
            prop_assert_eq!(a.merge(Winner::NONE), a);
            prop_assert_eq!(Winner::NONE.merge(a), a);
            prop_assert_eq!(a.merge(a), a);
            prop_assert_eq!(a.merge(b), b.merge(a));
            prop_assert_eq!(a.merge(b).merge(c), a.merge(b.merge(c)));
        }

        #[test]
        fn ordered_bits_keep_the_order(a in winner(), b in winner()) {
            prop_assert_eq!(Winner::from_ordered_bits(a.to_ordered_bits()), a);
            prop_assert_eq!(a.to_ordered_bits() > b.to_ordered_bits(), a.beats(&b));
        }

        #[test]
        fn ordered_bits_keep_the_order_of_any_score(a: f32, b: f32, t: u32, u: u32) {
            prop_assume!(!a.is_nan() && !b.is_nan());
            let (a, b) = (Winner::new(a, t), Winner::new(b, u));
            prop_assert_eq!(a.to_ordered_bits() > b.to_ordered_bits(), a.beats(&b));
        }

        #[test]
        fn a_top_list_is_the_head_of_the_sorted_list(
            scores in prop::collection::vec(-4i8..5, 0..40),
            limit in 0usize..6,
            split in 0usize..40,
            slack in prop_oneof![Just(0.0f32), Just(0.5f32)],
        ) {
            let all: Vec<Candidate> = scores.iter().enumerate().map(|(i, &s)| {
                let score = f32::from(s) * 0.25;
                Candidate { winner: Winner::new(score, i as u32), logit: score }
            }).collect();
            let (left, right) = all.split_at(split.min(all.len()));
            let list = |part: &[Candidate]| {
                let mut list = TopList::new(limit, slack);
                part.iter().rev().for_each(|&c| list.push(c));
                list
            };
            let mut merged = list(right);
            merged.merge(&list(left));
            let mut sorted = all.clone();
            sorted.sort_by(|a, b| if a.winner.beats(&b.winner) { std::cmp::Ordering::Less } else { std::cmp::Ordering::Greater });
            let keep = match sorted.get(limit.wrapping_sub(1)) {
                Some(last) if slack > 0.0 => sorted.iter().filter(|c| c.winner.score >= last.winner.score - slack).count(),
                _ => limit.min(sorted.len()),
            };
            prop_assert_eq!(merged.as_slice(), &sorted[..keep]);
        }
    }
}
