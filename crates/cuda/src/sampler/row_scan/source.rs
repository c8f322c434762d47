//! The rows of a call, and the source of their logits.

use crate::abi::{Draw, RowFilters};
use crate::error::CudaError;
use crate::sampler::Staging;
use crate::selection::{CanonicalInputs, StoredRows};
use core::ops::Range;
use flash_sampling_core::backend::{Adjustments, Batch, CheckedRow, RowScoreBound};
use flash_sampling_core::{Description, RowParams, backend};

/// The rows of a call.
#[derive(Debug)]
pub(crate) struct CallRows<'c, 'a> {
    pub(crate) batch: &'c Batch<'c, 'a>,
    /// A row without transforms: its transformed logits are its raw logits.
    raw: CheckedRow<'static>,
}

/// The parameters of a row without transforms: its transformed logits are its raw logits.
pub(crate) fn idle() -> RowParams<'static> {
    RowParams { temperature: 0.0, ..RowParams::default() }
}

impl<'c, 'a> CallRows<'c, 'a> {
    pub(crate) fn new(batch: &'c Batch<'c, 'a>, of: &Description) -> Self {
        CallRows { batch, raw: idle().check(&[], &of.capabilities, &of.plan, of.shape.vocab_size) }
    }

    /// A row with its adjustments of `tokens`. Adjustments are collected one row at a time, so they are in the
    /// processor's cache when they are staged.
    pub(crate) fn adjusted<'r>(
        &self,
        r: usize,
        adjustments: &'r mut Adjustments,
        tokens: Range<u32>,
    ) -> Result<backend::Row<'r>, CudaError>
    where
        'a: 'r,
    {
        adjustments.collect_within([&self.batch.params[r]], tokens);
        let row = self.batch.rows[r].map_err(|_| UNCHECKED)?;
        Ok(row.with_adjustments(adjustments.row(0)))
    }

    /// Stages the first draw of each of some rows, or with `is_raw` a greedy draw without the row's transforms.
    pub(crate) fn stage_first(
        &self,
        which: &[usize],
        is_raw: bool,
        adjustments: &mut Adjustments,
        staging: &mut Staging,
    ) -> Result<(), CudaError> {
        staging.clear();
        which.iter().try_for_each(|&r| match is_raw {
            true => staging.push_of(r, &idle(), &self.raw()?, [0]),
            false => {
                let row = self.adjusted(r, adjustments, staging.tokens())?;
                staging.push_of(r, &self.batch.params[r], &row, [row.first_draw])
            }
        })
    }

    /// A row without transforms.
    pub(crate) fn raw(&self) -> Result<backend::Row<'static>, CudaError> {
        self.raw.map_err(|_| UNCHECKED)
    }
}

const UNCHECKED: CudaError = CudaError::Corrupt { what: "a row that is not valid" };

/// A draw of a row, for a kernel.
#[derive(Clone, Copy, Debug)]
pub(crate) struct DrawItem {
    pub(crate) row: usize,
    pub(crate) draw: u32,
    pub(crate) filters: RowFilters,
}

impl DrawItem {
    /// The draws of a row.
    pub(crate) fn of_row(r: usize, row: &backend::Row<'_>, filters: RowFilters) -> impl Iterator<Item = DrawItem> {
        (row.first_draw..row.first_draw + row.draws).map(move |draw| DrawItem { row: r, draw, filters })
    }
}

/// The logits that a launch filters.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum FilterSource {
    /// Lists of the largest logits.
    Lists,
    /// The stored logits.
    Logits,
}

/// The kernels that compute the logits of a call and draw from them.
pub(crate) trait LogitSource {
    /// Makes draws, without filters or with filters from lists or stored logits. The items have ascending rows, and each
    /// item has one result. With [`FilterSource::Lists`], all filters are [listed](RowFilters::is_listed) or off.
    ///
    /// Returns the number of draws that read the whole weight, although the source has a shadow of the weight.
    fn draw(
        &mut self,
        rows: &CallRows<'_, '_>,
        items: &[DrawItem],
        from: Option<FilterSource>,
        draws: &mut Vec<Draw>,
    ) -> Result<usize, CudaError>;

    /// The maximum number of draws in a launch with filters. If it is 0, filters use stored logits.
    fn max_filtered(&self) -> usize {
        0
    }

    /// Whether the source can filter by lists of the largest logits.
    fn has_lists(&self) -> bool {
        false
    }

    /// The maximum number of rows in a call of [`LogitSource::store`].
    fn max_stored(&self) -> usize;

    /// Stores and summarizes the logits of ascending rows, and waits. The logits, transformed or raw, go to the first
    /// rows of `stored`. Writes one draw per row, with the row's first invalid logit if there is one. Returns the
    /// inputs of the logits, for a canonical plan.
    fn store(
        &mut self,
        rows: &CallRows<'_, '_>,
        which: &[usize],
        is_raw: bool,
        stored: &mut StoredRows,
        draws: &mut Vec<Draw>,
    ) -> Result<Option<CanonicalInputs>, CudaError>;

    /// Whether [`LogitSource::store`] makes the first draw of each row.
    fn stores_draws(&self) -> bool {
        false
    }

    /// The error bound of a row's scores, in a canonical plan.
    fn score_bound(&mut self, _rows: &CallRows<'_, '_>, _r: usize) -> Result<Option<RowScoreBound>, CudaError> {
        Ok(None)
    }
}
