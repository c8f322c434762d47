//! A head in device memory with its kernels, and room for the inputs and draws of a launch.
#![allow(unsafe_code)]

use crate::abi::{Draw, Row};
use crate::device::Device;
use crate::device_matrix::DeviceMatrix;
use crate::device_tiled::{DeviceHead, DeviceTiled, KernelChoice};
use crate::error::CudaError;
use crate::fused_hopper::MAX_ROWS;
use crate::staging::Staging;
use core::ops::Range;
use cudarc::driver::{CudaSlice, CudaStream, DevicePtr};
use flash_sampling_core::{Head, Matrix, Plan};
use std::sync::Arc;

/// Bytes of the weight that are laid out and copied at a time.
const PART: usize = 64 << 20;
/// Bytes of transformed logits that are kept at a time; at least a row's.
const STORED: usize = 64 << 20;

/// A head in device memory with its kernels, and room for the inputs and draws of a launch.
#[derive(Debug)]
pub(crate) struct Resident {
    fused: DeviceTiled,
    /// Draws of a launch.
    most: usize,
    tokens: usize,
    /// Elements from one row to the next, of the weight and of hidden states.
    row_stride: usize,
    inputs: CudaSlice<u8>,
    draws: CudaSlice<u8>,
    /// Hidden states of the last launch and where its rows begin in `inputs`.
    last: Option<(DeviceMatrix, u64)>,
    /// Transformed logits, `[rows, tokens]`, of the rows in `stored` of the last launch.
    logits: CudaSlice<f32>,
    stored: Range<usize>,
    /// Held for the kernels, which know their addresses; freed after them.
    _weight: CudaSlice<u8>,
    _bias: Option<CudaSlice<f32>>,
}

impl Resident {
    pub(crate) fn new(
        head: &Head<'_>,
        plan: &Plan,
        device: &Arc<Device>,
        choice: KernelChoice,
        stream: &Arc<CudaStream>,
    ) -> Result<Self, CudaError> {
        let failed = CudaError::driver("copy the head to the GPU");
        let tokens = head.tokens();
        let rows = head.weight_row(tokens.start)..head.weight_row(tokens.start) + tokens.len();
        let row_stride = head.hidden().next_multiple_of(8);
        let dtype = head.weight().dtype();
        let weight = upload(&head.weight().row_range(rows.clone()), row_stride, stream)?;
        let bias = head.bias().map(|bias| stream.clone_htod(&bias[rows])).transpose().map_err(&failed)?;
        stream.synchronize().map_err(&failed)?;
        let on_device = DeviceHead {
            weight: DeviceMatrix {
                address: weight.device_ptr(stream).0,
                dtype,
                rows: tokens.len(),
                cols: head.hidden(),
                row_stride,
            },
            first_token: tokens.start,
            bias: bias.as_ref().map(|bias| bias.device_ptr(stream).0),
            soft_cap: head.soft_cap(),
            scale: head.scale(),
        };
        let most = plan.max_rows.saturating_mul(plan.max_draws as usize).min(MAX_ROWS);
        // SAFETY: weight and bias are of these sizes, nothing writes to them, and they are freed after the kernels.
        let fused = unsafe { DeviceTiled::with_kernels(on_device, most, device, choice) }?;
        let size = most * (row_stride * size_of::<f32>() + size_of::<Row>()) + 16;
        let inputs = stream.alloc_zeros(size).map_err(&failed)?;
        let draws = stream.alloc_zeros(most * size_of::<Draw>()).map_err(&failed)?;
        let stored_rows = plan.max_logprobs.map_or(0, |_| (STORED / size_of::<f32>() / tokens.len()).clamp(1, most));
        let logits = stream.alloc_zeros(stored_rows * tokens.len()).map_err(&failed)?;
        let (last, stored) = (None, 0..0);
        Ok(Resident {
            fused,
            most,
            row_stride,
            inputs,
            draws,
            last,
            logits,
            stored,
            tokens: tokens.len(),
            _weight: weight,
            _bias: bias,
        })
    }

    /// Draws of a launch.
    pub(crate) fn most(&self) -> usize {
        self.most
    }

    /// Elements from one row of hidden states to the next.
    pub(crate) fn row_stride(&self) -> usize {
        self.row_stride
    }

