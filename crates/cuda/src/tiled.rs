//! The fused tiled variant over host memory (paper Alg. 1).
#![allow(unsafe_code)]

use crate::abi::{Draw, Row, status};
use crate::device::Device;
use crate::device_tiled::{DeviceHead, DeviceMatrix, DeviceTiled};
use crate::error::CudaError;
use crate::fused_hopper::MAX_ROWS;
use crate::narrow::append_row;
use crate::staging::Staging;
use cudarc::driver::{CudaSlice, CudaStream, DevicePtr};
use flash_sampling_core::sampler::check_call;
use flash_sampling_core::{
    Candidate, Capabilities, DType, Exactness, Head, Input, Knob, Matrix, PerturbedArgmax, Plan, RowError, RowParams,
    SampleError, Samples, Shape, Variant, Winner,
};
use std::sync::Arc;

const BACKEND: &str = "cuda (sm_90a)";

/// Bytes of the weight that are prepared and copied at a time.
const PART: usize = 64 << 20;

/// Draws inside the matmul on a Hopper GPU, for inputs in host memory (paper Alg. 1). Exact pathwise.
///
/// The weight is copied to the GPU once. A call copies hidden states and row parameters up, launches once for every 256
/// draws, copies the draws down and waits. Weight and hidden states in bf16 or f16, sums in float32; values of another
/// type are taken when the weight's type holds them exactly. Memory on the GPU grows when a call brings more masks and
/// biases than any before it.
#[derive(Debug)]
pub struct CudaTiled<'w> {
    head: Head<'w>,
    plan: Plan,
    stream: Arc<CudaStream>,
    /// `None` for a head without tokens.
    on_device: Option<OnDevice>,
    staging: Staging,
    /// Row and number of each draw of the call.
    work: Vec<(usize, u32)>,
    /// The draws of the last launch, and of the call.
    draws: Vec<Draw>,
    results: Vec<Draw>,
}

/// What is in device memory.
#[derive(Debug)]
struct OnDevice {
    sampler: DeviceTiled,
    /// Draws of a launch.
    most: usize,
    dtype: DType,
    row_stride: usize,
    inputs: CudaSlice<u8>,
    draws: CudaSlice<u8>,
    /// Held for the sampler, which knows their addresses; freed after it.
    _weight: CudaSlice<u8>,
    _bias: Option<CudaSlice<f32>>,
}

impl<'w> CudaTiled<'w> {
    /// Plans a sampler: copies the weight, compiles and loads the kernels.
    ///
    /// # Errors
    /// * [`CudaError::Unsupported`]: the plan asks for log-probabilities or canonical draws.
    /// * [`CudaError::EmptyPlan`]: the plan has no rows or no draws.
    /// * [`CudaError::Inexact`]: a float32 weight that neither bf16 nor f16 holds.
    /// * The others as [`DeviceTiled::new`].
    pub fn new(head: Head<'w>, plan: Plan, device: &Arc<Device>) -> Result<Self, CudaError> {
        let knobs = [(plan.max_logprobs.is_some(), Knob::Logprobs), (plan.canonical, Knob::Canonical)];
        if let Some(&(_, knob)) = knobs.iter().find(|(asked, _)| *asked) {
            return Err(CudaError::Unsupported { knob });
        }
        let empty = [(plan.max_rows == 0, Knob::MaxRows), (plan.max_draws == 0, Knob::Draws)];
        if let Some(&(_, knob)) = empty.iter().find(|(empty, _)| *empty) {
            return Err(CudaError::EmptyPlan { knob });
        }
        let stream = device.stream()?;
        let on_device = match head.tokens().is_empty() {
            true => None,
            false => Some(OnDevice::new(&head, &plan, device, &stream)?),
        };
        let (staging, work) = (Staging::default(), Vec::new());
        Ok(CudaTiled { head, plan, stream, on_device, staging, work, draws: Vec::new(), results: Vec::new() })
    }
}

