//! The options that all ranks must share.

use crate::merge::ShardMerge;
use core::fmt;
use flash_sampling_core::{DType, Head};

/// The transforms of a head after its dot products.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Transforms {
    /// Whether it has a bias.
    pub bias: bool,
    /// The soft-cap, in nats.
    pub soft_cap: Option<f32>,
    /// The factor of logits.
    pub scale: f32,
}

impl Transforms {
    /// The transforms of a head.
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

/// The options of a group of ranks. The handshake checks that all ranks have the same.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct ShardOptions {
    /// The merge of the shards' draws.
    pub merge: ShardMerge,
    /// The element type of the weight, compared in the handshake; `None` = not stated.
    pub weight: Option<DType>,
    /// The head's transforms, compared in the handshake between shards that have tokens; `None` = not stated.
    pub transforms: Option<Transforms>,
}

impl ShardOptions {
    /// The options of a merge, without a stated head.
    pub fn new(merge: ShardMerge) -> Self {
        ShardOptions { merge, weight: None, transforms: None }
    }

    /// States the type and transforms of a head, or of a shard of it, for the handshake.
    pub fn of_head(self, head: &Head<'_>) -> Self {
        ShardOptions { weight: Some(head.weight().dtype()), transforms: Some(Transforms::of(head)), ..self }
    }
}

impl From<ShardMerge> for ShardOptions {
    fn from(merge: ShardMerge) -> Self {
        ShardOptions::new(merge)
    }
}
