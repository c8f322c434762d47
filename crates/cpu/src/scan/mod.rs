//! One pass over the tokens of a head or of existing logits, on all threads, and the results of its rows.
//!
//! | module | what it holds |
//! | --- | --- |
//! | [`engine`] | threads, their scratch, and the passes of a call |
//! | [`tile`] | a thread's work on a tile of logits |
//! | [`row_state`], [`filter_state`] | what a thread keeps of a row, and of its filters |
//! | [`best_group`] | what a thread keeps of a row's groups |
//! | [`perturb`], [`granules`] | the draw within a tile: noise words, and bounds that spare logarithms |
//! | [`mass_cutoff`], [`logit_cache`], [`top_k_buffer`] | what lets a pass skip tokens of rows with filters |
//! | [`followup_passes`] | further passes of rows that the first one does not decide |
//! | [`raw_logprobs`], [`finish`], [`shard`] | the results: raw log-probabilities, samples, row summaries |
//! | [`packed_input`], [`parallel_adjustments`], [`canonical`], [`prefetch`] | inputs, and helpers |

pub(crate) mod best_group;
pub(crate) mod canonical;
pub(crate) mod engine;
pub(crate) mod filter_state;
pub(crate) mod finish;
pub(crate) mod followup_passes;
pub(crate) mod granules;
pub(crate) mod logit_cache;
pub(crate) mod mass_cutoff;
pub(crate) mod packed_input;
pub(crate) mod parallel_adjustments;
pub(crate) mod perturb;
pub(crate) mod prefetch;
pub(crate) mod raw_logprobs;
pub(crate) mod row_state;
pub(crate) mod shard;
pub(crate) mod tile;
pub(crate) mod top_k_buffer;
