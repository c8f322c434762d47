//! The standalone sampler over logits in host memory (paper Alg. I.1).
#![allow(unsafe_code)]

mod copies;
mod stored_rows;

use crate::abi::{self, Draw};
use crate::device::gpu::Device;
use crate::device::matrix::DeviceMatrix;
use crate::device::noise_math::NoiseMath;
use crate::device::results;
use crate::device::standalone::{DeviceDraws, DeviceStandalone};
use crate::device::stored_kernels::TransformKernel;
use crate::device::stored_rows::{MAX_ROWS, StoredRows};
use crate::error::CudaError;
use crate::host::check_plan;
use crate::host::results::push_row;
use crate::host::staging::Staging;
use crate::host::stored_results::{StoredRequest, StoredResults};
use crate::host::tiled::FILTERS_TOO;
use cudarc::driver::{CudaSlice, CudaStream, DevicePtr};
use flash_sampling_core::sampler::check_call;
use flash_sampling_core::{
    Adjustments, Capabilities, DType, Exactness, Input, Matrix, PerturbedArgmax, Plan, RowParams, SampleError, Samples,
    Shape, Variant,
};
use std::sync::Arc;

/// Draws of a launch.
const MOST: usize = 4096;

/// Draws from existing logits in host memory, `[rows, vocab]` in bf16, f16 or f32, on a GPU (paper Alg. I.1). Exact
/// pathwise: the draws are those of [`CudaTiled`](crate::CudaTiled) on the same logits.
///
/// A call copies the logits up, draws, copies the draws down and waits: copying is most of its time. For logits that are
/// on the GPU already there is [`DeviceStandalone`]. Memory on the GPU grows to the largest call.
#[derive(Debug)]
pub struct CudaStandalone {
    vocab_size: u32,
    plan: Plan,
    math: NoiseMath,
    device: Arc<Device>,
    stream: Arc<CudaStream>,
    /// For bf16, f16 and f32, each when the first such logits come.
    samplers: [Option<DeviceStandalone>; 3],
    transform: TransformKernel,
    /// The first invalid logit of each row that asks.
    invalid: CudaSlice<u64>,
    logits: CudaSlice<u8>,
    /// Rows and sources of a launch.
    inputs: CudaSlice<u8>,
    sources: CudaSlice<u32>,
    draws: CudaSlice<u8>,
    staging: Staging,
    gathered: Vec<u8>,
    /// For the rows that ask for more.
    stored: Option<StoredRows>,
    answers: StoredResults,
    work: Vec<(usize, u32)>,
    /// The biases of the call's rows.
    adjustments: Adjustments,
    asking: Vec<usize>,
    results: Vec<Draw>,
    /// Of a launch: the row of logits of each draw or asking row, the rows that ask, and their first invalid logits.
    sources_here: Vec<u32>,
    asked: Vec<StoredRequest>,
    faults: Vec<u64>,
}

impl CudaStandalone {
    /// Plans a sampler for logits of `vocab_size` columns.
    ///
    /// # Errors
    /// * [`CudaError::Unsupported`]: [`Plan::canonical`], since logits are taken as they are.
    /// * [`CudaError::EmptyPlan`]: the plan has no rows or no draws.
    /// * [`CudaError::Layout`], [`CudaError::TooLarge`]: `vocab_size` is zero or above 2^31.
    /// * [`CudaError::Compile`], [`CudaError::Driver`].
    pub fn new(vocab_size: usize, plan: Plan, device: &Arc<Device>) -> Result<Self, CudaError> {
        CudaStandalone::with_math(vocab_size, plan, device, NoiseMath::Exact)
    }

    /// [`CudaStandalone::new`] with a choice of math; [`Capabilities::backend`] tells which it is. Rows that ask for
    /// log-probabilities, for lists without replacement or for filters are drawn from in exact-math always.
    ///
    /// # Errors
    /// As [`CudaStandalone::new`].
    pub fn with_math(vocab_size: usize, plan: Plan, device: &Arc<Device>, math: NoiseMath) -> Result<Self, CudaError> {
        check_plan(&plan, false)?;
        if vocab_size > 1 << 31 {
            return Err(CudaError::TooLarge { what: "tokens", found: vocab_size, limit: 1 << 31 });
        }
        let f32s = DeviceStandalone::with_math(0..vocab_size as u32, DType::F32, MOST, device, math)?;
        let stream = device.stream()?;
        let allocate = CudaError::driver("allocate room for logits");
        let sampler = CudaStandalone {
            vocab_size: vocab_size as u32,
            plan,
            math,
            device: device.clone(),
            samplers: [None, None, Some(f32s)],
            transform: TransformKernel::load(device)?,
            invalid: stream.alloc_zeros(plan.max_rows.min(MAX_ROWS)).map_err(&allocate)?,
            logits: stream.alloc_zeros(16).map_err(&allocate)?,
            inputs: stream.alloc_zeros(MOST * size_of::<abi::Row>() + 16).map_err(&allocate)?,
            sources: stream.alloc_zeros(MOST).map_err(&allocate)?,
            draws: stream.alloc_zeros(MOST * size_of::<Draw>()).map_err(&allocate)?,
            staging: Staging::of(0..vocab_size as u32, vocab_size as u32),
            gathered: Vec::new(),
            stored: None,
            answers: StoredResults::default(),
            work: Vec::new(),
            adjustments: Adjustments::default(),
            asking: Vec::new(),
            results: Vec::new(),
            sources_here: Vec::new(),
            asked: Vec::new(),
            faults: Vec::new(),
            stream,
        };
        sampler.stream.synchronize().map_err(allocate)?;
        Ok(sampler)
    }

