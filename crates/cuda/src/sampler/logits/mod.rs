//! The standalone sampler over logits in host memory (paper Alg. I.1).

mod source;

use crate::device::gpu::Device;
use crate::device::noise_math::NoiseMath;
use crate::error::CudaError;
use crate::sampler::check_plan;
use crate::sampler::row_scan::{PassPlace, RowScan, SourcePass};
use crate::sampler::tiled::FILTERS_TOO;
use cudarc::driver::CudaStream;
use flash_sampling_core::backend::{Driver, check_call};
use flash_sampling_core::{
    Capabilities, Exactness, Input, Matrix, PerturbedArgmax, Plan, RowParams, SampleError, Samples, Shape, Variant,
};
use source::{CopiedLogits, LogitDraws};
use std::sync::Arc;

/// The maximum number of draws of a launch.
const MAX_DRAWS: usize = 4096;

/// A sampler over existing logits in host memory, `[rows, vocab]` in bf16, f16 or f32, on a GPU (paper Alg. I.1).
///
/// It is exact pathwise, with the same draws as [`CudaTiled`](crate::CudaTiled) on the same logits.
///
/// A call copies the logits to the GPU, draws, copies the draws to the host, and waits. Copies take most of the time.
/// For logits on the GPU, see [`DeviceStandalone`](crate::DeviceStandalone). GPU memory grows to the largest call.
#[derive(Debug)]
pub struct CudaStandalone {
    vocab_size: u32,
    plan: Plan,
    device: Arc<Device>,
    stream: Arc<CudaStream>,
    kernels: LogitDraws,
    driver: Driver,
    scan: RowScan,
}

impl CudaStandalone {
    /// Plans a sampler for logits of `vocab_size` columns.
    ///
    /// # Errors
    /// * [`CudaError::Unsupported`]: [`Plan::canonical`], since the sampler does not compute the logits.
    /// * [`CudaError::EmptyPlan`]: the plan has no rows or no draws.
    /// * [`CudaError::Layout`], [`CudaError::TooLarge`]: `vocab_size` is zero or above 2^31.
    /// * [`CudaError::Compile`], [`CudaError::Driver`].
    pub fn new(vocab_size: usize, plan: Plan, device: &Arc<Device>) -> Result<Self, CudaError> {
        CudaStandalone::with_math(vocab_size, plan, device, NoiseMath::Exact)
    }

    /// [`CudaStandalone::new`] with a choice of math, which [`Capabilities::backend`] names.
    ///
    /// Rows with log-probabilities, draws without replacement or filters always use exact math.
    ///
    /// # Errors
    /// As [`CudaStandalone::new`].
    pub fn with_math(vocab_size: usize, plan: Plan, device: &Arc<Device>, math: NoiseMath) -> Result<Self, CudaError> {
        check_plan(&plan, false)?;
        CudaError::check_limits(&[("tokens", vocab_size, 1 << 31)])?;
        let stream = device.stream()?;
        let kernels = LogitDraws::new(vocab_size as u32, math, device, &stream)?;
        let (device, driver, scan) = (device.clone(), Driver::default(), RowScan::default());
        Ok(CudaStandalone { vocab_size: vocab_size as u32, plan, device, stream, kernels, driver, scan })
    }
}

impl PerturbedArgmax for CudaStandalone {
    fn capabilities(&self) -> Capabilities {
        Capabilities {
            backend: match self.kernels.math() {
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
        let (can, plan, vocab_size) = (self.capabilities(), self.plan, self.vocab_size);
        let CudaStandalone { device, stream, kernels, driver, scan, .. } = self;
        let logits = kernels.copy_logits(&input, stream)?;
        let (can, plan, tokens, finishes_log_z) = (&can, &plan, 0..vocab_size, false);
        let place = PassPlace { can, plan, tokens, vocab_size, device, stream, finishes_log_z };
        let mut pass = SourcePass { source: CopiedLogits { kernels, logits, stream, device }, place, scan };
        driver.sample(&mut pass, (can, plan, vocab_size), input, rows, out)
    }

    fn replan(&mut self, max_rows: usize) -> Result<(), SampleError> {
        let plan = Plan { max_rows, ..self.plan };
        check_plan(&plan, false)?;
        (self.scan, self.plan) = (RowScan::default(), plan);
        Ok(())
    }
}
