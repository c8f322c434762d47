//! What ranks agree on before they draw.

use crate::merge::ShardMerge;
use flash_sampling_core::DType;

/// What crosses between the ranks of a group in a call.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum Exchange {
    /// The summaries of every row, gathered: 12 bytes a draw and 13 a row of each rank, and what rows ask for besides.
    /// Everything that a row has is that of a sampler without shards, to the last bit.
    #[default]
    Summaries,
    /// One order-preserving u64 a row (score, inverted token) in one max all-reduce, for [`ShardMerge::Winners`]: 8 bytes
    /// for each row of the plan and 24 for the call, whatever the number of ranks. Tokens and scores are those of
    /// [`Exchange::Summaries`], to the last bit; the logit of a draw does not travel and is given as score minus noise,
    /// which is within the rounding of that subtraction.
    /// Calls with a row that asks for more (several draws, log-probabilities, filters, a list without replacement) or that is bad
    /// (NaN, +inf) gather summaries after the reduction, which every rank learns from the reduction itself.
    Winners,
}

/// How ranks draw together. All ranks give the same, as the handshake checks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ShardOptions {
    /// How the draws of shards become one.
    pub merge: ShardMerge,
    /// What crosses in a call.
    pub exchange: Exchange,
    /// For debugging: one more exchange a call, in which every rank compares its results with those of all others.
    pub check_tokens: bool,
    /// The element type of the weight, compared in the handshake; `None` = not stated.
    pub weight: Option<DType>,
}

impl ShardOptions {
    /// Summaries for a merge; nothing else.
    pub fn new(merge: ShardMerge) -> Self {
        ShardOptions { merge, exchange: Exchange::Summaries, check_tokens: false, weight: None }
    }
}

impl From<ShardMerge> for ShardOptions {
    fn from(merge: ShardMerge) -> Self {
        ShardOptions::new(merge)
    }
}
