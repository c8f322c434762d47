//! Calls that do not wait: logits, parameters and results are in device memory.

use super::LogitSampler;
use crate::abi::{RowColumns, TokenColumns};
use crate::device::{DeviceMatrix, ListedTokens, Queue, RowColumnKernels, RowFeatures};
use crate::error::CudaError;
use crate::selection::FilterKinds;
use flash_sampling_core::DType;

impl LogitSampler {
    /// Loads kernels and allocates memory for later calls of [`LogitSampler::enqueue_columns`] with logits of any type.
    ///
    /// Later calls may have the arrays that `columns` and `out` have, or some of them, and up to `max_adjusted` adjusted
    /// tokens in a row.
    pub(crate) fn prepare_columns(
        &mut self,
        (columns, out): (&RowColumns, &TokenColumns),
        max_adjusted: usize,
    ) -> Result<(), CudaError> {
        for dtype in [DType::BF16, DType::F16, DType::F32] {
            self.kernels.sampler(dtype)?;
        }
        if columns.filter_kinds().is_some() || out.needs_logits() {
            self.kernels.filters()?.0.prepare()?;
        }
        self.kernels.prepare_logprobs(out)?;
        self.plan_columns(max_adjusted)
    }

    fn plan_columns(&mut self, max_adjusted: usize) -> Result<(), CudaError> {
        if self.columns.as_ref().is_none_or(|columns| columns.max_adjusted() < max_adjusted) {
            self.columns = Some(RowColumnKernels::new(self.kernels.max_filtered(), max_adjusted, &self.device)?);
        }
        Ok(())
    }

    /// Enqueues one draw for each row of `logits`, in launches of at most 256 rows, and the other results of `out`.
    pub(crate) fn enqueue_columns(
        &mut self,
        queue: Queue<'_>,
        logits: &DeviceMatrix,
        (columns, out): (&RowColumns, &TokenColumns),
    ) -> Result<(), CudaError> {
        columns.check()?;
        out.check()?;
        logits.check("logits")?;
        CudaError::check_limits(&[("rows", logits.rows, self.description.plan.max_rows)])?;
        self.plan_columns(0)?;
        self.kernels.prepare_logprobs(out)?;
        let vocab_size = self.kernels.vocab_size();
        let LogitSampler { kernels, columns: Some(encoder), .. } = self else { return Ok(()) };
        let none = || FilterKinds::new(false, false, RowFeatures::Any);
        let kinds = columns.filter_kinds().or_else(|| out.needs_logits().then(none));
        let listed = ListedTokens { tokens: 0..vocab_size, vocab_size, has_contents: false, largest_top_k: None };
        let invalid = encoder.invalid();
        encoder.enqueue(queue, (columns, out), (logits.rows, usize::MAX), &listed, |rows, encoded| {
            let (first, logits) = (rows.start, logits.rows(rows));
            kernels.enqueue(queue, (&logits, None), (encoded.rows, encoded.draws), logits.rows)?;
            let Some(kinds) = kinds else { return Ok(()) };
            let kinds = (kinds, true, out.needs_logits());
            let call = kernels.filters()?.0.enqueue(queue, (&logits, None), encoded, logits.rows, kinds)?;
            match call.zip(kernels.logprobs.as_mut()).filter(|_| out.needs_logits()) {
                Some((call, logprobs)) => logprobs.enqueue(queue, &call, invalid, (out, first)),
                None => Ok(()),
            }
        })
    }
}
