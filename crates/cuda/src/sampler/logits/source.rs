//! Draws from logits that were copied to the GPU.
#![allow(unsafe_code)]

use super::MAX_DRAWS;
use crate::abi::{self, DeviceAddress, Draw, Row, status};
use crate::device::gpu::Device;
use crate::device::launch::Queue;
use crate::device::matrix::DeviceMatrix;
use crate::device::noise_math::NoiseMath;
use crate::device::results;
use crate::device::standalone::{DeviceDraws, DeviceStandalone};
use crate::error::CudaError;
use crate::sampler::row_scan::{CallRows, DrawItem, FilterSource, LogitSource};
use crate::sampler::staging::Staging;
use crate::selection::queries::CanonicalInputs;
use crate::selection::stored_rows::{MAX_ROWS, StoredRows, SummaryInput};
use cudarc::driver::{CudaSlice, CudaStream};
use flash_sampling_core::backend::Adjustments;
use flash_sampling_core::{DType, Matrix};
use std::sync::Arc;

/// The kernels over existing logits, and memory for the inputs and draws of a launch.
#[derive(Debug)]
pub(super) struct LogitDraws {
    vocab_size: u32,
    math: NoiseMath,
    /// For bf16, f16 and f32, each made for the first logits of its type.
    samplers: [Option<DeviceStandalone>; 3],
    logits: CudaSlice<u8>,
    /// Rows and sources of a launch.
    inputs: CudaSlice<u8>,
    sources: CudaSlice<u32>,
    draws: CudaSlice<Draw>,
    staging: Staging,
    adjustments: Adjustments,
    /// Rows of logits that are not contiguous in the input, gathered for the copy.
    gathered: Vec<u8>,
    sources_here: Vec<u32>,
}

impl LogitDraws {
    pub(super) fn new(
        vocab_size: u32,
        math: NoiseMath,
        device: &Arc<Device>,
        stream: &Arc<CudaStream>,
    ) -> Result<Self, CudaError> {
        let f32s = DeviceStandalone::with_math(0..vocab_size, DType::F32, MAX_DRAWS, device, math)?;
        let allocate = CudaError::driver("allocate room for logits");
        let kernels = LogitDraws {
            vocab_size,
            math,
            samplers: [None, None, Some(f32s)],
            logits: stream.alloc_zeros(16).map_err(&allocate)?,
            inputs: stream.alloc_zeros(MAX_DRAWS * size_of::<Row>() + 16).map_err(&allocate)?,
            sources: stream.alloc_zeros(MAX_DRAWS).map_err(&allocate)?,
            draws: stream.alloc_zeros(MAX_DRAWS).map_err(&allocate)?,
            staging: Staging::of(0..vocab_size, vocab_size),
            adjustments: Adjustments::default(),
            gathered: Vec::new(),
            sources_here: Vec::new(),
        };
        stream.synchronize().map_err(allocate)?;
        Ok(kernels)
    }

    pub(super) fn math(&self) -> NoiseMath {
        self.math
    }

    /// Copies the logits to the GPU, without gaps between rows.
    pub(super) fn copy_logits(
        &mut self,
        input: &Matrix<'_>,
        stream: &Arc<CudaStream>,
    ) -> Result<DeviceMatrix, CudaError> {
        let failed = CudaError::driver("copy logits to the GPU");
        let (dtype, rows, cols) = (input.dtype(), input.rows(), input.cols());
        let bytes = rows * cols * dtype.size();
        if bytes > self.logits.len() {
            self.logits = stream.alloc_zeros(bytes).map_err(&failed)?;
        }
        let from = if input.row_stride() == cols {
            input.bytes()
        } else {
            self.gathered.clear();
            (0..rows).for_each(|row| self.gathered.extend_from_slice(input.row_bytes(row)));
            &self.gathered
        };
        if bytes > 0 {
            stream.memcpy_htod(&from[..bytes], &mut self.logits.slice_mut(..bytes)).map_err(&failed)?;
        }
        Ok(DeviceMatrix { address: DeviceAddress::of(&self.logits, stream), dtype, rows, cols, row_stride: cols })
    }

