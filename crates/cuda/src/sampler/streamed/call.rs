//! A call over a streamed head: rows are staged, every block is multiplied by all launches, draws come down.
#![allow(unsafe_code)]

use super::logprobs::StreamedLogprobs;
use super::{CudaStreamed, hidden_stride};
use crate::abi::{Draw, RUNNING_BYTES, Row};
use crate::device::fused_hopper::MAX_ROWS;
use crate::device::group_pass::Results;
use crate::device::head::DeviceHead;
use crate::device::matrix::DeviceMatrix;
use crate::device::results;
use crate::error::CudaError;
use crate::sampler::row_scan::CallRows;
use cudarc::driver::{CudaSlice, DevicePtr, result};
use flash_sampling_core::Matrix;

impl CudaStreamed<'_> {
    /// Gathers the rows of a call: hidden states as they are dealt out, draws in the order in which they are made.
    pub(super) fn stage(&mut self, rows: &CallRows<'_, '_>) -> Result<(), CudaError> {
        let (input, tokens) = (&rows.batch.input, 0..self.head.vocab_size as u32);
        let stride = hidden_stride(self.head.hidden) * input.dtype().size();
        self.work.clear();
        self.staging.clear();
        self.logprobs.iter_mut().for_each(StreamedLogprobs::clear);
        for (r, row) in rows.batch.rows.iter().enumerate() {
            if row.is_err() {
                continue;
            }
            let row = rows.adjusted(r, &mut self.adjustments, tokens.clone())?;
            if let Some(logprobs) = &mut self.logprobs {
                logprobs.push(rows, r, &row, self.staging.rows(), stride)?;
            }
            self.work.push((r, row.draws));
            let draws = row.first_draw..row.first_draw + row.draws;
            self.staging.push(&rows.batch.params[r], &row, draws)?;
        }
        self.deal.deal(self.work.iter().copied(), self.room);
        self.deal.copies.iter().for_each(|copy| self.staging.push_hidden(input.row_bytes(copy.row), stride));
        self.staging.arrange(&self.deal.order);
        Ok(())
    }

    /// Copies the rows of a call up. Returns their hidden states.
    pub(super) fn begin(&mut self, input: &Matrix<'_>) -> Result<DeviceMatrix, CudaError> {
        let failed = CudaError::driver("copy the inputs of a call");
        // A call that failed may have left work behind.
        self.blocks.settle()?;
        self.stream.synchronize().map_err(&failed)?;
        if self.staging.len() > self.inputs.len() {
            self.inputs = self.stream.alloc_zeros(self.staging.len().next_power_of_two()).map_err(&failed)?;
        }
        let address = self.inputs.device_ptr(&self.stream).0;
        self.stream.memcpy_htod(self.staging.finish(address), &mut self.inputs).map_err(&failed)?;
        let (invalid, bytes) = (self.invalid.device_ptr(&self.stream).0, self.invalid.len() * size_of::<u64>());
        // SAFETY: this is the whole of the invalid keys.
        unsafe { result::memset_d8_async(invalid, 0xff, bytes, self.stream.cu_stream()) }.map_err(&failed)?;
        results::poison(&self.draws, self.deal.order.len(), &self.stream)?;
        let (cols, row_stride) = (input.cols(), hidden_stride(input.cols()));
        if let Some(logprobs) = &mut self.logprobs {
            logprobs.begin(input, row_stride, self.head.vocab_size as u32, &self.stream)?;
        }
        Ok(DeviceMatrix { address, dtype: input.dtype(), rows: self.deal.copies.len(), cols, row_stride })
    }

    /// Enqueues the copy of a block that was read, and its launches.
    pub(super) fn multiply(
        &mut self,
        block: usize,
        start: usize,
        count: usize,
        hidden: &DeviceMatrix,
    ) -> Result<(), CudaError> {
        let bytes = count * self.head.hidden * self.head.dtype.size();
        self.blocks.copy(block, bytes, &self.stream)?;
        let head = DeviceHead {
            weight: DeviceMatrix {
                address: self.blocks.address(block),
                dtype: self.head.dtype,
                rows: count,
                cols: self.head.hidden,
                row_stride: self.head.hidden,
            },
            first_token: start as u32,
            bias: self.bias.as_ref().map(|bias| bias.device_ptr(&self.stream).0 + 4 * start as u64),
            soft_cap: self.head.soft_cap,
            scale: self.head.scale,
        };
        let address = |slice: &CudaSlice<u8>| slice.device_ptr(slice.stream()).0;
        let (running, draws) = (address(&self.running), address(&self.draws));
        let invalid = self.invalid.device_ptr(&self.stream).0;
        let rows_at = address(&self.inputs) + self.staging.rows_at() as u64;
        // The draws before this layer.
        let mut before = 0;
        for &layer in &self.deal.layers {
            for first in (0..layer as usize).step_by(MAX_ROWS) {
                let (rows, at) = (MAX_ROWS.min(layer as usize - first), before + first);
                let address = hidden.address + first as u64 * hidden.stride_bytes();
                let part = DeviceMatrix { address, rows, ..*hidden };
                let results = Results {
                    rows: rows_at + (at * size_of::<Row>()) as u64,
                    draws: draws + (at * size_of::<Draw>()) as u64,
                    log_z: 0,
                    invalid: invalid + (at * size_of::<u64>()) as u64,
                    running: running + (at * RUNNING_BYTES) as u64,
                    begins: start == 0,
                    ends: start + count == self.head.vocab_size,
                };
                // SAFETY: everything is this value's, with room for every draw of the plan; the block is on the device
                // when the stream gets here, and is not written before it is released; parts come in ascending order.
                unsafe { self.pass.launch(&self.stream, &head, &part, &results) }?;
            }
            before += layer as usize;
        }
        if let Some(logprobs) = &mut self.logprobs {
            // SAFETY: as above.
            unsafe { logprobs.store(&head, &self.stream) }?;
        }
        self.blocks.release(block, &self.stream)
    }

    /// Copies the draws down, and waits; summarizes the rows with log-probabilities.
    pub(super) fn end(&mut self, rows: &CallRows<'_, '_>) -> Result<(), CudaError> {
        self.made.resize(self.deal.order.len(), Draw::default());
        let bytes: &mut [u8] = bytemuck::cast_slice_mut(&mut self.made);
        let there = self.draws.slice(..bytes.len());
        self.stream.memcpy_dtoh(&there, bytes).map_err(CudaError::driver("copy the draws"))?;
        self.stream.synchronize().map_err(CudaError::driver("run the kernels"))?;
        self.pass.settle();
        results::written(&self.made)?;
        self.results.resize(self.made.len(), Draw::default());
        for (&number, draw) in self.deal.order.iter().zip(&self.made) {
            self.results[number as usize] = *draw;
        }
        match &mut self.logprobs {
            Some(logprobs) => logprobs.summarize(rows, &self.results, &self.stream),
            None => Ok(()),
        }
    }
}
