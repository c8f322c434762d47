//! The sampler over existing logits on a GPU: logits in the caller's device memory, or logits copied from the host.
//!
//! `kernels` has the kernels with the memory of their launches. `source` launches the passes of calls that wait.
//! `columns` enqueues calls that do not wait, whose parameters are in device memory.

mod enqueue;
mod kernels;
mod source;

use crate::device::{Device, DeviceMatrix, RowColumnKernels, wait};
use crate::error::CudaError;
use crate::sampler::tiled::FILTERS_TOO;
use crate::sampler::{PassPlace, RowScan, SourcePass, check_device_call, check_plan};
use cudarc::driver::CudaStream;
use cudarc::driver::sys::CUstreamCaptureStatus;
use flash_sampling_core::backend::Driver;
use flash_sampling_core::{
    Capabilities, Description, Exactness, Input, Matrix, Plan, RowParams, SampleError, Samples, Shape, Variant,
};
use kernels::LogitKernels;
use source::ExistingLogits;
use std::sync::Arc;

/// Draws from existing logits on a GPU. The public samplers wrap this value.
#[derive(Debug)]
pub(crate) struct LogitSampler {
    description: Description,
    device: Arc<Device>,
    stream: Arc<CudaStream>,
    kernels: LogitKernels,
    /// The kernels of calls with parameters in device memory, made at first use.
    columns: Option<RowColumnKernels>,
    driver: Driver,
    scan: RowScan,
}

impl LogitSampler {
    /// Checks the plan, and compiles and loads the kernels for float32 logits of `vocab_size` columns. The first call
    /// with logits of another type loads the kernel for this type.
    pub(crate) fn new(vocab_size: usize, plan: Plan, device: &Arc<Device>) -> Result<Self, CudaError> {
        check_plan(&plan, false)?;
        CudaError::check_limits(&[("tokens", vocab_size, 1 << 31)])?;
        let stream = device.stream()?;
        let kernels = LogitKernels::new(vocab_size as u32, &plan, device, &stream)?;
        let capabilities = Capabilities {
            backend: "cuda",
            variant: Variant::Standalone,
            exactness: Exactness::Pathwise,
            input: Input::Logits,
            without_replacement: true,
            knobs: FILTERS_TOO,
            canonical: false,
            shadow: false,
        };
        let description = Description { capabilities, shape: Shape::whole(vocab_size as u32, vocab_size), plan };
        let (device, columns, driver, scan) = (device.clone(), None, Driver::default(), RowScan::default());
        Ok(LogitSampler { description, device, stream, kernels, columns, driver, scan })
    }

    pub(crate) fn description(&self) -> &Description {
        &self.description
    }

    pub(crate) fn device(&self) -> &Arc<Device> {
        &self.device
    }

    /// The sampler's own stream.
    pub(crate) fn stream(&self) -> &Arc<CudaStream> {
        &self.stream
    }

    pub(crate) fn replan(&mut self, max_rows: usize) -> Result<(), CudaError> {
        let plan = Plan { max_rows, ..self.description.plan };
        check_plan(&plan, false)?;
        self.kernels.replan(&plan);
        (self.columns, self.scan, self.description.plan) = (None, RowScan::default(), plan);
        Ok(())
    }

    /// Waits for all launches on the sampler's own stream, which may be in progress after an error.
    pub(crate) fn wait(&self) {
        wait(self.stream.context(), || self.stream.synchronize());
    }

    /// Draws from checked logits, which earlier work on the sampler's own stream wrote, and waits. `input` states the
    /// number of columns; its rows are not read.
    pub(crate) fn sample(
        &mut self,
        logits: DeviceMatrix,
        input: Matrix<'_>,
        rows: &[RowParams<'_>],
        out: &mut Samples,
    ) -> Result<(), SampleError> {
        let LogitSampler { description: of, device, stream, kernels, driver, scan, .. } = self;
        let place = PassPlace { of, device, stream, finishes_log_z: false };
        let mut pass = SourcePass { source: ExistingLogits { kernels, logits, stream }, place, scan };
        driver.sample(&mut pass, of, input, rows, out)
    }

    /// Draws from logits of the caller after all prior work on `stream`, and waits. After an error, launches may be in
    /// progress.
    pub(crate) fn sample_on(
        &mut self,
        stream: &CudaStream,
        logits: &DeviceMatrix,
        rows: &[RowParams<'_>],
        out: &mut Samples,
    ) -> Result<(), SampleError> {
        out.clear();
        let input = check_device_call(logits, rows.len(), &self.description)?;
        logits.check("logits")?;
        let failed = CudaError::driver("wait for the logits");
        // The sampler's own stream would take part in the capture.
        let status = stream.capture_status().map_err(&failed)?;
        if status != CUstreamCaptureStatus::CU_STREAM_CAPTURE_STATUS_NONE {
            return Err(CudaError::Layout { what: "logits", reason: "their stream is capturing a graph" }.into());
        }
        self.stream.join(stream).map_err(failed)?;
        self.sample(*logits, input, rows, out)
    }
}
