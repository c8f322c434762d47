//! The rows of a call, each checked once.

use crate::error::RowError;
use crate::matrix::Matrix;
use crate::params::{Row, RowParams};
use crate::sampler::Description;

/// A row whose parameters are checked, or the error that makes them invalid.
pub type CheckedRow<'a> = Result<Row<'a>, RowError>;

/// The input of a call and its rows.
#[derive(Clone, Copy, Debug)]
pub struct Batch<'c, 'a> {
    /// `[rows, hidden]`, or `[rows, vocab]` of existing logits.
    pub input: Matrix<'c>,
    /// The parameters of each row.
    pub params: &'c [RowParams<'a>],
    /// The rows, checked against the whole sampler, without their adjustments of single tokens: each scan collects the
    /// adjustments for its own tokens.
    pub rows: &'c [CheckedRow<'a>],
}

/// Checks rows against a sampler's capabilities, plan and vocabulary, and appends them to `rows`.
pub fn check_rows<'a>(params: &[RowParams<'a>], of: &Description, rows: &mut Vec<CheckedRow<'a>>) {
    rows.extend(params.iter().map(|params| params.check(&[], &of.capabilities, &of.plan, of.shape.vocab_size)));
}
