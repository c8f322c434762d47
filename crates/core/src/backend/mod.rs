//! What backends implement and share: one pass over a shard of the vocabulary, the row summaries that merge, and the
//! driver that makes draws from them.
//!
//! A backend implements [`Scan`]. A [`Driver`] over it is a sampler: it checks the rows of a call once, requests
//! summaries, decides rows with filters, requests further passes for rows that one pass does not decide, and writes the
//! results. Shards are one more scan, which merges the summaries of others.
//!
//! | module | what it holds |
//! | --- | --- |
//! | [`scan`], [`batch`] | one pass over a shard of the vocabulary, and its rows, each checked once |
//! | [`row_summary`], [`sampled_rows`] | the summary of a row; summaries from samplers without scans |
//! | [`selection`] | which tokens the filters of a row keep |
//! | [`driver`] | draws from scans |
//! | [`canonical`], [`error_bounds`] | one dot product for all machines, and when it decides |
//! | [`digest`] | what ranks compare of a call |
//!
//! Exempt from semantic versioning.

pub mod batch;
pub mod canonical;
pub mod digest;
pub mod driver;
pub mod error_bounds;
mod plain_summary;
pub mod row_summary;
pub mod sampled_rows;
pub mod scan;
pub mod selection;

pub use batch::{Batch, CheckedRow, check_rows};
pub use driver::Driver;
pub use row_summary::{Progress, RowSummary, by_logit_rank};
pub use sampled_rows::SampledRows;
pub use scan::{Request, Scan, check_scan};
