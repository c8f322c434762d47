//! Shards against the sampler without shards: one file for each promise.

mod common;
mod degenerate_rows;
mod differ;
mod exchange;
mod filters;
mod late;
mod shard_invariance;
