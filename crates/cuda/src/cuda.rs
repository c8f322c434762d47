//! The sampler, which nobody can have yet.

use crate::error::CudaError;
use crate::probe::Probe;
use core::convert::Infallible;
use core::marker::PhantomData;
use flash_sampling_core::{Capabilities, Head, Matrix, PerturbedArgmax, Plan, RowParams, SampleError, Samples, Shape};

/// A sampler on a CUDA device. No value of this type exists in a build without kernels, which this one is.
#[derive(Debug)]
pub struct Cuda<'w> {
    never: Infallible,
    head: PhantomData<Head<'w>>,
}

impl<'w> Cuda<'w> {
    /// A sampler for a head, weight `[vocab, hidden]`.
    ///
    /// # Errors
    /// [`CudaError::Unavailable`], always: this build contains no kernels.
    pub fn new(_head: Head<'w>, _plan: Plan) -> Result<Self, CudaError> {
        Err(CudaError::Unavailable { probe: Probe::of_this_machine() })
    }
}

impl PerturbedArgmax for Cuda<'_> {
    fn capabilities(&self) -> Capabilities {
        match self.never {}
    }

    fn shape(&self) -> Shape {
        match self.never {}
    }

    fn plan(&self) -> Plan {
        match self.never {}
    }

    fn sample(&mut self, _: Matrix<'_>, _: &[RowParams<'_>], _: &mut Samples) -> Result<(), SampleError> {
        match self.never {}
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_answer_is_unavailable_and_says_why() {
        let weight = [0f32; 4];
        let head = Head::new(Matrix::new(&weight, 2, 2).unwrap()).unwrap();
        let error = Cuda::new(head, Plan::default()).unwrap_err();
        let text = error.to_string();
        assert!(text.contains("no CUDA kernels") && text.contains("libcuda.so.1"), "{text}");
    }
}
