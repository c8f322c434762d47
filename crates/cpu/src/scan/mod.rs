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
//! | [`decide`] | rows with filters decided after a pass, on all threads |
//! | [`requests`] | the requests of a scan: its pass, and the summaries of its rows |
//! | [`raw_logprobs`], [`finish`] | raw log-probabilities, and the results of rows without filters |
//! | [`packed_input`], [`parallel_adjustments`], [`canonical`], [`prefetch`] | inputs, and helpers |

pub(crate) mod best_group;
pub(crate) mod canonical;
pub(crate) mod decide;
pub(crate) mod engine;
pub(crate) mod filter_state;
pub(crate) mod finish;
pub(crate) mod granules;
pub(crate) mod logit_cache;
pub(crate) mod mass_cutoff;
pub(crate) mod packed_input;
pub(crate) mod parallel_adjustments;
pub(crate) mod perturb;
pub(crate) mod prefetch;
pub(crate) mod raw_logprobs;
pub(crate) mod requests;
pub(crate) mod row_state;
pub(crate) mod tile;
pub(crate) mod top_k_buffer;
