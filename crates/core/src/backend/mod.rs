//! For implementers of samplers: the pass over a shard of the vocabulary, the summaries that merge, and the driver that
//! makes draws from them.
//!
//! **Exempt from semantic versioning**: any release may change any item here.
//!
//! A sampler may write its results itself: [`check_call`], [`check_rows`], then one
//! [`Samples::push_row`](crate::Samples::push_row) or [`Samples::push_error`](crate::Samples::push_error) per row. For
//! filters and log-probabilities, it is easier to implement [`Scan`], and to forward
//! [`PerturbedArgmax::sample`](crate::PerturbedArgmax::sample) to a [`Driver`]. The driver checks the rows of a call
//! once, requests summaries, decides rows with filters, requests further passes for rows that one pass does not decide,
//! and writes the results. A sharded sampler is a scan too: its pass merges the summaries of its shards.
//! `tests/examples/own_backend.rs` is a whole backend.
//!
//! | to | use |
//! | --- | --- |
//! | check a call and its rows | [`check_call`], [`check_scan`], [`check_rows`], [`Batch`], [`Row`] |
//! | make one pass over a shard | [`Scan`], [`Request`], [`RowSummary`], [`Progress`]; from calls of a sampler that has no scan, [`SampledRows`] |
//! | decode weights | [`widen`]; of blocks, [`Span`], [`IQ4_NL`], [`E2M1`], [`mxfp4_scale`] |
//! | find the tokens that can win from a shadow | [`ShadowBound`], [`hidden_digits`], [`digits`], [`code_stride`], [`shadow_row`], [`ShadowRows`] |
//! | transform the logits of a row | [`RowTransform`], [`Adjustments`], [`is_allowed`], [`Filters`] |
//! | refuse a bad logit | [`any_invalid`], [`first_invalid`], [`StagedError`] |
//! | keep and merge maxima | [`Winner`], [`Candidate`], [`TopList`], [`Frontier`] |
//! | sum and merge masses | [`MassHistogram`], [`LogMass`], [`Moments`], [`GroupSummary`] |
//! | decide which tokens the filters keep | [`selection`] |
//! | make draws from scans | [`Driver`] |
//! | agree with other machines on near ties | [`canonical`], [`ScoreBound`] |
//! | compute `exp` and `tanh` with the same bits everywhere | [`math`] |
//! | compare the calls of ranks, or weights | [`digest`] |

mod batch;
pub mod canonical;
pub mod digest;
mod driver;
mod error_bounds;
pub mod math;
mod plain_summary;
mod row_summary;
mod sampled_rows;
mod scan;
pub mod selection;

pub use crate::error::{Stage, StagedError};
pub use crate::matrix::blocks::{E2M1, IQ4_NL, SPAN, Span, mxfp4_scale};
pub use crate::matrix::widen;
pub use crate::params::Row;
pub use crate::params::adjustments::{Adjustment, Adjustments, IndexedAdjustments};
pub use crate::params::filters::{Filter, Filters};
pub use crate::params::history::Occurrence;
pub use crate::params::transform::{RowTransform, any_invalid, first_invalid, is_allowed};
pub use crate::sampler::{check_call, reuse_vec};
pub use crate::shadow::{ShadowBound, ShadowRows, code_stride, digits, hidden_digits, shadow_row};
pub use crate::summary::frontier::Frontier;
pub use crate::summary::group_summary::{GroupSummary, group_size};
pub use crate::summary::log_mass::LogMass;
pub use crate::summary::mass_histogram::MassHistogram;
pub use crate::summary::moments::Moments;
pub use crate::summary::winner::{Candidate, LogitRank, TopList, Winner};
pub use batch::{Batch, CheckedRow, check_rows};
pub use driver::{Driver, kept_list};
pub use error_bounds::{RowScoreBound, ScoreBound};
pub use row_summary::{Progress, RowSummary, by_logit_rank};
pub use sampled_rows::SampledRows;
pub use scan::{Request, Scan, check_scan};
