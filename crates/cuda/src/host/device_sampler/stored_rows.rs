//! The rows that ask for more than a draw.
#![allow(unsafe_code)]

use crate::abi::Draw;
use crate::device::matrix::DeviceMatrix;
use crate::device::results;
use crate::device::stored_rows::StoredRows;
use crate::error::CudaError;
use crate::host::device_sampler::launch::{copy_down, rows_of};
use crate::host::device_sampler::{DeviceSampler, RowRoute};
use crate::host::raw;
use crate::host::results::candidate;
use crate::host::stored_results::StoredRequest;
use core::ops::Range;
use cudarc::driver::CudaStream;
use flash_sampling_core::{RowParams, Samples};
use std::sync::Arc;

impl DeviceSampler {
    /// Stores the logits of the rows that ask, some neighbours at a time, and asks them, on a stream of their own.
    ///
    /// # Safety
    /// As [`DeviceSampler::sample`]; the hidden states are there.
    pub(super) unsafe fn ask(&mut self, hidden: &DeviceMatrix, rows: &[RowParams<'_>]) -> Result<(), CudaError> {
        self.answers.clear();
        let asks = |way: &RowRoute| matches!(way, RowRoute::Asked);
        if !self.ways.iter().any(asks) {
            return Ok(());
        }
        let (mut stored, stream) = self.stored()?;
        // SAFETY: the same contract.
        let asked = unsafe { self.ask_stored(hidden, rows, &mut stored, &stream) };
        self.stored = Some((stored, stream));
        asked
    }

    /// Takes the room for stored logits, and its stream.
    fn stored(&mut self) -> Result<(StoredRows, Arc<CudaStream>), CudaError> {
        if let Some(stored) = self.stored.take() {
            return Ok(stored);
        }
        let stream = self.device.stream()?;
        let stored = StoredRows::new(self.shape.tokens.clone(), self.plan.max_rows, &self.device, &stream)?;
        Ok((stored, stream))
    }

    /// The same with room for stored logits.
    ///
    /// # Safety
    /// As [`DeviceSampler::ask`].
    unsafe fn ask_stored(
        &mut self,
        hidden: &DeviceMatrix,
        rows: &[RowParams<'_>],
        stored: &mut StoredRows,
        stream: &Arc<CudaStream>,
    ) -> Result<(), CudaError> {
        let asks = |way: &RowRoute| matches!(way, RowRoute::Asked);
        let (can, vocab_size) = (self.capabilities(), self.shape.vocab_size);
        let most = stored.rows().min(self.most);
        let mut next = 0;
        while let Some(from) = (next..rows.len()).find(|&r| asks(&self.ways[r])) {
            let to = (from..rows.len().min(from + most)).find(|&r| !asks(&self.ways[r]));
            next = to.unwrap_or(rows.len().min(from + most));
            self.asked.clear();
            for (r, params) in rows.iter().enumerate().take(next).skip(from) {
                let row = params.check(self.adjustments.row(r), &can, &self.plan, vocab_size);
                self.asked.push(StoredRequest::new(params, &row.expect("rows that ask were checked"), None));
            }
            self.stage(rows, from..next, 0, |_| true)?;
            // SAFETY: the same contract; `most` rows are as many as there is room for.
            unsafe { self.store(hidden, from..next, stored, stream) }?;
            let outcomes = self.of_row.iter().map(|draw| candidate(draw).map(drop));
            self.answers.ask(&self.asked, outcomes, true, None, stored, stream)?;
        }
        Ok(())
    }

    /// Stores the logits of the rows `part`, which are staged, and waits; each row's draw is left in `of_row`.
    ///
    /// # Safety
    /// As [`DeviceSampler::ask`]; they are no more than a launch takes and there is room for.
    unsafe fn store(
        &mut self,
        hidden: &DeviceMatrix,
        part: Range<usize>,
        stored: &StoredRows,
        stream: &Arc<CudaStream>,
    ) -> Result<(), CudaError> {
        let count = part.len();
        let rows_there = self.copy(stream)?;
        let (logits, stride) = stored.place(stream);
        let draws = self.poisoned_draws(count, stream)?;
        // SAFETY: the caller's contract; there are draws for the rows.
        unsafe {
            let hidden = rows_of(hidden, part);
            self.fused.launch_storing(stream, &hidden, rows_there, draws, logits, stride)?;
        }
        self.of_row.clear();
        self.of_row.resize(count, Draw::default());
        copy_down(&mut self.of_row, draws, stream)?;
        results::written(&self.of_row)?;
        self.settle();
        Ok(())
    }

    /// Gives the rows of `out` that ask for them their raw log-probabilities, some neighbours at a time.
    ///
    /// # Safety
    /// As [`DeviceSampler::ask`].
    pub(super) unsafe fn note_raw(
        &mut self,
        hidden: &DeviceMatrix,
        rows: &[RowParams<'_>],
        out: &mut Samples,
    ) -> Result<(), CudaError> {
        let asks = |(r, params): (usize, &RowParams<'_>)| out.row(r).is_ok() && raw::bare(params).is_some();
        if !rows.iter().enumerate().any(asks) {
            return Ok(());
        }
        let (mut stored, stream) = self.stored()?;
        // SAFETY: the same contract.
        let noted = unsafe { self.note_stored(hidden, rows, &mut stored, &stream, out) };
        self.stored = Some((stored, stream));
        noted
    }

    /// The same with room for stored logits.
    ///
    /// # Safety
    /// As [`DeviceSampler::ask`].
    unsafe fn note_stored(
        &mut self,
        hidden: &DeviceMatrix,
        rows: &[RowParams<'_>],
        stored: &mut StoredRows,
        stream: &Arc<CudaStream>,
        out: &mut Samples,
    ) -> Result<(), CudaError> {
        let (can, vocab_size) = (self.capabilities(), self.shape.vocab_size);
        let most = stored.rows().min(self.most);
        let mut next = 0;
        loop {
            let asks = |&r: &usize| out.row(r).is_ok() && raw::bare(&rows[r]).is_some();
            let Some(from) = (next..rows.len()).find(asks) else { return Ok(()) };
            let end = rows.len().min(from + most);
            next = (from..end).find(|r| !asks(r)).unwrap_or(end);
            self.asked.clear();
            for bare in rows[from..next].iter().filter_map(raw::bare) {
                let row = bare.check(&[], &can, &self.plan, vocab_size);
                let row = row.expect("log-probabilities of these rows were checked");
                self.asked.push(StoredRequest::new(&bare, &row, None));
            }
            // Rows staged for nobody have no transforms.
            self.stage(rows, from..next, 0, |_| false)?;
            // SAFETY: the same contract; `most` rows are as many as there is room for.
            unsafe { self.store(hidden, from..next, stored, stream) }?;
            raw::note(from..next, &self.asked, &mut self.answers, stored, stream, out)?;
        }
    }
}
