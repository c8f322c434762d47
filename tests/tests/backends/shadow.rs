//! Runs any sampler over heads with a shadow.

use flash_sampling_conformance::{BuildError, SamplerFactory};
use flash_sampling_core::reference::ReferenceVariant;
use flash_sampling_core::{
    Description, Head, Matrix, PerturbedArgmax, Plan, RowParams, SampleError, Samples, ShadowBuffer,
};

/// Samplers of another factory, over heads with a shadow.
#[derive(Debug)]
pub(crate) struct WithShadow<F>(pub(crate) F);

impl<F: SamplerFactory> SamplerFactory for WithShadow<F> {
    fn name(&self) -> String {
        format!("{}/shadow", self.0.name())
    }

    fn unavailable(&self) -> Option<String> {
        self.0.unavailable()
    }

    fn reference_variant(&self, head: &Head<'_>) -> Option<ReferenceVariant> {
        self.0.reference_variant(head)
    }

    fn pace(&self) -> usize {
        self.0.pace()
    }

    fn takes_shards(&self) -> bool {
        self.0.takes_shards()
    }

    fn build<'w>(&self, head: Head<'w>, plan: Plan) -> Result<Box<dyn PerturbedArgmax + 'w>, BuildError> {
        let error = |error: flash_sampling_core::HeadError| BuildError(error.to_string());
        let owner = (head, ShadowBuffer::new(&head.weight()).map_err(error)?);
        let sampler = Owned::try_new(owner, |(head, buffer)| {
            self.0.build(head.with_shadow(buffer.shadow()).map_err(error)?, plan)
        })?;
        Ok(Box::new(Shadowed(sampler)))
    }
}

type Owner<'w> = (Head<'w>, ShadowBuffer);
type Sampler<'w> = Box<dyn PerturbedArgmax + 'w>;

self_cell::self_cell!(
    struct Owned<'w> {
        owner: Owner<'w>,
        #[not_covariant]
        dependent: Sampler,
    }
);

struct Shadowed<'w>(Owned<'w>);

impl PerturbedArgmax for Shadowed<'_> {
    fn description(&self) -> Description {
        self.0.with_dependent(|_, sampler| sampler.description())
    }

    fn sample(&mut self, input: Matrix<'_>, rows: &[RowParams<'_>], out: &mut Samples) -> Result<(), SampleError> {
        self.0.with_dependent_mut(|_, sampler| sampler.sample(input, rows, out))
    }

    fn replan(&mut self, max_rows: usize) -> Result<(), SampleError> {
        self.0.with_dependent_mut(|_, sampler| sampler.replan(max_rows))
    }

    fn scan(&mut self) -> Option<&mut dyn flash_sampling_core::backend::Scan> {
        self.0.with_dependent_mut(|_, sampler| sampler.scan())
    }
}
