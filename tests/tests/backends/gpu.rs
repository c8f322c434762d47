//! Factories of the CUDA backend.

use super::boxed;
use flash_sampling_conformance::factory::FromLogits;
use flash_sampling_conformance::{BuildError, SamplerFactory};
use flash_sampling_core::reference::ReferenceVariant;
use flash_sampling_core::{Head, PerturbedArgmax, Plan};
use flash_sampling_cuda::{CudaStandalone, CudaTiled, Device, NoiseMath};

/// A variant of the CUDA backend on the first GPU.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Gpu {
    Tiled,
    Standalone,
    /// With the GPU's own outer logarithm.
    StandaloneFast,
}

impl SamplerFactory for Gpu {
    fn name(&self) -> String {
        format!("cuda/{self:?}").to_lowercase()
    }

    fn unavailable(&self) -> Option<String> {
        Device::new(0).err().map(|error| error.to_string())
    }

    fn reference_variant(&self, _: &Head<'_>) -> Option<ReferenceVariant> {
        Some(ReferenceVariant::Tiled)
    }

    fn pace(&self) -> usize {
        8
    }

    fn build<'w>(&self, head: Head<'w>, plan: Plan) -> Result<Box<dyn PerturbedArgmax + 'w>, BuildError> {
        let device = Device::new(0).map_err(|e| BuildError(e.to_string()))?;
        match self {
            Gpu::Tiled => boxed(CudaTiled::new(head, plan, &device)),
            Gpu::Standalone | Gpu::StandaloneFast => {
                let math = if *self == Gpu::Standalone { NoiseMath::Exact } else { NoiseMath::Fast };
                let sampler = CudaStandalone::with_math(head.vocab_size() as usize, plan, &device, math);
                boxed(sampler.map(|sampler| FromLogits::new(head, sampler)))
            }
        }
    }
}
