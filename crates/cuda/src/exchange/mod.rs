//! The exchange that merges the draws of shards on several GPUs, over NVLink (`peers`) or NCCL (`nccl`).
//!
//! `cuda_exchange` wraps either exchange for the samplers, `enqueue` for calls that do not wait; `sharded` has the filters
//! that ranks can decide.

pub(crate) mod cuda_exchange;
mod enqueue;
#[cfg(feature = "nccl")]
pub(crate) mod nccl;
pub(crate) mod peers;
pub(crate) mod sharded;
