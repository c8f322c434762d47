//! Draws of shards on several GPUs, merged to draws of the whole vocabulary: over NVLink (`peers`), or by NCCL (`nccl`).
//!
//! `cuda_exchange` is either of the two for the samplers; `sharded` says which rows with filters the ranks decide.

pub(crate) mod cuda_exchange;
#[cfg(feature = "nccl")]
pub(crate) mod nccl;
pub(crate) mod peers;
pub(crate) mod sharded;
