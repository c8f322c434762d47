//! One pass over a shard of the vocabulary.
//!
//! The tokens that a filter keeps depend on the whole row, so a shard alone cannot draw for such a row. A scan
//! summarizes the shard's tokens: the draws of a row without filters; first tokens, integer masses, moments and
//! frontiers of a row with filters. All of these merge in any order, to the bits of the summary of the whole row. So a
//! [`Driver`](crate::backend::Driver) over shards makes the same decisions as a sampler without shards.

use crate::backend::selection::PrefixMass;
use crate::backend::{Batch, RowSummary};
use crate::error::{SampleError, Stage};
use crate::sampler::{Plan, Shape, check_call};
use crate::summary::winner::LogitRank;

/// A request for one row of a pass.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Request<'a> {
    /// Nothing.
    Skip,
    /// The row's summary.
    ///
    /// Without filters: the draws, and masses and largest logits if the row requests log-probabilities. With filters:
    /// the parts that [`SummarySpec`](crate::backend::selection::SummarySpec) names. In both cases raw masses and the largest
    /// raw logits if the row requests raw log-probabilities.
    Overview,
    /// An [`Overview`](Request::Overview) over the whole vocabulary, which allows the scan to
    /// [decide](crate::backend::Progress) the row.
    Decide,
    /// The mass before these points, counted from zero; and in [`RowSummary::mass`] the masses of all logits below
    /// `below`.
    PrefixMass {
        /// The points; their masses are ignored.
        points: &'a [PrefixMass],
        /// In nats; -inf: no masses. Only a scan that sets [`RowSummary::tail`] gets another value.
        below: f32,
    },
    /// Every token with a logit of at least `floor`.
    List {
        /// In nats; -inf: every token.
        floor: f32,
    },
    /// The logits of these tokens at a stage, in order; tokens of other shards are skipped.
    Logits {
        /// Global token ids.
        tokens: &'a [u32],
        /// Before or after the row's transforms.
        stage: Stage,
    },
    /// How many tokens come before each of these ranks in the order of descending logits, by the logits of a stage.
    PrefixCount {
        /// The ranks.
        ranks: &'a [LogitRank],
        /// Before or after the row's transforms.
        stage: Stage,
    },
}

impl Request<'_> {
    /// Whether the request is for the row's summary.
    pub fn is_overview(&self) -> bool {
        matches!(self, Request::Overview | Request::Decide)
    }
}

/// One pass over the tokens of a shard; see [`PerturbedArgmax::scan`](crate::PerturbedArgmax::scan).
///
/// # Contract
/// The summaries of shards, [merged](RowSummary::merge) in any order, equal the summary of the whole vocabulary, for
/// any shards, threads or other rows. An error names the shard's token and stage; a merge keeps the
/// [first](crate::backend::StagedError::first) error. The masses that a filter drops may depend on the shards. They can
/// change the number of passes, but not the result. Logits and scores equal the results of
/// [`sample`](crate::PerturbedArgmax::sample).
pub trait Scan {
    /// Makes one pass over this scan's tokens.
    ///
    /// `requests` and `out` have one entry per row. The entries of skipped and of invalid rows do not change. A row
    /// without filters gets [`RowError::NoFiniteLogit`](crate::RowError) for a request that is only for filters.
    ///
    /// A pass without an overview belongs to the same call as the last pass with an overview: the batch is the same, so
    /// the scan may reuse stored logits.
    ///
    /// # Errors
    /// The errors of [`sample`](crate::PerturbedArgmax::sample); [`SampleError::RowCount`] also for too few requests or
    /// entries.
    fn scan(
        &mut self,
        batch: &Batch<'_, '_>,
        requests: &[Request<'_>],
        out: &mut [RowSummary],
    ) -> Result<(), SampleError>;
}

/// Makes the checks that every scan needs.
///
/// # Errors
/// See [`Scan::scan`].
pub fn check_scan(
    batch: &Batch<'_, '_>,
    requests: &[Request<'_>],
    out: &[RowSummary],
    shape: &Shape,
    plan: &Plan,
) -> Result<(), SampleError> {
    check_call(&batch.input, batch.params, shape, plan)?;
    let (rows, params) = (batch.params.len(), requests.len().min(out.len()).min(batch.rows.len()));
    if params == rows { Ok(()) } else { Err(SampleError::RowCount { rows, params }) }
}
