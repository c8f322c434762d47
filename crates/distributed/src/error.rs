//! The errors of shards and ranks.

use crate::codec::wire::WireError;
use crate::transport::{TransportError, named};
use core::time::Duration;
use flash_sampling_core::{Plan, SampleError};

/// An error of shards or ranks. `shard` is the number of the shard, which is its rank.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ShardError {
    /// There is no shard at all.
    #[error("there are no shards")]
    NoShards,
    /// Tokens that no shard covers.
    #[error("no shard covers the tokens {from}..{to} before shard {shard}")]
    Gap {
        /// The shard behind the gap; the number of shards if the gap is at the end of the vocabulary.
        shard: usize,
        /// First token of the gap.
        from: u32,
        /// One past its last token.
        to: u32,
    },
    /// A shard begins before the end of the shards before it.
    #[error("shard {shard} begins at token {start}, but the shards before it end at {end}")]
    Overlap {
        /// The shard.
        shard: usize,
        /// Its first token.
        start: u32,
        /// One past the last token of the shards before it.
        end: u32,
    },
    /// A shard has tokens beyond its vocabulary.
    #[error("shard {shard} ends at token {end}, beyond the vocabulary of {vocab_size}")]
    Beyond {
        /// The shard.
        shard: usize,
        /// One past its last token.
        end: u32,
        /// Size of the vocabulary.
        vocab_size: u32,
    },
    /// A shard differs from another shard: in the handshake from the first shard that states the value, in a call from
    /// this rank's shard.
    #[error("shard {shard} has {what} {found}, but shard {other} has {expected}")]
    Mismatch {
        /// The shard.
        shard: usize,
        /// The shard of the comparison.
        other: usize,
        /// The name of the value.
        what: &'static str,
        /// The value of the other shard.
        expected: String,
        /// The value of the shard.
        found: String,
    },
    /// A shard takes logits; shards take hidden states.
    #[error("shard {shard} takes logits rather than hidden states")]
    Input {
        /// The shard.
        shard: usize,
    },
    /// [`ShardMerge::Winners`](crate::ShardMerge::Winners) compares scores, and this shard's sampler is not pathwise.
    #[error("the scores of shard {shard} are not those of a pathwise sampler: merge by log-mass")]
    NotPathwise {
        /// The shard.
        shard: usize,
    },
    /// A shard itself draws among inner shards by log-mass. Both draws would use the noise of shards, and not be
    /// independent.
    #[error("shard {shard} draws shards of its own by log-mass; merge its shards with the others instead")]
    Nested {
        /// The shard.
        shard: usize,
    },
    /// [`ShardMerge::LogMass`](crate::ShardMerge::LogMass) needs log Z of each shard, for which the plan has no room.
    #[error("the merge by log-mass needs log Z of each shard: plan shards with max_logprobs")]
    NoLogMass,
    /// A rank reports another rank or world than its own in the group.
    #[error("shard {shard} says that it is rank {found_rank} of {found_world}, but there are {world} ranks")]
    Rank {
        /// The shard.
        shard: usize,
        /// The number of ranks of the group.
        world: usize,
        /// The rank that the shard reports.
        found_rank: usize,
        /// The number of ranks that the shard reports.
        found_world: usize,
    },
    /// A plan exceeds the plan of the shards.
    #[error("a plan with {} is beyond the shards', with {}", unlike(requested, &within(requested, planned)), unlike(&within(requested, planned), requested))]
    BeyondShards {
        /// The requested plan.
        requested: Plan,
        /// The shards' plan.
        planned: Plan,
    },
    /// The exchange failed.
    #[error(transparent)]
    Transport(#[from] TransportError),
    /// The number of messages differs from the number of ranks.
    #[error("the transport gave {found} messages for {expected} ranks")]
    World {
        /// Ranks of the transport.
        expected: usize,
        /// Messages received.
        found: usize,
    },
    /// A message cannot be read.
    #[error("the message of shard {shard} cannot be read")]
    Message {
        /// The sender.
        shard: usize,
        /// The error of the bytes.
        #[source]
        source: WireError,
    },
    /// Ranks have different parameters for a row.
    #[error("shard {shard} was called with other parameters for row {row}: {what}")]
    Params {
        /// The shard.
        shard: usize,
        /// The first row that differs.
        row: usize,
        /// The first group of [`RowParams::GROUPS`](flash_sampling_core::RowParams::GROUPS) that differs.
        what: &'static str,
    },
    /// Ranks were late for a call on the GPUs: another rank had a timeout, and these ranks then made the call alone.
    ///
    /// A rank that failed the call alone, and then made the next call, is late too.
    #[error("{} too late: shard {shard} had waited {limit:?}", came(ranks))]
    Late {
        /// The shard that waited.
        shard: usize,
        /// The ranks that were missing, ascending; if unknown, the ranks that passed the call.
        ranks: Vec<usize>,
        /// Its time limit.
        limit: Duration,
    },
    /// A shard's whole call failed.
    #[error("shard {shard} failed: {reason}")]
    Failed {
        /// The shard.
        shard: usize,
        /// The shard's error as text.
        reason: String,
    },
    /// A shard's result for a row does not fit the request.
    #[error("shard {shard} gave no usable answer for row {row}: {reason}")]
    Answer {
        /// The shard.
        shard: usize,
        /// The row.
        row: usize,
        /// The reason.
        reason: String,
    },
}

/// The fields of a plan that differ from another plan.
pub(crate) fn unlike(plan: &Plan, other: &Plan) -> String {
    let fields = |plan: &Plan| {
        let Plan { max_rows, max_draws, max_logprobs, canonical } = *plan;
        let max_logprobs = max_logprobs.map_or("no max_logprobs".into(), |most| format!("max_logprobs {most}"));
        let canonical = if canonical { "canonical" } else { "not canonical" };
        [format!("max_rows {max_rows}"), format!("max_draws {max_draws}"), max_logprobs, canonical.into()]
    };
    let differing = fields(plan).into_iter().zip(fields(other)).filter(|(field, other)| field != other);
    differing.map(|(field, _)| field).collect::<Vec<_>>().join(", ")
}

/// The part of a plan that another plan covers.
fn within(plan: &Plan, other: &Plan) -> Plan {
    Plan {
        max_rows: plan.max_rows.min(other.max_rows),
        max_draws: plan.max_draws.min(other.max_draws),
        max_logprobs: plan.max_logprobs.min(other.max_logprobs),
        canonical: other.canonical,
    }
}

fn came(ranks: &[usize]) -> String {
    format!("{} came", named("shard", ranks))
}

impl From<ShardError> for SampleError {
    fn from(error: ShardError) -> Self {
        SampleError::Backend { backend: "distributed", source: Box::new(error) }
    }
}