impl OnDevice {
    fn new(head: &Head<'_>, plan: &Plan, device: &Arc<Device>, stream: &Arc<CudaStream>) -> Result<Self, CudaError> {
        let failed = CudaError::driver("copy the head to the GPU");
        let tokens = head.tokens();
        let rows = head.weight_row(tokens.start)..head.weight_row(tokens.start) + tokens.len();
        let row_stride = head.hidden().next_multiple_of(8);
        let (dtype, weight) = upload(&head.weight().row_range(rows.clone()), row_stride, stream)?;
        let bias = head.bias().map(|bias| stream.clone_htod(&bias[rows])).transpose().map_err(&failed)?;
        stream.synchronize().map_err(&failed)?;
        let matrix = DeviceMatrix {
            address: weight.device_ptr(stream).0,
            dtype,
            rows: tokens.len(),
            cols: head.hidden(),
            row_stride,
        };
        let on_device = DeviceHead {
            weight: matrix,
            first_token: tokens.start,
            bias: bias.as_ref().map(|bias| bias.device_ptr(stream).0),
            soft_cap: head.soft_cap(),
            scale: head.scale(),
        };
        let most = plan.max_rows.saturating_mul(plan.max_draws as usize).min(MAX_ROWS);
        // SAFETY: weight and bias are of these sizes, nothing writes to them, and they are freed after the sampler.
        let sampler = unsafe { DeviceTiled::new(on_device, most, device) }?;
        let size = most * (row_stride * dtype.size() + size_of::<Row>()) + 16;
        let inputs = stream.alloc_zeros(size).map_err(&failed)?;
        let draws = stream.alloc_zeros(most * size_of::<Draw>()).map_err(&failed)?;
        Ok(OnDevice { sampler, most, dtype, row_stride, inputs, draws, _weight: weight, _bias: bias })
    }

    /// Runs what is staged; the results are in `draws`.
    fn run(
        &mut self,
        staging: &mut Staging,
        cols: usize,
        draws: &mut Vec<Draw>,
        stream: &Arc<CudaStream>,
    ) -> Result<(), CudaError> {
        let failed = CudaError::driver("copy the inputs of a call");
        if staging.len() > self.inputs.len() {
            self.inputs = stream.alloc_zeros(staging.len().next_power_of_two()).map_err(&failed)?;
        }
        let (rows, rows_at) = (staging.rows(), staging.rows_at() as u64);
        let base = self.inputs.device_ptr(stream).0;
        stream.memcpy_htod(staging.finish(base), &mut self.inputs).map_err(&failed)?;
        let hidden = DeviceMatrix { address: base, dtype: self.dtype, rows, cols, row_stride: self.row_stride };
        let out = self.draws.device_ptr(stream).0;
        // SAFETY: the inputs were just copied on the same stream; `draws` has room for every planned row; the call
        // waits below, so launches follow each other.
        unsafe { self.sampler.launch(stream, &hidden, base + rows_at, out) }?;
        draws.clear();
        draws.resize(rows, Draw::default());
        let bytes: &mut [u8] = bytemuck::cast_slice_mut(draws);
        stream.memcpy_dtoh(&self.draws.slice(..bytes.len()), bytes).map_err(CudaError::driver("copy the draws"))?;
        stream.synchronize().map_err(CudaError::driver("run the fused kernel"))
    }
}

/// Copies a weight to the GPU in rows of `row_stride` elements, in its own type or in the first of bf16 and f16 that
/// holds every value.
fn upload(
    weight: &Matrix<'_>,
    row_stride: usize,
    stream: &Arc<CudaStream>,
) -> Result<(DType, CudaSlice<u8>), CudaError> {
    let failed = CudaError::driver("copy the weight to the GPU");
    let candidates = if weight.dtype() == DType::F16 { [DType::F16, DType::BF16] } else { [DType::BF16, DType::F16] };
    let mut row = 0;
    for dtype in candidates {
        let bytes = row_stride * dtype.size();
        let mut to = stream.alloc_zeros::<u8>(weight.rows() * bytes).map_err(&failed)?;
        let rows_of_part = (PART / bytes).max(1);
        let mut part = Vec::with_capacity(rows_of_part.min(weight.rows()) * bytes);
        let mut first = 0;
        let inexact = loop {
            let last = (first + rows_of_part).min(weight.rows());
            part.clear();
            let bad = (first..last).find(|&row| !append_row(weight, row, dtype, row_stride, &mut part));
            if bad.is_some() || first == last {
                break bad;
            }
            stream.memcpy_htod(&part, &mut to.slice_mut(first * bytes..last * bytes)).map_err(&failed)?;
            stream.synchronize().map_err(&failed)?;
            first = last;
        };
        match inexact {
            None => return Ok((dtype, to)),
            Some(bad) => row = bad,
        }
    }
    Err(CudaError::Inexact { what: "weight", row, dtype: DType::F16 })
}

