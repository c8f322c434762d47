//! Vocabulary shards: one draw over an LM head whose rows are spread over several samplers.
//!
//! Each shard draws from its own tokens and makes a small [`RowSummary`](flash_sampling_core::backend::RowSummary) per
//! row: its draws, and on request its mass and its largest logits. Ranks exchange only summaries (paper Alg. I.4 and
//! appendix L), never `[rows, vocab]` logits. Two merges turn them into one draw:
//!
//! | merge | the draw is | bytes of a call without further requests |
//! | --- | --- | --- |
//! | [`ShardMerge::Winners`] | the argmax of the whole perturbed row, for any shards (Lemma D.5) | 12 bytes per draw and 5 per row, of each shard |
//! | [`ShardMerge::LogMass`] | exact in distribution: a shard by its log-mass, then its local draw (Alg. I.4) | 12 bytes per draw and 13 per row, of each shard |
//!
//! The summary of a row with filters has first tokens, masses, moments and frontiers in place of draws: some kilobytes
//! per shard. Every rank decides the whole row from these. The summary of a row with raw log-probabilities also has the
//! masses of its raw logits. Both need [`ShardMerge::Winners`].
//!
//! Two samplers perform the merges. [`Sharded`] holds all shards in one process and needs no threads. [`ShardSampler`]
//! is one rank of a group that exchanges summaries over a [`Transport`]; [`Loopback`] is the transport between the
//! threads of a process. Both are samplers over the whole vocabulary: core's
//! [`Driver`](flash_sampling_core::backend::Driver) over the shards as one [`Scan`](flash_sampling_core::backend::Scan).
//!
//! | module | content |
//! | --- | --- |
//! | `shard_layout` | the handshake, and the check that shards form a vocabulary |
//! | `local_shard`, `merge` | a shard of this process, and the two merges of summaries |
//! | `sharded`, `shard_sampler` | the two samplers: all shards in one process, and one rank of a group |
//! | `codec` | the bytes of messages: calls, and summaries of rows |
//! | `options` | common options of ranks |
//! | `mismatch` | names a parameter that differs between ranks |
//! | `transport`, `loopback` | the exchange |
//!
//! Shards are numbered in the order of their tokens; a shard's number is its rank.
#![deny(unsafe_code)]

mod codec;
mod error;
mod local_shard;
mod loopback;
mod merge;
mod mismatch;
#[cfg(feature = "mpi")]
mod mpi;
mod options;
mod shard_layout;
mod shard_sampler;
mod sharded;
mod transport;

pub use codec::call::CallStatus;
pub use codec::wire::WireError;
pub use error::ShardError;
pub use loopback::Loopback;
pub use merge::ShardMerge;
#[cfg(feature = "mpi")]
pub use mpi::Mpi;
pub use options::{ShardOptions, Transforms};
pub use shard_sampler::ShardSampler;
pub use sharded::Sharded;
pub use transport::{TIME_LIMIT, Transport, TransportError};
