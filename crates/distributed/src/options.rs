//! What ranks agree on before they draw.

use crate::merge::ShardMerge;
use core::fmt;
use flash_sampling_core::{DType, Head};

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
    /// For debugging: one more exchange a call, in which every rank compares the hidden states that it was called with, the
    /// parameters of the rows and its results with those of all others.
    pub check_tokens: bool,
    /// The element type of the weight, compared in the handshake; `None` = not stated.
    pub weight: Option<DType>,
    /// What the head does, compared in the handshake between shards that have tokens; `None` = not stated.
    pub transforms: Option<Transforms>,
}

impl ShardOptions {
    /// A merge, without the check of tokens and with nothing stated of a head.
    pub fn new(merge: ShardMerge) -> Self {
        ShardOptions { merge, check_tokens: false, weight: None, transforms: None }
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
