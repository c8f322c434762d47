//! The inputs of launches from a call over host memory.

use crate::abi::{Draw, RowFilters};
use crate::error::CudaError;
use crate::sampler::row_scan::{CallRows, DrawItem, FilterSource, LogitSource, idle};
use crate::sampler::staging::Staging;
use crate::sampler::uploaded_head::UploadedHead;
use crate::selection::queries::CanonicalInputs;
use crate::selection::stored_rows::StoredRows;
use cudarc::driver::CudaStream;
use flash_sampling_core::Head;
use flash_sampling_core::backend::canonical::norm;
use flash_sampling_core::backend::{Adjustments, RowScoreBound, ScoreBound};
use std::sync::Arc;

/// A head on the GPU, and what uploads hidden states and rows. Every draw has a hidden state of its own in a launch.
#[derive(Debug)]
pub(super) struct UploadedInputs<'s, 'w> {
    pub(super) head: &'s Head<'w>,
    pub(super) uploaded: &'s mut UploadedHead,
    pub(super) staging: &'s mut Staging,
    pub(super) adjustments: &'s mut Adjustments,
    pub(super) stream: &'s Arc<CudaStream>,
    pub(super) error_bounds: &'s Option<ScoreBound>,
    pub(super) hidden: &'s mut Vec<f32>,
    pub(super) filters: &'s mut Vec<RowFilters>,
}

/// Stages draws by ascending rows.
pub(super) fn stage(
    staging: &mut Staging,
    adjustments: &mut Adjustments,
    head: &Head<'_>,
    rows: &CallRows<'_, '_>,
    items: &[DrawItem],
) -> Result<(), CudaError> {
    staging.clear();
    for draws in items.chunk_by(|a, b| a.row == b.row) {
        let r = draws[0].row;
        let row = rows.adjusted(r, adjustments, head.tokens())?;
        staging.push_of(r, &rows.batch.params[r], &row, draws.iter().map(|item| item.draw))?;
    }
    Ok(())
}

impl LogitSource for UploadedInputs<'_, '_> {
    fn draw(&mut self, rows: &CallRows<'_, '_>, items: &[DrawItem], draws: &mut Vec<Draw>) -> Result<(), CudaError> {
        draws.clear();
        for part in items.chunks(self.uploaded.most()) {
            stage(self.staging, self.adjustments, self.head, rows, part)?;
            self.uploaded.draw(self.staging, &rows.batch.input, draws, self.stream, None)?;
        }
        Ok(())
    }

    fn most_filtered(&self) -> usize {
        self.uploaded.most_filtered()
    }

    fn has_lists(&self, rows: &CallRows<'_, '_>) -> bool {
        self.uploaded.lists(&rows.batch.input)
    }

    fn draw_filtered(
        &mut self,
        rows: &CallRows<'_, '_>,
        items: &[DrawItem],
        from: FilterSource,
        draws: &mut Vec<Draw>,
    ) -> Result<(), CudaError> {
        draws.clear();
        for part in items.chunks(self.most_filtered()) {
            self.filters.clear();
            self.filters.extend(part.iter().map(|item| item.filters));
            stage(self.staging, self.adjustments, self.head, rows, part)?;
            self.uploaded.draw_filtered(self.staging, (self.filters, from), &rows.batch.input, draws, self.stream)?;
        }
        Ok(())
    }

    fn most_stored(&self) -> usize {
        self.uploaded.most()
    }

    fn store(
        &mut self,
        rows: &CallRows<'_, '_>,
        which: &[usize],
        is_raw: bool,
        stored: &mut StoredRows,
        draws: &mut Vec<Draw>,
    ) -> Result<Option<CanonicalInputs>, CudaError> {
        self.staging.clear();
        for &r in which {
            match is_raw {
                true => self.staging.push_of(r, &idle(), &rows.raw()?, [0])?,
                false => {
                    let row = rows.adjusted(r, self.adjustments, self.head.tokens())?;
                    self.staging.push_of(r, &rows.batch.params[r], &row, [row.first_draw])?;
                }
            }
        }
        draws.clear();
        let is_canonical = self.error_bounds.is_some();
        let inputs = self.uploaded.store(self.staging, &rows.batch.input, is_canonical, stored, draws, self.stream)?;
        Ok(Some(inputs))
    }

    fn stores_draws(&self) -> bool {
        true
    }

    fn score_bound(&mut self, rows: &CallRows<'_, '_>, r: usize) -> Result<Option<RowScoreBound>, CudaError> {
        let Some(bounds) = self.error_bounds else { return Ok(None) };
        let input = &rows.batch.input;
        self.hidden.resize(input.cols(), 0.0);
        input.row_to_f32(r, self.hidden);
        let row = rows.adjusted(r, self.adjustments, self.head.tokens())?;
        Ok(Some(bounds.row(self.head, &row, norm(self.hidden))))
    }
}
