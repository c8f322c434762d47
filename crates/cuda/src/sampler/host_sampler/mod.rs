//! The samplers over host memory with a head on the GPU: a driver over passes whose inputs are uploaded.

mod sharded;
mod source;

use crate::abi::RowFilters;
use crate::device::gpu::Device;
use crate::device::row_features::KernelChoice;
use crate::device::select::GroupRule;
use crate::error::CudaError;
use crate::sampler::check_plan;
use crate::sampler::row_scan::{PassPlace, RowScan};
use crate::sampler::staging::Staging;
use crate::sampler::uploaded_head::UploadedHead;
use core::mem::take;
use cudarc::driver::CudaStream;
use flash_sampling_core::backend::{
    Adjustments, Batch, Driver, Request, RowSummary, Scan, ScoreBound, check_call, check_scan,
};
use flash_sampling_core::{Capabilities, Head, Knobs, Matrix, Plan, RowParams, SampleError, Samples, Shape};
use source::UploadedInputs;
use std::sync::Arc;

/// The capabilities of a sampler under its plan.
pub(crate) fn planned(can: Capabilities, plan: &Plan) -> Capabilities {
    // Canonical logits are known of near ties alone.
    if plan.canonical { Capabilities { knobs: Knobs::ADJUSTMENTS, ..can } } else { can }
}

/// A call from host memory to host memory, whatever the variant: the public samplers are this, with what they can do.
#[derive(Debug)]
pub(crate) struct HostSampler<'w> {
    head: Head<'w>,
    plan: Plan,
    can: Capabilities,
    stream: Arc<CudaStream>,
    /// `None` for a head without tokens.
    uploaded: Option<UploadedHead>,
    staging: Staging,
    adjustments: Adjustments,
    driver: Driver,
    scan: RowScan,
    /// In a canonical plan; and a hidden state.
    error_bounds: Option<ScoreBound>,
    hidden: Vec<f32>,
    /// Of the rows of a launch.
    filters: Vec<RowFilters>,
}

impl<'w> HostSampler<'w> {
    /// Checks the plan, copies the weight, compiles and loads the kernels. Without `groups`, tokens of a group and how they
    /// draw, the draws are the tiled kernel's.
    pub(crate) fn new(
        head: Head<'w>,
        plan: Plan,
        can: Capabilities,
        device: &Arc<Device>,
        choice: KernelChoice,
        groups: Option<(u32, GroupRule)>,
    ) -> Result<Self, CudaError> {
        check_plan(&plan, can.canonical)?;
        let can = planned(can, &plan);
        let stream = device.stream()?;
        let uploaded = match head.tokens().is_empty() {
            true => None,
            false => Some(UploadedHead::new(&head, &plan, device, choice, groups, &stream)?),
        };
        Ok(HostSampler {
            staging: Staging::locked(head.tokens(), head.vocab_size(), &stream)?,
            head,
            plan,
            can,
            stream,
            uploaded,
            adjustments: Adjustments::default(),
            driver: Driver::default(),
            scan: RowScan::default(),
            error_bounds: plan.canonical.then(|| ScoreBound::new(&head)),
            hidden: Vec::new(),
            filters: Vec::new(),
        })
    }

    /// Makes room for lists and masks of as many bytes.
    pub(crate) fn reserve_lists(&mut self, bytes: usize) -> Result<(), CudaError> {
        self.staging.reserve(bytes)?;
        self.uploaded.as_mut().map_or(Ok(()), |uploaded| uploaded.reserve_lists(bytes, &self.stream))
    }

    pub(crate) fn capabilities(&self) -> Capabilities {
        self.can
    }

    pub(crate) fn shape(&self) -> Shape {
        Shape { tokens: self.head.tokens(), vocab_size: self.head.vocab_size(), input: self.head.hidden() }
    }

    pub(crate) fn plan(&self) -> Plan {
        self.plan
    }

    pub(crate) fn replan(&mut self, max_rows: usize) -> Result<(), SampleError> {
        let plan = Plan { max_rows, ..self.plan };
        check_plan(&plan, true)?;
        if let Some(uploaded) = &mut self.uploaded {
            uploaded.replan(&plan, &self.stream)?;
        }
        (self.scan, self.plan) = (RowScan::default(), plan);
        Ok(())
    }

    pub(crate) fn sample(
        &mut self,
        input: Matrix<'_>,
        rows: &[RowParams<'_>],
        out: &mut Samples,
    ) -> Result<(), SampleError> {
        out.clear();
        check_call(&input, rows, &self.shape(), &self.plan)?;
        let (can, plan, vocab_size) = (self.can, self.plan, self.head.vocab_size());
        let mut driver = take(&mut self.driver);
        let sampled = driver.sample(self, (&can, &plan, vocab_size), input, rows, out);
        self.driver = driver;
        sampled
    }
}

impl Scan for HostSampler<'_> {
    fn scan(
        &mut self,
        batch: &Batch<'_, '_>,
        requests: &[Request<'_>],
        out: &mut [RowSummary],
    ) -> Result<(), SampleError> {
        check_scan(batch, requests, out, &self.shape(), &self.plan)?;
        let HostSampler { head, plan, can, stream, uploaded, staging, adjustments, scan, error_bounds, .. } = self;
        let (hidden, filters) = (&mut self.hidden, &mut self.filters);
        let (tokens, vocab_size) = (head.tokens(), head.vocab_size());
        let Some(uploaded) = uploaded else {
            for ((row, request), out) in batch.rows.iter().zip(requests).zip(out) {
                if let (Ok(row), false) = (row, *request == Request::Skip) {
                    out.of(row, *request, tokens.start, &[]);
                    out.of_raw(row, *request, tokens.start, &[]);
                }
            }
            return Ok(());
        };
        let device = &uploaded.device().clone();
        // Its results may be those of a shard, whose masses are merged.
        let place = PassPlace { can, plan, tokens, vocab_size, device, stream, finishes_log_z: false };
        let mut source = UploadedInputs { head, uploaded, staging, adjustments, stream, error_bounds, hidden, filters };
        Ok(scan.scan(&mut source, &place, batch, requests, out)?)
    }
}

/// An error of a launch, which counts its own draws, as one of the call; `row_of` tells the row of a draw.
fn of_call(error: CudaError, row_of: impl Fn(usize) -> usize) -> CudaError {
    match error {
        CudaError::OtherCall { rank, row: Some(at) } => CudaError::OtherCall { rank, row: Some(row_of(at)) },
        error => error,
    }
}