    /// Makes every draw of `work`, in its order.
    fn draw(
        &mut self,
        logits: &DeviceMatrix,
        rows: &[RowParams<'_>],
        adjustments: &Adjustments,
    ) -> Result<(), CudaError> {
        self.results.clear();
        let can = self.capabilities();
        let work = core::mem::take(&mut self.work);
        for part in work.chunks(MOST) {
            self.staging.clear();
            for draws in part.chunk_by(|a, b| a.0 == b.0) {
                let r = draws[0].0;
                let row = rows[r].check(adjustments.row(r), &can, &self.plan, self.vocab_size);
                let row = row.expect("rows of the work were checked");
                let draws = draws.iter().map(|&(_, draw)| draw);
                self.staging.push(&rows[r], &row, draws)?;
            }
            let (rows, sources) = self.copy_rows(part.iter().map(|&(r, _)| r))?;
            results::poison(&self.draws, part.len(), &self.stream)?;
            let there = self.draws.device_ptr(&self.stream).0;
            let draws = DeviceDraws { count: part.len(), rows, sources: Some(sources), draws: there, log_z: None };
            let slot = &mut self.samplers[abi::element(logits.dtype) as usize];
            let sampler = match slot {
                Some(sampler) => sampler,
                None => {
                    let tokens = 0..self.vocab_size;
                    slot.insert(DeviceStandalone::with_math(tokens, logits.dtype, MOST, &self.device, self.math)?)
                }
            };
            // SAFETY: logits, rows and sources were just copied on this stream, draws has room for MOST; the sources are
            // rows of the logits; the call waits below, so launches follow each other.
            unsafe { sampler.launch(&self.stream, logits, &draws) }?;
            let from = self.results.len();
            self.results.resize(from + part.len(), Draw::default());
            let bytes: &mut [u8] = bytemuck::cast_slice_mut(&mut self.results[from..]);
            let failed = CudaError::driver("copy the draws");
            self.stream.memcpy_dtoh(&self.draws.slice(..bytes.len()), bytes).map_err(&failed)?;
            self.stream.synchronize().map_err(&failed)?;
            sampler.settle();
            results::written(&self.results[from..])?;
        }
        self.work = work;
        Ok(())
    }
}

impl PerturbedArgmax for CudaStandalone {
    fn capabilities(&self) -> Capabilities {
        Capabilities {
            backend: match self.math {
                NoiseMath::Exact => "cuda",
                NoiseMath::Fast => "cuda (fast-math)",
            },
            variant: Variant::Standalone,
            exactness: Exactness::Pathwise,
            input: Input::Logits,
            without_replacement: true,
            knobs: FILTERS_TOO,
            canonical: false,
        }
    }

    fn shape(&self) -> Shape {
        Shape { tokens: 0..self.vocab_size, vocab_size: self.vocab_size, input: self.vocab_size as usize }
    }

    fn plan(&self) -> Plan {
        self.plan
    }

    fn sample(&mut self, input: Matrix<'_>, rows: &[RowParams<'_>], out: &mut Samples) -> Result<(), SampleError> {
        out.clear();
        check_call(&input, rows, &self.shape(), &self.plan)?;
        let can = self.capabilities();
        self.work.clear();
        self.asking.clear();
        for (r, params) in rows.iter().enumerate() {
            match params.check(&[], &can, &self.plan, self.vocab_size) {
                Ok(row) if row.without_replacement || row.logprobs.is_some() || row.filters.is_some() => {
                    self.asking.push(r);
                }
                Ok(row) => self.work.extend((row.first_draw..row.first_draw + row.draws).map(|draw| (r, draw))),
                Err(_) => {}
            }
        }
        let failed = |error| SampleError::Backend { backend: "cuda", source: Box::new(error) };
        let logits = self.copy_logits(&input).map_err(failed)?;
        let mut adjustments = core::mem::take(&mut self.adjustments);
        adjustments.collect(rows);
        self.draw(&logits, rows, &adjustments).map_err(failed)?;
        self.ask(&logits, rows, &adjustments).map_err(failed)?;
        self.adjustments = adjustments;
        let (mut results, mut asking) = (self.results.as_slice(), self.asking.iter().enumerate().peekable());
        for (r, params) in rows.iter().enumerate() {
            let asked = asking.next_if(|(_, row)| **row == r).map(|(i, _)| i);
            let outcome = params.check(&[], &can, &self.plan, self.vocab_size).and_then(|row| {
                if let Some(i) = asked {
                    return self.answers.emit(i, &row, self.vocab_size, out);
                }
                push_row(&mut results, &row, None, &[], out)
            });
            if let Err(error) = outcome {
                out.push_error(error);
            }
        }
        self.note_raw(&logits, rows, out).map_err(|error| {
            out.clear();
            failed(error)
        })
    }
}
