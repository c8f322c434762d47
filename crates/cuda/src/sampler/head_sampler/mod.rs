//! The sampler of a head on a GPU, for all variants, and for weight and hidden states on the host or on the device.
//!
//! `kernels` has the kernels with the memory of a launch, `inputs` copies its inputs, `hidden_states` is the input of a
//! call, `launch_plan` selects the draws of each launch, `source` makes the launches of a pass, and `sharded` makes
//! those of ranks. `enqueue` and `enqueue_sharded` enqueue calls that do not wait, with parameters in device memory, on
//! one GPU and on ranks, whose calls have marks (`call_mark`). `fallback` counts the draws that read the weight in
//! spite of a shadow. `uploaded_weight` copies a weight from the host.

mod call_mark;
mod enqueue;
mod enqueue_sharded;
mod fallback;
mod hidden_states;
mod inputs;
mod kernels;
mod launch_plan;
mod sharded;
mod source;
mod uploaded_weight;

use crate::device::{Device, DeviceHead, DeviceMatrix, GroupRule, KernelChoice, Queue, RowColumnKernels, wait};
use crate::error::CudaError;
use crate::sampler::{DeviceHidden, PassPlace, RowScan, SourcePass, Staging, check_device_call, check_plan};
use core::mem::take;
use cudarc::driver::CudaStream;
use enqueue_sharded::GatheredKernels;
use flash_sampling_core::backend::{Batch, Driver, Request, RowSummary, Scan, ScoreBound, check_call, check_scan};
use flash_sampling_core::{
    Capabilities, DType, Description, Head, HeadError, Knobs, Matrix, Plan, RowParams, SampleError, Samples, Shape,
};
use hidden_states::HiddenStates;
use kernels::HeadKernels;
pub(super) use kernels::max_launch_draws;
use source::{CanonicalBounds, HeadSource, LaunchRows};
use std::sync::Arc;
use uploaded_weight::UploadedWeight;
pub(crate) use uploaded_weight::row_stride;

/// The capabilities of a sampler under its plan.
pub(crate) fn planned(can: Capabilities, plan: &Plan) -> Capabilities {
    // Canonical logits exist for near ties only.
    if plan.canonical { Capabilities { knobs: Knobs::ADJUSTMENTS, ..can } } else { can }
}

/// Draws by a head on a GPU. The public samplers wrap this value.
#[derive(Debug)]
pub(crate) struct HeadSampler<'w> {
    pub(super) description: Description,
    /// The type of the weight.
    dtype: DType,
    pub(super) device: Arc<Device>,
    stream: Arc<CudaStream>,
    /// `None` for a head without tokens.
    kernels: Option<HeadKernels>,
    /// For calls whose parameters are in device memory, once prepared.
    columns: Option<RowColumnKernels>,
    /// For such calls of ranks with filters, log-probabilities or kept tokens, once prepared.
    gathered: Option<GatheredKernels>,
    rows: LaunchRows,
    driver: Driver,
    scan: RowScan,
    canonical: Option<CanonicalBounds<'w>>,
    /// Hidden states that replace the input of calls.
    hidden: Option<DeviceHidden>,
}

/// Hidden states on the device, for a call that draws on `queue`; and whether they are complete for other streams.
#[derive(Debug)]
pub(super) struct DeviceCall<'s> {
    pub(super) hidden: DeviceMatrix,
    pub(super) queue: Queue<'s>,
    pub(super) is_ready: bool,
}

impl<'w> HeadSampler<'w> {
    /// Checks the plan, copies the weight, compiles and loads the kernels. `groups` has the tokens of a group and the
    /// rule of its draw; without groups, the tiled kernel draws.
    pub(crate) fn new(
        head: Head<'w>,
        plan: Plan,
        can: Capabilities,
        device: &Arc<Device>,
        choice: KernelChoice,
        groups: Option<(u32, GroupRule)>,
    ) -> Result<Self, CudaError> {
        check_plan(&plan, can.canonical)?;
        let stream = device.stream()?;
        let kernels = match head.tokens().is_empty() {
            true => None,
            false => {
                let (uploaded, on_device) = UploadedWeight::new(&head, device, &stream)?;
                let mut kernels = HeadKernels::new(on_device, true, &plan, (choice, groups), device, &stream)?;
                kernels.uploaded = Some(uploaded);
                Some(kernels)
            }
        };
        let description = Description { capabilities: planned(can, &plan), shape: Shape::of(&head), plan };
        let bounds = || CanonicalBounds { head, bounds: ScoreBound::new(&head), hidden: Vec::new() };
        let canonical = plan.canonical.then(bounds);
        HeadSampler::of((description, head.weight().dtype()), device, stream, kernels, canonical)
    }

    /// Checks the plan, compiles and loads the kernels for a weight in device memory, which is not copied.
    pub(crate) fn in_place(
        head: DeviceHead,
        vocab_size: u32,
        plan: Plan,
        can: Capabilities,
        device: &Arc<Device>,
    ) -> Result<Self, CudaError> {
        check_plan(&plan, false)?;
        head.weight.check_weight()?;
        let stream = device.stream()?;
        let choice = (KernelChoice::default(), None);
        let kernels = match head.weight.rows {
            0 => None,
            _ => Some(HeadKernels::new(head, false, &plan, choice, device, &stream)?),
        };
        let tokens = kernels.as_ref().map_or(head.first_token..head.first_token, HeadKernels::tokens);
        if vocab_size < tokens.end {
            let (vocab_start, vocab_end) = (tokens.start as usize, tokens.end as usize);
            return Err(HeadError::Vocab { vocab_size: vocab_size as usize, vocab_start, vocab_end }.into());
        }
        let shape = Shape { tokens, vocab_size, input: head.weight.cols };
        let description = Description { capabilities: can, shape, plan };
        HeadSampler::of((description, head.weight.dtype), device, stream, kernels, None)
    }