    /// Draws what is staged, at most [`Resident::most`] draws, and waits; one result a draw is left in `draws`. `input`
    /// tells the hidden states' type and width.
    pub(crate) fn draw(
        &mut self,
        staging: &mut Staging,
        input: &Matrix<'_>,
        draws: &mut Vec<Draw>,
        stream: &Arc<CudaStream>,
    ) -> Result<(), CudaError> {
        let failed = CudaError::driver("copy the inputs of a call");
        if staging.len() > self.inputs.len() {
            self.inputs = stream.alloc_zeros(staging.len().next_power_of_two()).map_err(&failed)?;
        }
        let count = staging.rows();
        let base = self.inputs.device_ptr(stream).0;
        let rows = base + staging.rows_at() as u64;
        stream.memcpy_htod(staging.finish(base), &mut self.inputs).map_err(&failed)?;
        let (dtype, cols, row_stride) = (input.dtype(), input.cols(), self.row_stride);
        let hidden = DeviceMatrix { address: base, dtype, rows: count, cols, row_stride };
        (self.last, self.stored) = (Some((hidden, rows)), 0..0);
        let out = self.draws.device_ptr(stream).0;
        // SAFETY: the inputs were just copied on the same stream; `draws` has room for `most` draws; the call waits below,
        // so launches follow each other.
        unsafe { self.fused.launch(stream, &hidden, rows, out) }?;
        draws.clear();
        draws.resize(count, Draw::default());
        let bytes: &mut [u8] = bytemuck::cast_slice_mut(draws);
        stream.memcpy_dtoh(&self.draws.slice(..bytes.len()), bytes).map_err(CudaError::driver("copy the draws"))?;
        stream.synchronize().map_err(CudaError::driver("run the kernels"))
    }

    /// The transformed logits of the draw at place `row` of the last launch; the plan must allow log-probabilities. They
    /// are made for many rows at once, and those that follow `row` are kept.
    pub(crate) fn logits(&mut self, row: usize, out: &mut Vec<f32>, stream: &Arc<CudaStream>) -> Result<(), CudaError> {
        let failed = CudaError::driver("copy the logits of a row");
        if !self.stored.contains(&row) {
            self.store(row, stream)?;
        }
        let at = (row - self.stored.start) * self.tokens;
        out.resize(self.tokens, 0.0);
        stream.memcpy_dtoh(&self.logits.slice(at..at + self.tokens), out).map_err(&failed)?;
        stream.synchronize().map_err(&failed)
    }

    /// Enqueues the transformed logits of the last launch's rows from `first` on, as many as there is room for.
    fn store(&mut self, first: usize, stream: &CudaStream) -> Result<(), CudaError> {
        let Some((hidden, rows)) = self.last else { return Ok(()) };
        let count = (hidden.rows - first).min(self.logits.len() / self.tokens);
        let from =
            DeviceMatrix { address: hidden.address + first as u64 * hidden.stride_bytes(), rows: count, ..hidden };
        let rows = rows + (first * size_of::<Row>()) as u64;
        // The same draws again.
        let draws = self.draws.device_ptr(self.draws.stream()).0 + (first * size_of::<Draw>()) as u64;
        let logits = self.logits.device_ptr(self.logits.stream()).0;
        // SAFETY: the inputs of the last launch are still there, on the same stream; there is room for `count` rows of
        // logits and, with the draws before `first`, for the draws.
        unsafe { self.fused.launch_storing(stream, &from, rows, draws, logits, self.tokens) }?;
        self.stored = first..first + count;
        Ok(())
    }
}

/// Copies a weight to the GPU, in rows of `row_stride` elements.
fn upload(weight: &Matrix<'_>, row_stride: usize, stream: &Arc<CudaStream>) -> Result<CudaSlice<u8>, CudaError> {
    let failed = CudaError::driver("copy the weight to the GPU");
    let bytes = row_stride * weight.dtype().size();
    let mut to = stream.alloc_zeros::<u8>(weight.rows() * bytes).map_err(&failed)?;
    if weight.row_stride() == row_stride && weight.cols() == row_stride {
        stream.memcpy_htod(weight.bytes(), &mut to).map_err(&failed)?;
        return Ok(to);
    }
    let rows_of_part = (PART / bytes).max(1);
    let mut part = Vec::with_capacity(rows_of_part.min(weight.rows()) * bytes);
    for first in (0..weight.rows()).step_by(rows_of_part) {
        let last = (first + rows_of_part).min(weight.rows());
        part.clear();
        for row in first..last {
            part.extend_from_slice(weight.row_bytes(row));
            part.resize((row + 1 - first) * bytes, 0);
        }
        stream.memcpy_htod(&part, &mut to.slice_mut(first * bytes..last * bytes)).map_err(&failed)?;
        stream.synchronize().map_err(&failed)?;
    }
    Ok(to)
}
