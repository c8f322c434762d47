//! How the rows of a call come into a launch.

use super::HostSampler;
use crate::error::CudaError;
use core::ops::Range;
use flash_sampling_core::{Adjustments, Capabilities, Head, Plan, RowParams, params};

impl HostSampler<'_> {
    /// Stages draws with filters: these of the open ones.
    pub(super) fn stage_filtered(&mut self, part: Range<usize>, rows: &[RowParams<'_>]) -> Result<(), CudaError> {
        self.staging.clear();
        self.filters.clear();
        for draws in self.open[part].chunk_by(|&a, &b| self.filtering[a].0 == self.filtering[b].0) {
            let (r, _, filters) = self.filtering[draws[0]];
            let row = adjusted(&rows[r], &mut self.adjustments, &self.head, (&self.can, &self.plan));
            self.filters.extend(draws.iter().map(|_| filters));
            self.staging.push_of(r, &rows[r], &row, draws.iter().map(|&i| self.filtering[i].1))?;
        }
        Ok(())
    }
}

/// A row that was checked, now with its adjustments of a head's tokens. One row at a time, so that these are still in the cache
/// when it is staged.
pub(super) fn adjusted<'r>(
    params: &RowParams<'r>,
    adjustments: &'r mut Adjustments,
    head: &Head<'_>,
    (can, plan): (&Capabilities, &Plan),
) -> params::Row<'r> {
    adjustments.collect_within([params], head.tokens());
    let row = params.check(adjustments.row(0), can, plan, head.vocab_size());
    row.expect("rows that are staged were checked")
}