/// The row's result of the kernel, as core says it.
fn candidate(draw: &Draw) -> Result<Candidate, RowError> {
    match draw.status {
        status::DRAWN => Ok(Candidate { winner: Winner::new(draw.score, draw.token), logit: draw.logit }),
        status::NAN => Err(RowError::NaN { token: draw.token }),
        status::POSITIVE_INFINITY => Err(RowError::PositiveInfinity { token: draw.token }),
        _ => Err(RowError::NoFiniteLogit),
    }
}

impl CudaTiled<'_> {
    /// Makes every draw of `work`, in its order.
    fn draw(&mut self, input: &Matrix<'_>, rows: &[RowParams<'_>]) -> Result<(), CudaError> {
        self.results.clear();
        let (can, vocab_size) = (self.capabilities(), self.head.vocab_size());
        let Some(on_device) = &mut self.on_device else {
            let nothing = Draw { status: status::NO_FINITE_LOGIT, ..Draw::default() };
            self.results.resize(self.work.len(), nothing);
            return Ok(());
        };
        for part in self.work.chunks(on_device.most) {
            self.staging.clear();
            let mut checked = None;
            for &(r, draw) in part {
                let (dtype, stride) = (on_device.dtype, on_device.row_stride);
                if !append_row(input, r, dtype, stride, self.staging.hidden()) {
                    return Err(CudaError::Inexact { what: "hidden states", row: r, dtype });
                }
                let row = match checked {
                    Some((checked_row, row)) if checked_row == r => row,
                    _ => rows[r].check(&can, &self.plan, vocab_size).expect("rows of the work were checked"),
                };
                checked = Some((r, row));
                self.staging.push(rows[r].seed, rows[r].position, &row, draw, vocab_size);
            }
            on_device.run(&mut self.staging, input.cols(), &mut self.draws, &self.stream)?;
            self.results.extend_from_slice(&self.draws);
        }
        Ok(())
    }
}

impl PerturbedArgmax for CudaTiled<'_> {
    fn capabilities(&self) -> Capabilities {
        Capabilities {
            backend: BACKEND,
            variant: Variant::Tiled,
            exactness: Exactness::Pathwise,
            input: Input::Hidden,
            without_replacement: false,
            filters: false,
            penalties: false,
            canonical: false,
        }
    }

    fn shape(&self) -> Shape {
        Shape { tokens: self.head.tokens(), vocab_size: self.head.vocab_size(), input: self.head.hidden() }
    }

    fn plan(&self) -> Plan {
        self.plan
    }

    fn sample(&mut self, input: Matrix<'_>, rows: &[RowParams<'_>], out: &mut Samples) -> Result<(), SampleError> {
        check_call(&input, rows, &self.shape(), &self.plan)?;
        out.clear();
        let (can, vocab_size) = (self.capabilities(), self.head.vocab_size());
        self.work.clear();
        for (r, params) in rows.iter().enumerate() {
            if let Ok(row) = params.check(&can, &self.plan, vocab_size) {
                self.work.extend((row.first_draw..row.first_draw + row.draws).map(|draw| (r, draw)));
            }
        }
        let failed = |error| SampleError::Backend { backend: BACKEND, source: Box::new(error) };
        self.draw(&input, rows).map_err(failed)?;
        let mut results = self.results.as_slice();
        for params in rows {
            let draws = params.check(&can, &self.plan, vocab_size).map(|row| {
                let (draws, rest) = results.split_at(row.draws as usize);
                results = rest;
                draws
            });
            let outcome = draws.and_then(|draws| {
                draws.iter().try_for_each(|draw| candidate(draw).map(drop))?;
                out.push_row(draws.iter().flat_map(candidate), None, &[]);
                Ok(())
            });
            if let Err(error) = outcome {
                out.push_error(error);
            }
        }
        Ok(())
    }
}