    fn of(
        (mut description, dtype): (Description, DType),
        device: &Arc<Device>,
        stream: Arc<CudaStream>,
        kernels: Option<HeadKernels>,
        canonical: Option<CanonicalBounds<'w>>,
    ) -> Result<Self, CudaError> {
        let shape = &description.shape;
        let rows = LaunchRows::new(Staging::locked(shape.tokens.clone(), shape.vocab_size, &stream)?);
        let (device, driver, scan) = (device.clone(), Driver::default(), RowScan::default());
        let (columns, gathered, hidden) = (None, None, None);
        description.capabilities.shadow =
            !description.plan.canonical && kernels.as_ref().is_some_and(HeadKernels::has_shadow);
        Ok(HeadSampler {
            description,
            dtype,
            device,
            stream,
            kernels,
            columns,
            gathered,
            rows,
            driver,
            scan,
            canonical,
            hidden,
        })
    }

    pub(crate) fn replan(&mut self, max_rows: usize) -> Result<(), SampleError> {
        let before = self.description.plan;
        let plan = Plan { max_rows, ..before };
        check_plan(&plan, true)?;
        if let Some(kernels) = &mut self.kernels {
            kernels.replan(&plan, &self.stream)?;
        }
        if max_launch_draws(&plan) != max_launch_draws(&before) {
            (self.columns, self.gathered) = (None, None);
        }
        (self.scan, self.description.plan) = (RowScan::default(), plan);
        Ok(())
    }

    /// Waits for launches that may be in progress after an error.
    pub(super) fn wait(&self) {
        wait(self.stream.context(), || self.stream.synchronize());
    }

    pub(crate) fn sample(
        &mut self,
        input: Matrix<'_>,
        rows: &[RowParams<'_>],
        out: &mut Samples,
    ) -> Result<(), SampleError> {
        out.clear();
        check_call(&input, rows, &self.description.shape, &self.description.plan)?;
        self.draw(None, input, rows, out)
    }

    /// Draws for hidden states on the device. Launches may be in progress after an error.
    pub(super) fn sample_on(
        &mut self,
        call: DeviceCall<'_>,
        rows: &[RowParams<'_>],
        out: &mut Samples,
    ) -> Result<(), SampleError> {
        out.clear();
        let input = check_device_call(&call.hidden, rows.len(), &self.description)?;
        self.draw(Some(call), input, rows, out)
    }

    fn draw(
        &mut self,
        call: Option<DeviceCall<'_>>,
        input: Matrix<'_>,
        rows: &[RowParams<'_>],
        out: &mut Samples,
    ) -> Result<(), SampleError> {
        let (of, mut driver) = (self.description.clone(), take(&mut self.driver));
        let mut pass = HeadPass { sampler: self, finishes_log_z: call.is_some(), call };
        let sampled = driver.sample(&mut pass, &of, input, rows, out);
        self.driver = driver;
        sampled
    }
}

impl Scan for HeadSampler<'_> {
    fn scan(
        &mut self,
        batch: &Batch<'_, '_>,
        requests: &[Request<'_>],
        out: &mut [RowSummary],
    ) -> Result<(), SampleError> {
        check_scan(batch, requests, out, &self.description.shape, &self.description.plan)?;
        // The results may be those of a shard, whose masses are merged.
        HeadPass { sampler: self, call: None, finishes_log_z: false }.scan(batch, requests, out)
    }
}

/// The passes of a call. Without a [`DeviceCall`], the input may be replaced by hidden states on the device.
#[derive(Debug)]
struct HeadPass<'s, 'c, 'w> {
    sampler: &'s mut HeadSampler<'w>,
    call: Option<DeviceCall<'c>>,
    finishes_log_z: bool,
}

impl Scan for HeadPass<'_, '_, '_> {
    fn scan(
        &mut self,
        batch: &Batch<'_, '_>,
        requests: &[Request<'_>],
        out: &mut [RowSummary],
    ) -> Result<(), SampleError> {
        let HeadSampler { description, device, stream, kernels, rows, scan, canonical, hidden, .. } =
            &mut *self.sampler;
        let (first, finishes_log_z) = (description.shape.tokens.start, self.finishes_log_z);
        let Some(kernels) = kernels else {
            for ((row, request), out) in batch.rows.iter().zip(requests).zip(out) {
                if let (Ok(row), false) = (row, *request == Request::Skip) {
                    out.of(row, *request, first, &[]);
                    out.of_raw(row, *request, first, &[]);
                }
            }
            return Ok(());
        };
        let mut is_complete = true;
        let (hidden, queue, is_ready) = match &mut self.call {
            Some(DeviceCall { hidden, queue, is_ready }) => (HiddenStates::Device(*hidden), *queue, is_ready),
            None => (HiddenStates::of(&batch.input, hidden.as_ref())?, HeadKernels::queue(stream), &mut is_complete),
        };
        let canonical = canonical.as_mut();
        let source = HeadSource { kernels, rows, hidden, queue, stream, is_ready, canonical };
        let place = PassPlace { of: description, device, stream, finishes_log_z };
        SourcePass { source, place, scan }.scan(batch, requests, out)
    }
}