    /// Copies the staged rows and the logits row of each to the GPU; returns their addresses.
    fn copy_rows(
        &mut self,
        sources: impl Iterator<Item = usize>,
        stream: &Arc<CudaStream>,
    ) -> Result<(DeviceAddress<Row>, DeviceAddress<u32>), CudaError> {
        let rows = self.staging.copy_to(&mut self.inputs, None, stream)?.cast();
        let failed = CudaError::driver("copy the rows of a call");
        self.sources_here.clear();
        self.sources_here.extend(sources.map(|row| row as u32));
        let mut sources = self.sources.slice_mut(..self.sources_here.len());
        stream.memcpy_htod(&self.sources_here, &mut sources).map_err(&failed)?;
        Ok((rows, DeviceAddress::of(&self.sources, stream)))
    }
}

/// The logits of a call, on the GPU.
#[derive(Debug)]
pub(super) struct CopiedLogits<'s> {
    pub(super) kernels: &'s mut LogitDraws,
    pub(super) logits: DeviceMatrix,
    pub(super) stream: &'s Arc<CudaStream>,
    pub(super) device: &'s Arc<Device>,
}

impl LogitSource for CopiedLogits<'_> {
    fn draw(
        &mut self,
        rows: &CallRows<'_, '_>,
        items: &[DrawItem],
        _from: Option<FilterSource>,
        draws: &mut Vec<Draw>,
    ) -> Result<(), CudaError> {
        let CopiedLogits { kernels, logits, stream, device } = self;
        draws.clear();
        for part in items.chunks(MAX_DRAWS) {
            kernels.staging.clear();
            for same in part.chunk_by(|a, b| a.row == b.row) {
                let row = rows.adjusted(same[0].row, &mut kernels.adjustments, 0..kernels.vocab_size)?;
                let params = &rows.batch.params[same[0].row];
                kernels.staging.push(params, &row, same.iter().map(|item| item.draw))?;
            }
            let (rows, sources) = kernels.copy_rows(part.iter().map(|item| item.row), stream)?;
            let draws_at = DeviceAddress::of(&kernels.draws, stream);
            // SAFETY: *Memory*: logits, rows and sources were just copied on this stream; `draws` has room for
            // `MAX_DRAWS`. All are freed after the launch; the sources are rows of the logits. *Order*: the call waits
            // below. *Rows*: `Staging`.
            let queue = unsafe { Queue::new(stream) };
            results::poison(draws_at, part.len(), queue)?;
            let launch = DeviceDraws { count: part.len(), rows, sources: Some(sources), draws: draws_at, log_z: None };
            let sampler = match &mut kernels.samplers[abi::element(logits.dtype) as usize] {
                Some(sampler) => sampler,
                none => {
                    let tokens = 0..kernels.vocab_size;
                    none.insert(DeviceStandalone::with_math(tokens, logits.dtype, MAX_DRAWS, device, kernels.math)?)
                }
            };
            sampler.enqueue(queue, logits, &launch)?;
            let from = draws.len();
            draws.resize(from + part.len(), Draw::default());
            let failed = CudaError::driver("copy the draws");
            stream.memcpy_dtoh(&kernels.draws.slice(..part.len()), &mut draws[from..]).map_err(&failed)?;
            stream.synchronize().map_err(&failed)?;
            sampler.mark_idle();
            results::written(&draws[from..])?;
        }
        Ok(())
    }

    fn max_stored(&self) -> usize {
        MAX_ROWS
    }

    fn store(
        &mut self,
        rows: &CallRows<'_, '_>,
        which: &[usize],
        is_raw: bool,
        stored: &mut StoredRows,
        draws: &mut Vec<Draw>,
    ) -> Result<Option<CanonicalInputs>, CudaError> {
        let CopiedLogits { kernels, logits, stream, .. } = self;
        rows.stage_first(which, is_raw, &mut kernels.adjustments, &mut kernels.staging)?;
        let (rows, sources) = kernels.copy_rows(which.iter().copied(), stream)?;
        stored.summarize(&SummaryInput { raw: Some(*logits), sources, rows })?;
        stream.synchronize().map_err(CudaError::driver("transform logits"))?;
        draws.clear();
        for slot in 0..which.len() {
            draws.push(invalid(stored.invalid(slot)?));
        }
        Ok(None)
    }
}

/// A row's result from the key of its first bad logit: stage, token, and whether it is infinite; all ones without one.
fn invalid(key: u64) -> Draw {
    let status = match key {
        u64::MAX => status::DRAWN,
        _ if key & 1 == 1 => status::POSITIVE_INFINITY,
        _ => status::NAN,
    };
    Draw { token: (key >> 1) as u32, score: (key >> 33) as f32, status, ..Draw::default() }
}
