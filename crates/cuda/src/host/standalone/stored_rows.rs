//! The rows that ask for more than a draw, whose logits are transformed first.
#![allow(unsafe_code)]

use super::CudaStandalone;
use super::copies::outcome;
use crate::abi::{self, Transform};
use crate::device::matrix::DeviceMatrix;
use crate::device::stored_rows::StoredRows;
use crate::error::CudaError;
use crate::host::raw;
use crate::host::stored_results::StoredRequest;
use cudarc::driver::DevicePtr;
use flash_sampling_core::{Adjustments, PerturbedArgmax, RowParams, Samples};

impl CudaStandalone {
    /// Transforms the rows that ask, some at a time, and asks them.
    pub(super) fn ask(
        &mut self,
        logits: &DeviceMatrix,
        rows: &[RowParams<'_>],
        adjustments: &Adjustments,
    ) -> Result<(), CudaError> {
        self.answers.clear();
        if self.asking.is_empty() {
            return Ok(());
        }
        let can = self.capabilities();
        let mut stored = self.stored()?;
        let all = core::mem::take(&mut self.asking);
        for part in all.chunks(stored.rows()) {
            self.staging.clear();
            self.asked.clear();
            for &r in part {
                let row = rows[r].check(adjustments.row(r), &can, &self.plan, self.vocab_size);
                let row = row.expect("rows that ask were checked");
                self.staging.push(&rows[r], &row, [row.first_draw])?;
                self.asked.push(StoredRequest::new(&rows[r], &row, None));
            }
            self.transform(logits, part, &stored)?;
            let outcomes = self.faults.iter().copied().map(outcome);
            self.answers.ask(&self.asked, outcomes, true, None, &mut stored, &self.stream)?;
        }
        (self.stored, self.asking) = (Some(stored), all);
        Ok(())
    }

    /// Gives the rows of `out` that ask for them their raw log-probabilities.
    pub(super) fn note_raw(
        &mut self,
        logits: &DeviceMatrix,
        rows: &[RowParams<'_>],
        out: &mut Samples,
    ) -> Result<(), CudaError> {
        let mut all = core::mem::take(&mut self.asking);
        all.clear();
        let asks = |&r: &usize| out.row(r).is_ok() && raw::bare(&rows[r]).is_some();
        all.extend((0..rows.len()).filter(asks));
        let can = self.capabilities();
        let mut stored = if all.is_empty() { None } else { Some(self.stored()?) };
        if let Some(stored) = &mut stored {
            for part in all.chunks(stored.rows()) {
                self.staging.clear();
                self.asked.clear();
                for bare in part.iter().filter_map(|&r| raw::bare(&rows[r])) {
                    let row = bare.check(&[], &can, &self.plan, self.vocab_size);
                    let row = row.expect("log-probabilities of these rows were checked");
                    self.staging.push(&bare, &row, [row.first_draw])?;
                    self.asked.push(StoredRequest::new(&bare, &row, None));
                }
                self.transform(logits, part, stored)?;
                raw::note(part.iter().copied(), &self.asked, &mut self.answers, stored, &self.stream, out)?;
            }
        }
        self.asking = all;
        self.stored = stored.or(self.stored.take());
        Ok(())
    }

    /// Takes the room for transformed logits.
    fn stored(&mut self) -> Result<StoredRows, CudaError> {
        match self.stored.take() {
            Some(stored) => Ok(stored),
            None => StoredRows::new(0..self.vocab_size, self.plan.max_rows, &self.device, &self.stream),
        }
    }

    /// Transforms the rows `part` of the logits by the rows that are staged, and waits; the first invalid logit of each is
    /// left in `faults`.
    fn transform(&mut self, logits: &DeviceMatrix, part: &[usize], stored: &StoredRows) -> Result<(), CudaError> {
        let (rows, sources) = self.copy_rows(part.iter().copied())?;
        let (to, stride) = stored.place(&self.stream);
        let failed = CudaError::driver("transform logits");
        self.faults.clear();
        self.faults.resize(part.len(), u64::MAX);
        self.stream.memcpy_htod(&self.faults, &mut self.invalid.slice_mut(..part.len())).map_err(&failed)?;
        let call = Transform {
            raw: logits.address,
            stored: to,
            invalid: self.invalid.device_ptr(&self.stream).0,
            rows,
            sources,
            raw_stride: logits.row_stride as u64,
            stored_stride: stride as u64,
            element: abi::element(logits.dtype),
            first_token: 0,
            tokens: self.vocab_size,
            padding: 0,
        };
        // SAFETY: logits, rows and sources were just copied on this stream, and `stored` has room for as many rows.
        unsafe { self.transform.launch(&self.stream, &call, part.len() as u32) }?;
        self.stream.memcpy_dtoh(&self.invalid.slice(..part.len()), &mut self.faults).map_err(&failed)?;
        self.stream.synchronize().map_err(failed)
    }
}
