//! Vocabulary shards: one draw over an LM head whose rows are spread over several samplers.
//!
//! Each shard draws from its own tokens and leaves a small [`RowSummary`](flash_sampling_core::backend::RowSummary) per row: its draws, and on request its mass
//! and its largest logits. The summaries are all that moves (paper Alg. I.4 and appendix L); the `[rows, vocab]` logits
//! are never gathered. Two merges turn them into one draw:
//!
//! | merge | the draw is | what crosses in a call that asks for no more |
//! | --- | --- | --- |
//! | [`ShardMerge::Winners`] | the argmax of the whole perturbed row, whatever the shards (Lemma D.5) | 12 bytes a draw and 5 a row, of each shard |
//! | [`ShardMerge::LogMass`] | exact in distribution: a shard by its log-mass, then its local draw (Alg. I.4) | 12 bytes a draw and 13 a row, of each shard |
//!
//! A row with filters crosses as a survey instead of draws: first tokens, masses, moments and frontiers, some kilobytes of
//! each shard, and every rank makes the cut of the whole row from these. One with raw log-probabilities crosses with the
//! masses of its raw logits. Both take [`ShardMerge::Winners`].
//!
//! Two samplers perform the merges. [`Sharded`] holds all shards in one process and needs no threads. [`ShardSampler`] is
//! one rank of a group that exchanges summaries over a [`Transport`]; [`Loopback`] is the transport between the threads
//! of a process. Both are samplers over the whole vocabulary like any other.
//!
//! | module | what it holds |
//! | --- | --- |
//! | `shard_layout` | what a shard says of itself, and the check that shards make up a vocabulary |
//! | `local_shard`, `merge` | a shard of this process, and the two merges of summaries |
//! | `sharded`, `shard_sampler` | the two samplers: all shards in one process, and one rank of many |
//! | `codec` | the bytes of messages: calls, summaries, further passes |
//! | `options`, `check` | what ranks agree on, and the debug check that they agree on results |
//! | `differ` | which parameter it is where ranks were called with different ones |
//! | `transport`, `loopback` | the exchange |
//!
//! Shards are numbered in the order of their tokens; a shard's number is its rank.
#![deny(unsafe_code)]

mod check;
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
