//! One pass over the tokens of a head or of existing logits, on all threads, and the summaries of its rows.
//!
//! | module | content |
//! | --- | --- |
//! | [`engine`] | threads, their scratch, and a pass |
//! | [`tile`] | a thread's work on a tile of logits |
//! | [`row_state`], [`filter_state`] | a thread's state of a row, and of its filters |
//! | [`row_groups`] | the state of a row's groups |
//! | [`perturb`], [`granules`] | the draw within a tile: noise words, and bounds that avoid logarithms |
//! | [`mass_cutoff`], [`logit_cache`], [`top_k_buffer`], [`shared_list`] | skip tokens of rows with filters |
//! | [`decide`] | decides rows with filters after a pass, on all threads |
//! | [`requests`] | serves the requests of a scan: its pass, and the summaries of its rows |
//! | [`raw_logprobs`], [`finish`] | raw log-probabilities, and the results of rows without filters |
//! | [`packed_input`], [`parallel_adjustments`], [`canonical`], [`prefetch`] | inputs, and helpers |

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
pub(crate) mod row_groups;
pub(crate) mod row_state;
pub(crate) mod shared_list;
pub(crate) mod tile;
pub(crate) mod top_k_buffer;
