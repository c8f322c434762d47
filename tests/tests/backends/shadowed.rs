//! Runs any sampler over a head with a shadow of its weight.

use flash_sampling_conformance::{BuildError, SamplerFactory};
use flash_sampling_core::reference::ReferenceVariant;
use flash_sampling_core::{
    Capabilities, Head, Matrix, PerturbedArgmax, Plan, RowParams, SampleError, Samples, ShadowBuffer, Shape,
};

/// Samplers of another factory, over heads with a shadow.
#[derive(Debug)]
pub(crate) struct Shadowed<F>(pub(crate) F);

impl<F: SamplerFactory> SamplerFactory for Shadowed<F> {
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
        let shadow = ShadowBuffer::new(&head.weight()).map_err(|error| BuildError(error.to_string()))?;
        let sampler = Owned::try_new((head, shadow), |(head, shadow)| {
            let head = head.with_shadow(shadow.shadow()).map_err(|error| BuildError(error.to_string()))?;
            self.0.build(head, plan)
        })?;
        Ok(Box::new(OverShadow(sampler)))
    }
}

type HeadAndShadow<'w> = (Head<'w>, ShadowBuffer);
type Sampler<'w> = Box<dyn PerturbedArgmax + 'w>;

self_cell::self_cell!(
    struct Owned<'w> {
        owner: HeadAndShadow<'w>,
        #[not_covariant]
        dependent: Sampler,
    }
);

/// A sampler, and the shadow that it may borrow.
struct OverShadow<'w>(Owned<'w>);

impl PerturbedArgmax for OverShadow<'_> {
    fn capabilities(&self) -> Capabilities {
        self.0.with_dependent(|_, sampler| sampler.capabilities())
    }

    fn shape(&self) -> Shape {
        self.0.with_dependent(|_, sampler| sampler.shape())
    }

    fn plan(&self) -> Plan {
        self.0.with_dependent(|_, sampler| sampler.plan())
    }

    fn sample(&mut self, input: Matrix<'_>, rows: &[RowParams<'_>], out: &mut Samples) -> Result<(), SampleError> {
        self.0.with_dependent_mut(|_, sampler| sampler.sample(input, rows, out))
    }

    fn replan(&mut self, max_rows: usize) -> Result<(), SampleError> {
        self.0.with_dependent_mut(|_, sampler| sampler.replan(max_rows))
    }
}
