//! What ranks agree on before they draw.

use crate::merge::ShardMerge;
use core::fmt;
use flash_sampling_core::{DType, Head};

/// What crosses between the ranks of a group in a call.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum Exchange {
    /// The summaries of every row, gathered: 12 bytes a draw and 5 a row of each rank, and what rows ask for besides.
    /// Everything that a row has is that of a sampler without shards, to the last bit.
    #[default]
    Summaries,
    /// A key a row, the winner as an order-preserving u64 (score, inverted token), in one max all-reduce, for
    /// [`ShardMerge::Winners`]: 8 bytes for each row of the plan and 24 for the call, whatever the number of ranks.
    /// Tokens and scores are those of [`Exchange::Summaries`], to the last bit; the logit of a draw does not travel and
    /// is given as score minus noise, which is within the rounding of that subtraction. Calls with a row that asks for
    /// more (several draws, log-probabilities, filters, a list without replacement) or that is bad (NaN, +inf) gather
    /// summaries after the reduction, which every rank learns from the reduction itself.
    Keys,
}

impl fmt::Display for Exchange {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Exchange::Summaries => "summaries",
            Exchange::Keys => "keys",
        })
    }
}

/// What a head does to its dot products.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Transforms {
    /// Whether it has a bias.
    pub bias: bool,
    /// The soft-cap, in nats.
    pub soft_cap: Option<f32>,
    /// What logits are multiplied by.
    pub scale: f32,
}

impl Transforms {
    /// Those of a head.
    pub fn of(head: &Head<'_>) -> Self {
        Transforms { bias: head.bias().is_some(), soft_cap: head.soft_cap(), scale: head.scale() }
    }
}

impl fmt::Display for Transforms {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(if self.bias { "a bias, " } else { "no bias, " })?;
        match self.soft_cap {
            Some(cap) => write!(f, "soft-cap {cap}, ")?,
            None => f.write_str("no soft-cap, ")?,
        }
        write!(f, "scale {}", self.scale)
    }
}

/// How ranks draw together. All ranks give the same, as the handshake checks.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct ShardOptions {
    /// How the draws of shards become one.
    pub merge: ShardMerge,
    /// What crosses in a call.
    pub exchange: Exchange,
    /// For debugging: one more exchange a call, in which every rank compares the hidden states that it was called with, the
    /// parameters of the rows and its results with those of all others.
    pub check_tokens: bool,
    /// The element type of the weight, compared in the handshake; `None` = not stated.
    pub weight: Option<DType>,
    /// What the head does, compared in the handshake between shards that have tokens; `None` = not stated.
    pub transforms: Option<Transforms>,
}

impl ShardOptions {
    /// Summaries for a merge; nothing else.
    pub fn new(merge: ShardMerge) -> Self {
        ShardOptions { merge, exchange: Exchange::Summaries, check_tokens: false, weight: None, transforms: None }
    }

    /// States what the handshake compares of a head, or of a shard of it.
    pub fn of_head(self, head: &Head<'_>) -> Self {
        ShardOptions { weight: Some(head.weight().dtype()), transforms: Some(Transforms::of(head)), ..self }
    }
}

impl From<ShardMerge> for ShardOptions {
    fn from(merge: ShardMerge) -> Self {
        ShardOptions::new(merge)
    }
}
