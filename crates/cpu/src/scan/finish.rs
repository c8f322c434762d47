//! The results of rows without filters at the end of a pass.

use crate::scan::row_state::{Best, RowState};
use flash_sampling_core::backend::{Candidate, MassHistogram, Row, RowSummary, StagedError};
use flash_sampling_core::{RowError, Samples};

/// A row without filters at the end of a pass.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Summary<'a> {
    pub(crate) invalid: Option<StagedError>,
    pub(crate) has_finite: bool,
    pub(crate) best: &'a Best,
    pub(crate) mass: Option<&'a MassHistogram>,
    pub(crate) top: &'a [Candidate],
}

impl<'a> From<&'a RowState> for Summary<'a> {
    fn from(state: &'a RowState) -> Self {
        let RowState { best, mass, top, invalid, has_finite, .. } = state;
        Summary { invalid: *invalid, has_finite: *has_finite, best, mass: mass.as_ref(), top: top.as_slice() }
    }
}

impl Summary<'_> {
    /// The row's error, if it has one.
    pub(crate) fn check(&self, row: &Row<'_>) -> Result<(), RowError> {
        if let Some(invalid) = self.invalid {
            return Err(invalid.error);
        }
        if !self.has_finite {
            return Err(RowError::NoFiniteLogit);
        }
        if let (true, [list, ..]) = (row.without_replacement, self.best.lists()) {
            let available = list.as_slice().len() as u32;
            if available < row.draws {
                return Err(RowError::SupportTooSmall { draws: row.draws, available });
            }
        }
        Ok(())
    }

    /// Writes draws, masses and largest logits to `out`, which [`RowSummary::begin`] prepared.
    pub(crate) fn write(&self, row: &Row<'_>, out: &mut RowSummary) {
        out.error = self.invalid;
        if self.has_finite && self.invalid.is_none() {
            out.draws.extend(self.best.draws(row));
            if let (Some(_), Some(mass)) = (row.logprobs, self.mass) {
                out.mass.clone_from(mass);
                out.list.extend_from_slice(self.top);
            }
        }
    }

    /// Appends the row's result to `out`.
    pub(crate) fn emit(&self, row: &Row<'_>, out: &mut Samples) -> Result<(), RowError> {
        self.check(row)?;
        out.push_row(self.best.draws(row), row.logprobs.and(self.mass), self.top);
        Ok(())
    }
}
