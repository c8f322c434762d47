//! The tiled variant over device memory with core's parameters and results: for an engine whose weight and hidden states
//! are on the GPU already.
#![allow(unsafe_code)]

mod source;

use crate::abi::{Draw, Row};
use crate::device::fused_hopper::MAX_ROWS;
use crate::device::gpu::Device;
use crate::device::head::DeviceHead;
use crate::device::launch::Queue;
use crate::device::matrix::DeviceMatrix;
use crate::device::row_features::KernelChoice;
use crate::device::scratch::{Scratch, wait};
use crate::device::tiled::DeviceTiled;
use crate::error::CudaError;
use crate::sampler::check_plan;
use crate::sampler::row_scan::{PassPlace, RowScan, SourcePass};
use crate::sampler::staging::Staging;
use crate::sampler::tiled::CudaTiled;
use cudarc::driver::CudaStream;
use flash_sampling_core::backend::Driver;
use flash_sampling_core::{Capabilities, DType, HeadError, Matrix, Plan, RowParams, SampleError, Samples, Shape};
use source::{DeviceInputs, DeviceLaunches};
use std::sync::Arc;

/// Draws for hidden states in device memory by a weight in device memory, neither of which is copied, with the parameters and
/// results of [`PerturbedArgmax`](flash_sampling_core::PerturbedArgmax). Exact pathwise; the draws are those of
/// [`CudaTiled`].
///
/// A call launches on the caller's stream, once for every 256 rows and again for every further draw of a row, and waits for the
/// results once. The GPU decides min-p, top-k and top-p ([`DeviceFilters`](crate::DeviceFilters)): on Hopper from lists of the largest logits where
/// the filters of a row are [listed](crate::abi::RowFilters::is_listed), else from stored logits; the few rows whose list does not
/// decide are launched once more. The first call with filters allocates the memory for either, and the first of each kind
/// loads kernels. Rows with log-probabilities, draws without replacement, or filters beyond min-p, top-k and top-p are drawn
/// from stored logits, as [`CudaTiled`] draws them. For calls that wait for nothing there is [`DeviceTiled`].
#[derive(Debug)]
pub struct DeviceSampler {
    launches: DeviceLaunches,
    shape: Shape,
    plan: Plan,
    device: Arc<Device>,
    /// For stored logits, beside the stream of a call.
    own: Arc<CudaStream>,
    driver: Driver,
    scan: RowScan,
}

impl DeviceSampler {
    /// Plans for a head of a vocabulary of `vocab_size` tokens, compiles and loads the kernels. The weight is read where it
    /// lies.
    ///
    /// # Errors
    /// * [`CudaError::Unsupported`]: [`Plan::canonical`], which needs the weight on the host.
    /// * [`CudaError::EmptyPlan`]: the plan has no rows or no draws.
    /// * [`CudaError::Head`] also where `vocab_size` is smaller than the head's last token.
    /// * Those of [`DeviceTiled::new`].
    ///
    /// # Safety
    /// The head's weight and bias are device memory of this device, of the stated sizes, and stay so as long as this value
    /// is used; nothing writes to them during a call.
    pub unsafe fn new(head: DeviceHead, vocab_size: u32, plan: Plan, device: &Arc<Device>) -> Result<Self, CudaError> {
        check_plan(&plan, false)?;
        let most = plan.max_rows.min(MAX_ROWS);
        let fused = DeviceTiled::plan(head, most, device, KernelChoice::default())?;
        let tokens = fused.tokens();
        if vocab_size < tokens.end {
            let (vocab_start, vocab_end) = (tokens.start as usize, tokens.end as usize);
            return Err(HeadError::Vocab { vocab_size: vocab_size as usize, vocab_start, vocab_end }.into());
        }
        let shape = Shape { tokens, vocab_size, input: head.weight.cols };
        let launches = DeviceLaunches {
            fused,
            selection: None,
            weight_rows: head.weight.rows,
            most,
            staging: Staging::of(shape.tokens.clone(), vocab_size),
            adjustments: Default::default(),
            inputs: Scratch::new(most * size_of::<Row>() + 16, &[], device)?,
            draws: Scratch::new(most * size_of::<Draw>(), &[], device)?,
            filters: Vec::new(),
            slots: Vec::new(),
            plans: Vec::new(),
            results: Vec::new(),
            device: device.clone(),
        };
        let (device, own) = (device.clone(), device.stream()?);
        Ok(DeviceSampler { launches, shape, plan, device, own, driver: Driver::default(), scan: RowScan::default() })
    }

