//! One pass over a shard of the vocabulary.
//!
//! Which tokens a filter keeps depends on the whole row, so a shard cannot draw for such a row alone. A scan summarizes the
//! shard's tokens instead: the draws of a row without filters; first tokens, integer masses, moments and frontiers of a row
//! with filters. All of these merge in any order. The merged summaries of shards equal the summary of the whole row, to the
//! last bit, so a [`Driver`](crate::backend::Driver) decides from them what a sampler without shards decides.

use crate::backend::selection::PrefixMass;
use crate::backend::{Batch, RowSummary};
use crate::error::SampleError;
use crate::sampler::{Plan, Shape, check_call};

/// What a scan computes of a row.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Request<'a> {
    /// Nothing.
    Skip,
    /// The row's summary. Without filters: its draws, and masses and largest logits where the row asks for log-probabilities.
    /// With filters: what [`SummarySpec`](crate::backend::selection::SummarySpec) lists. In both cases the raw masses and the largest raw logits,
    /// where the row asks for raw log-probabilities.
    Overview,
    /// As [`Overview`](Request::Overview), of a scan over the whole vocabulary: it may [decide](crate::backend::Progress) the
    /// row itself.
    Decide,
    /// The mass before these places, starting from zero; and in [`RowSummary::mass`] that of all logits below `below`.
    PrefixMass {
        /// The places.
        points: &'a [PrefixMass],
        /// In nats; -inf: no masses, as of every scan that leaves none [below](RowSummary::tail).
        below: f32,
    },
    /// Every token with a logit of at least `floor`.
    List {
        /// In nats; -inf: every token.
        floor: f32,
    },
    /// The raw logits of these tokens, in order; tokens of other shards are skipped.
    RawLogits(&'a [u32]),
}

impl Request<'_> {
    /// Whether it is for the row's summary.
    pub fn is_overview(&self) -> bool {
        matches!(self, Request::Overview | Request::Decide)
    }
}

/// Passes over the tokens of a shard; see [`PerturbedArgmax::scan`](crate::PerturbedArgmax::scan).
///
/// # Contract
/// The summaries of shards, [merged](RowSummary::merge) in any order, equal the summary of the whole vocabulary, whatever
/// the shards, threads or neighbours. Errors do not merge: each names the shard's own token and stage. Which masses a filter
/// has dropped may depend on the shards, so a row may take another number of passes to the same result. Logits and scores
/// equal those that [`sample`](crate::PerturbedArgmax::sample) draws from.
pub trait Scan {
    /// Makes one pass over this scan's tokens. `requests` and `out` have one entry for each row; entries of skipped rows and
    /// of invalid ones stay as they are. A row without filters gets [`RowError::NoFiniteLogit`](crate::RowError) for a
    /// request that is only for filters.
    ///
    /// # Errors
    /// Those of [`sample`](crate::PerturbedArgmax::sample); [`SampleError::RowCount`] also for too few requests or entries.
    fn scan(
        &mut self,
        batch: &Batch<'_, '_>,
        requests: &[Request<'_>],
        out: &mut [RowSummary],
    ) -> Result<(), SampleError>;
}

/// The checks of a scan that are the same for every implementer.
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
