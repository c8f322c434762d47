//! Runs of the order of descending logits.

use crate::summary::winner::LogitRank;

/// A run of the order of descending logits, both ends included.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct RankRange {
    /// The first token.
    pub first: LogitRank,
    /// The last token.
    pub last: LogitRank,
}

impl RankRange {
    /// Every token with a finite logit.
    pub const ALL: RankRange = RankRange {
        first: LogitRank { logit: f32::INFINITY, token: 0 },
        last: LogitRank { logit: f32::MIN, token: u32::MAX },
    };

    /// Whether a token is in the range.
    #[inline(always)]
    pub fn contains(&self, rank: LogitRank) -> bool {
        self.first.is_at_or_before(&rank) && rank.is_at_or_before(&self.last)
    }
}
