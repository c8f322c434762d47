//! The rows that ask for more than a draw.
#![allow(unsafe_code)]

use crate::abi::Draw;
use crate::device::matrix::DeviceMatrix;
use crate::device::results;
use crate::device::stored_rows::StoredRows;
use crate::error::CudaError;
use crate::host::answers::Asking;
use crate::host::results::candidate;
use crate::host::shared::launched::{copy_down, rows_of};
use crate::host::shared::{CudaShared, Way};
use cudarc::driver::CudaStream;
use flash_sampling_core::RowParams;
use std::sync::Arc;

impl CudaShared {
    /// Stores the logits of the rows that ask, some neighbours at a time, and asks them, on a stream of their own.
    ///
    /// # Safety
    /// As [`CudaShared::sample`]; the hidden states are there.
    pub(super) unsafe fn ask(&mut self, hidden: &DeviceMatrix, rows: &[RowParams<'_>]) -> Result<(), CudaError> {
        self.answers.clear();
        let asks = |way: &Way| matches!(way, Way::Asked);
        if !self.ways.iter().any(asks) {
            return Ok(());
        }
        if self.stored.is_none() {
            let stream = self.device.stream()?;
            let stored = StoredRows::new(self.shape.tokens.clone(), self.plan.max_rows, &self.device, &stream)?;
            self.stored = Some((stored, stream));
        }
        let Some((mut stored, stream)) = self.stored.take() else { return Ok(()) };
        // SAFETY: the same contract.
        let asked = unsafe { self.ask_stored(hidden, rows, &mut stored, &stream) };
        self.stored = Some((stored, stream));
        asked
    }

    /// The same with room for stored logits.
    ///
    /// # Safety
    /// As [`CudaShared::ask`].
    unsafe fn ask_stored(
        &mut self,
        hidden: &DeviceMatrix,
        rows: &[RowParams<'_>],
        stored: &mut StoredRows,
        stream: &Arc<CudaStream>,
    ) -> Result<(), CudaError> {
        let asks = |way: &Way| matches!(way, Way::Asked);
        let (can, vocab_size) = (self.capabilities(), self.shape.vocab_size);
        let most = stored.rows().min(self.most);
        let mut next = 0;
        while let Some(from) = (next..rows.len()).find(|&r| asks(&self.ways[r])) {
            let to = (from..rows.len().min(from + most)).find(|&r| !asks(&self.ways[r]));
            next = to.unwrap_or(rows.len().min(from + most));
            let count = next - from;
            self.asked.clear();
            for (r, params) in rows.iter().enumerate().take(next).skip(from) {
                let row = params.check(self.adjustments.row(r), &can, &self.plan, vocab_size);
                self.asked.push(Asking::new(params, &row.expect("rows that ask were checked"), None));
            }
            self.stage(rows, from..next, 0, |_| true);
            let rows_there = self.copy(stream)?;
            let (logits, stride) = stored.place(stream);
            let draws = self.poisoned_draws(count, stream)?;
            // SAFETY: the caller's contract; draws have room for `most` rows, and stored logits too.
            unsafe {
                let hidden = rows_of(hidden, from..next);
                self.fused.launch_storing(stream, &hidden, rows_there, draws, logits, stride)?;
            }
            self.of_row.clear();
            self.of_row.resize(count, Draw::default());
            copy_down(&mut self.of_row, draws, stream)?;
            results::written(&self.of_row)?;
            self.settle();
            let outcomes = self.of_row.iter().map(|draw| candidate(draw).map(drop));
            self.answers.ask(&self.asked, outcomes, true, None, stored, stream)?;
        }
        Ok(())
    }
}