    /// What it can do.
    pub fn capabilities(&self) -> Capabilities {
        Capabilities { canonical: false, ..CudaTiled::CAPABILITIES }
    }

    /// The size of its head.
    pub fn shape(&self) -> Shape {
        self.shape.clone()
    }

    /// What it was planned for.
    pub fn plan(&self) -> Plan {
        self.plan
    }

    /// Draws for `hidden [rows, hidden]` with one [`RowParams`] a row, after all that was enqueued on `stream`, and waits.
    ///
    /// # Errors
    /// * Those of [`PerturbedArgmax::sample`](flash_sampling_core::PerturbedArgmax::sample); what concerns one row only is
    ///   that row's error in `out`.
    /// * [`SampleError::Backend`] with a [`CudaError`] also for hidden states whose layout cannot be read.
    ///
    /// # Safety
    /// * `hidden` is device memory of this device, of the stated size, and nothing writes to it during the call, but for
    ///   what was enqueued on `stream` before.
    /// * `stream` is of this device, and captures nothing.
    pub unsafe fn sample(
        &mut self,
        stream: &CudaStream,
        hidden: &DeviceMatrix,
        rows: &[RowParams<'_>],
        out: &mut Samples,
    ) -> Result<(), SampleError> {
        out.clear();
        if hidden.cols != self.shape.input {
            return Err(SampleError::Hidden { found: hidden.cols, expected: self.shape.input });
        }
        if hidden.rows != rows.len() {
            return Err(SampleError::RowCount { rows: hidden.rows, params: rows.len() });
        }
        if rows.len() > self.plan.max_rows {
            return Err(SampleError::TooManyRows { rows: rows.len(), max_rows: self.plan.max_rows });
        }
        // A thread may have no current context.
        let bound = self.device.context().bind_to_thread();
        bound.map_err(CudaError::driver("use the GPU on this thread"))?;
        let (can, plan, vocab_size) = (self.capabilities(), self.plan, self.shape.vocab_size);
        // The hidden states are not on the host.
        let input = Matrix::from_bytes(&[], DType::F32, 0, hidden.cols, hidden.cols);
        let input = input.map_err(|source| SampleError::Backend { backend: "cuda", source: source.into() })?;
        let DeviceSampler { launches, shape, device, own, driver, scan, .. } = self;
        let (tokens, finishes_log_z) = (shape.tokens.clone(), true);
        let place = PassPlace { can: &can, plan: &plan, tokens, vocab_size, device, stream: own, finishes_log_z };
        // SAFETY: *Memory*: weight and bias by the contract of `new`, hidden states by that of this function; the rest is this
        // value's, sized before each launch. *Order*: one launch follows the other, and `own` joins `stream`; both are waited
        // for below. *Rows*: `Staging` makes them of checked parameters; checked greedy rows have no filters;
        // `RowFilters::of` bounds top-k.
        let (queue, own_queue) = unsafe { (Queue::new(stream), Queue::new(own)) };
        let source = DeviceInputs { launches, queue, hidden, own, own_queue, is_ready: false };
        let sampled =
            driver.sample(&mut SourcePass { source, place, scan }, (&can, &plan, vocab_size), input, rows, out);
        // What was launched before an error, and what was enqueued on the stream for a call without launches, reads or
        // writes the caller's memory.
        let waited = wait(stream.context(), || stream.synchronize());
        if sampled.is_err() || !waited {
            wait(own.context(), || own.synchronize());
        }
        sampled
    }
}
