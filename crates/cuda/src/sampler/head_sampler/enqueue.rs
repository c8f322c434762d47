//! Calls that do not wait: hidden states, parameters and results are in device memory.

use super::HeadSampler;
use super::kernels::{HeadKernels, max_launch_draws};
use crate::abi::{RowColumns, TOP_K_MAX, TokenColumns};
use crate::device::shadow::LARGEST_TOP_K;
use crate::device::{DeviceMatrix, ListedTokens, Queue, RowColumnKernels, RowFeatures};
use crate::error::CudaError;
use crate::selection::{DeviceLogprobs, FilterKinds};

impl HeadSampler<'_> {
    /// Loads kernels and allocates memory for later calls of [`HeadSampler::enqueue_columns`].
    ///
    /// Later calls may have the arrays that `columns` and `out` have, or some of them, and up to `max_adjusted` adjusted
    /// tokens in a row.
    pub(crate) fn prepare_columns(
        &mut self,
        (columns, out): (&RowColumns, &TokenColumns),
        max_adjusted: usize,
    ) -> Result<(), CudaError> {
        let kernels = self.kernels.as_mut().ok_or(NO_ROWS)?;
        if columns.features() == RowFeatures::Any {
            kernels.fused.prepare(RowFeatures::Any)?;
        }
        if columns.filter_kinds().is_some() || out.needs_logits() {
            let ((selection, _), fused) = kernels.filters()?;
            selection.prepare(fused)?;
        }
        kernels.prepare_logprobs(out)?;
        self.reserve_columns(max_adjusted)
    }

    /// Loads the kernels that encode rows, and allocates their memory for up to `max_adjusted` adjusted tokens in a row.
    pub(super) fn reserve_columns(&mut self, max_adjusted: usize) -> Result<(), CudaError> {
        if self.columns.as_ref().is_none_or(|columns| columns.max_adjusted() < max_adjusted) {
            let max_rows = max_launch_draws(&self.description.plan);
            self.columns = Some(RowColumnKernels::new(max_rows, max_adjusted, &self.device)?);
        }
        Ok(())
    }

    /// Enqueues one draw for each row of `hidden`, in launches of at most 256 rows.
    pub(crate) fn enqueue_columns(
        &mut self,
        queue: Queue<'_>,
        hidden: &DeviceMatrix,
        (columns, out): (&RowColumns, &TokenColumns),
    ) -> Result<(), CudaError> {
        columns.check()?;
        out.check()?;
        CudaError::check_limits(&[("rows", hidden.rows, self.description.plan.max_rows)])?;
        if self.columns.is_none() {
            self.prepare_columns((columns, out), 0)?;
        }
        let vocab_size = self.description.shape.vocab_size;
        let none = || FilterKinds::new(false, false, columns.features());
        let kinds = columns.filter_kinds().or_else(|| out.needs_logits().then(none));
        let (Some(kernels), Some(encoder)) = (&mut self.kernels, &mut self.columns) else { return Err(NO_ROWS) };
        let tokens = kernels.tokens();
        if kinds.is_some() {
            kernels.filters()?;
        }
        kernels.prepare_logprobs(out)?;
        let HeadKernels { fused, filters, logprobs, .. } = kernels;
        let mut filters = kinds.zip(filters.as_mut().map(|(selection, _)| selection));
        let limit = filters.as_ref().map_or(usize::MAX, |(_, selection)| selection.max_rows());
        let invalid = encoder.invalid();
        // Log-probabilities and kept tokens need all logits.
        let has_lists = kinds.is_some_and(|kinds| kinds.has_lists()) && !out.needs_logits() && fused.can_list(hidden);
        let largest_by_shadow = if columns.top_k.is_null() { 0 } else { LARGEST_TOP_K };
        let by_shadow = has_lists && fused.lists_by_shadow(hidden, largest_by_shadow);
        let largest_top_k = has_lists.then_some(if by_shadow { largest_by_shadow } else { TOP_K_MAX });
        let listed = ListedTokens { tokens, vocab_size, has_contents: false, largest_top_k };
        encoder.enqueue(queue, (columns, out), (hidden.rows, limit), &listed, |rows, encoded| {
            let (first, states) = (rows.start, hidden.rows(rows));
            match &mut filters {
                Some((kinds, selection)) => {
                    let kinds = (*kinds, out.needs_logits());
                    let call = selection.enqueue_decided(queue, fused, &states, encoded, kinds, by_shadow)?;
                    match call.zip(logprobs.as_mut()).filter(|_| out.needs_logits()) {
                        Some((call, logprobs)) => logprobs.enqueue(queue, &call, invalid, (out, first)),
                        None => Ok(()),
                    }
                }
                None => fused.enqueue(queue, &states, (encoded.rows, encoded.draws), columns.features()),
            }
        })
    }
}

impl HeadKernels {
    /// Loads the kernels and allocates the memory for log-probabilities and kept tokens, if a call has them.
    fn prepare_logprobs(&mut self, out: &TokenColumns) -> Result<(), CudaError> {
        if out.needs_logits() && self.logprobs.is_none() {
            self.logprobs = Some(DeviceLogprobs::new(self.max_filtered(), self.tokens().len(), &self.device)?);
        }
        Ok(())
    }
}

const NO_ROWS: CudaError = CudaError::Layout { what: "weight", reason: "it has no rows" };
