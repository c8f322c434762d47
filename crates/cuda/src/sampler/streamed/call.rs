//! The steps of a call over a streamed head: stage rows, run all launches on every block, copy the draws to the host.
#![allow(unsafe_code)]

use super::logprobs::StreamedLogprobs;
use super::{CudaStreamed, head_of_block};
use crate::abi::{DeviceAddress, Draw, RUNNING_BYTES};
use crate::device::group_pass::Results;
use crate::device::{DeviceMatrix, MAX_ROWS, Queue, results};
use crate::error::CudaError;
use crate::sampler::{CallRows, row_stride};
use cudarc::driver::CudaStream;
use flash_sampling_core::Matrix;

/// A queue for the kernels over a streamed head.
fn queue(stream: &CudaStream) -> Queue<'_> {
    // SAFETY: *Memory*: a `CudaStreamed` owns all memory, with room for every draw of the plan; the stream waits for
    // the copy of a block before it uses the block. *Order*: one stream multiplies, and a block is released before it
    // is overwritten; parts come in ascending order. *Rows*: `Staging` makes rows from checked parameters.
    unsafe { Queue::new(stream) }
}

impl CudaStreamed<'_> {
    /// Stages the rows of a call: hidden states in the order of copies, draws in launch order.
    pub(super) fn stage(&mut self, rows: &CallRows<'_, '_>) -> Result<(), CudaError> {
        let tokens = 0..self.head.vocab_size as u32;
        self.work.clear();
        self.staging.clear();
        self.logprobs.iter_mut().for_each(StreamedLogprobs::clear);
        for (r, row) in rows.batch.rows.iter().enumerate() {
            if row.is_err() {
                continue;
            }
            let row = rows.adjusted(r, &mut self.adjustments, tokens.clone())?;
            if let Some(logprobs) = &mut self.logprobs {
                logprobs.push(rows, r, &row, self.staging.rows())?;
            }
            self.work.push((r, row.draws));
            let draws = row.first_draw..row.first_draw + row.draws;
            self.staging.push(&rows.batch.params[r], &row, draws)?;
        }
        self.schedule.assign(self.work.iter().copied(), self.room);
        self.schedule.copies.iter().for_each(|copy| self.staging.push_hidden(copy.row));
        self.staging.arrange(&self.schedule.order);
        Ok(())
    }

    /// Copies the rows of a call to the GPU. Returns their hidden states.
    pub(super) fn begin(&mut self, input: &Matrix<'_>) -> Result<DeviceMatrix, CudaError> {
        // A failed call may have pending work.
        self.blocks.finish()?;
        self.stream.synchronize().map_err(CudaError::driver("copy the inputs of a call"))?;
        let address = self.staging.copy_to(&mut self.inputs, Some(input), &self.stream)?;
        let queue = queue(&self.stream);
        queue.fill(DeviceAddress::of(&self.invalid, &self.stream), 0xff, self.invalid.len())?;
        results::poison(DeviceAddress::of(&self.draws, &self.stream), self.schedule.order.len(), queue)?;
        let (cols, row_stride) = (input.cols(), row_stride(input.cols()));
        if let Some(logprobs) = &mut self.logprobs {
            logprobs.begin(input, self.head.vocab_size as u32, &self.stream)?;
        }
        Ok(DeviceMatrix { address, dtype: input.dtype(), rows: self.schedule.copies.len(), cols, row_stride })
    }

    /// Enqueues the copy of a block that was read, and the launches over the block.
    pub(super) fn multiply(
        &mut self,
        block: usize,
        start: usize,
        count: usize,
        hidden: &DeviceMatrix,
    ) -> Result<(), CudaError> {
        let bytes = count * self.head.row_bytes();
        self.blocks.copy(block, bytes, &self.stream)?;
        let bias = self.bias.as_ref().map(|bias| DeviceAddress::of(bias, &self.stream).add(start));
        let head = head_of_block(&self.head, self.blocks.address(block), start as u32, count, bias);
        let (queue, stream) = (queue(&self.stream), &self.stream);
        let (running, draws) = (DeviceAddress::of(&self.running, stream), DeviceAddress::of(&self.draws, stream));
        let invalid = DeviceAddress::of(&self.invalid, stream);
        let rows_at = DeviceAddress::of(&self.inputs, stream).add(self.staging.rows_at()).cast();
        // The draws before this round.
        let mut before = 0;
        for &round in &self.schedule.rounds {
            for first in (0..round as usize).step_by(MAX_ROWS) {
                let (rows, at) = (MAX_ROWS.min(round as usize - first), before + first);
                let part = hidden.rows(first..first + rows);
                let results = Results {
                    rows: rows_at.add(at),
                    draws: draws.add(at),
                    log_z: DeviceAddress::NULL,
                    invalid: invalid.add(at),
                    running: running.add(at * RUNNING_BYTES),
                    begins: start == 0,
                    ends: start + count == self.head.vocab_size,
                };
                self.pass.launch(queue, &head, &part, &results)?;
            }
            before += round as usize;
        }
        if let Some(logprobs) = &mut self.logprobs {
            logprobs.store(&head, queue)?;
        }
        self.blocks.release(block, &self.stream)
    }

    /// Copies the draws to the host, and waits; summarizes the rows with log-probabilities.
    pub(super) fn end(&mut self, rows: &CallRows<'_, '_>) -> Result<(), CudaError> {
        self.drawn.resize(self.schedule.order.len(), Draw::default());
        let draws = self.draws.slice(..self.drawn.len());
        self.stream.memcpy_dtoh(&draws, &mut self.drawn).map_err(CudaError::driver("copy the draws"))?;
        self.stream.synchronize().map_err(CudaError::driver("run the kernels"))?;
        self.pass.mark_idle();
        results::written(&self.drawn)?;
        self.results.resize(self.drawn.len(), Draw::default());
        for (&number, draw) in self.schedule.order.iter().zip(&self.drawn) {
            self.results[number as usize] = *draw;
        }
        match &mut self.logprobs {
            Some(logprobs) => logprobs.summarize(rows, &self.results),
            None => Ok(()),
        }
    }
}
