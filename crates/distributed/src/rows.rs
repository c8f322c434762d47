//! The rows of a call, each checked once.
//!
//! Every step of a call looks at its rows; when each checked them anew, the checks were most of what a rank's host did for
//! 64 rows with min-p.

use crate::tiling::Whole;
use core::mem::take;
use flash_sampling_core::params::Row;
use flash_sampling_core::sampler::recycle;
use flash_sampling_core::{Matrix, RowError, RowParams};

/// A row, or why its parameters are invalid.
pub(crate) type Checked<'a> = Result<Row<'a>, RowError>;

/// What a call is about.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Batch<'c, 'a> {
    pub(crate) input: Matrix<'c>,
    pub(crate) params: &'c [RowParams<'a>],
    /// The same rows, checked.
    pub(crate) rows: &'c [Checked<'a>],
}

/// Keeps the memory of checked rows from call to call.
#[derive(Debug, Default)]
pub(crate) struct CheckedRows(Vec<Checked<'static>>);

impl CheckedRows {
    /// The rows of a call; [`CheckedRows::keep`] takes the list back.
    pub(crate) fn check<'a>(&mut self, whole: &Whole, params: &[RowParams<'a>]) -> Vec<Checked<'a>> {
        let mut rows = recycle(take(&mut self.0));
        rows.extend(params.iter().map(|params| whole.check(params)));
        rows
    }

    pub(crate) fn keep(&mut self, rows: Vec<Checked<'_>>) {
        self.0 = recycle(rows);
    }
}

/// A row that takes surveys.
pub(crate) fn surveyed<'r, 'a>(row: &'r Checked<'a>) -> Option<&'r Row<'a>> {
    row.as_ref().ok().filter(|row| row.filters.is_some() || row.raw_logprobs.is_some())
}
