//! The tiled variant over host memory (paper Alg. 1).

use crate::device::Device;
use crate::device_tiled::KernelChoice;
use crate::error::CudaError;
use crate::frame::Frame;
use flash_sampling_core::{
    Capabilities, Exactness, Head, Input, Matrix, PerturbedArgmax, Plan, RowParams, SampleError, Samples, Shape,
    Variant,
};
use std::sync::Arc;

/// Draws inside the matmul on a GPU, for inputs in host memory (paper Alg. 1). Exact pathwise.
///
/// The weight is copied to the GPU once. A call copies hidden states and row parameters up, launches once for every 256
/// draws, copies the draws down and waits. Bf16 and f16, the same type on both sides, are multiplied on tensor cores, other
/// types without them. Which of the two depends on the types alone, so that a row's bits do not depend on its
/// neighbours. Sums are in float32.
///
/// Rows that ask for log-probabilities are evaluated once more, and their logits are copied down.
/// Memory on the GPU grows when a call brings more masks and biases than any before it.
#[derive(Debug)]
pub struct CudaTiled<'w>(Frame<'w>);

impl<'w> CudaTiled<'w> {
    /// Plans a sampler: copies the weight, compiles and loads the kernels.
    ///
    /// # Errors
    /// * [`CudaError::Unsupported`]: the plan is canonical.
    /// * [`CudaError::EmptyPlan`]: the plan has no rows or no draws.
    /// * [`CudaError::Architecture`], [`CudaError::TooLarge`], [`CudaError::Compile`], [`CudaError::Driver`].
    pub fn new(head: Head<'w>, plan: Plan, device: &Arc<Device>) -> Result<Self, CudaError> {
        CudaTiled::with_kernels(head, plan, device, KernelChoice::default())
    }

    /// [`CudaTiled::new`] with a choice of kernels.
    ///
    /// # Errors
    /// As [`CudaTiled::new`].
    pub fn with_kernels(
        head: Head<'w>,
        plan: Plan,
        device: &Arc<Device>,
        choice: KernelChoice,
    ) -> Result<Self, CudaError> {
        let can = Capabilities {
            backend: "cuda",
            variant: Variant::Tiled,
            exactness: Exactness::Pathwise,
            input: Input::Hidden,
            without_replacement: false,
            filters: false,
            penalties: false,
            canonical: false,
        };
        Ok(CudaTiled(Frame::new(head, plan, can, device, choice)?))
    }
}

impl PerturbedArgmax for CudaTiled<'_> {
    fn capabilities(&self) -> Capabilities {
        self.0.capabilities()
    }

    fn shape(&self) -> Shape {
        self.0.shape()
    }

    fn plan(&self) -> Plan {
        self.0.plan()
    }

    fn sample(&mut self, input: Matrix<'_>, rows: &[RowParams<'_>], out: &mut Samples) -> Result<(), SampleError> {
        self.0.sample(input, rows, out)
    }
}
