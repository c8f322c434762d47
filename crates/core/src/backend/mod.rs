//! What backends implement and share: one pass over a shard of the vocabulary, the row summaries that merge, and the driver
//! that makes draws from them.
//!
//! A backend implements [`Scan`]. A [`Driver`] over it is a sampler: it checks the rows of a call once, requests summaries,
//! decides rows with filters, requests further passes for rows that one pass does not decide, and writes the results. Shards
//! are one more scan, which merges the summaries of others.
//!
//! Exempt from semantic versioning.

pub mod batch;
pub mod driver;
pub mod sampled_rows;
pub mod scan;
pub mod summary;

pub use batch::{Batch, CheckedRow, check_rows};
pub use driver::Driver;
pub use sampled_rows::SampledRows;
pub use scan::{Request, Scan, check_scan};
pub use summary::{Progress, RowSummary, by_logit_rank};
