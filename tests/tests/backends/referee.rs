//! A factory of the float64 reference, in all four variants.

use flash_sampling_conformance::laws::uneven_starts;
use flash_sampling_conformance::{BuildError, SamplerFactory};
use flash_sampling_core::reference::{Reference, ReferenceVariant};
use flash_sampling_core::{Head, PerturbedArgmax, Plan};

/// A factory of the variant of this name.
pub(crate) struct Referee(pub(crate) &'static str);

impl SamplerFactory for Referee {
    fn name(&self) -> String {
        format!("reference/{}", self.0)
    }

    fn reference_variant(&self, head: &Head<'_>) -> Option<ReferenceVariant> {
        Some(match self.0 {
            "grouped" => ReferenceVariant::Grouped(512),
            "online" => ReferenceVariant::Online(512),
            "sharded" => ReferenceVariant::Sharded(uneven_starts(head.tokens().start, head.tokens().end)),
            _ => ReferenceVariant::Tiled,
        })
    }

    // In Alg. I.4, the noise of shards depends on the rank, so shards of a shard would use the same noise twice.
    fn takes_shards(&self) -> bool {
        self.0 != "sharded"
    }

    fn build<'w>(&self, head: Head<'w>, plan: Plan) -> Result<Box<dyn PerturbedArgmax + 'w>, BuildError> {
        let scheme = self.reference_variant(&head).ok_or(BuildError("no variant".into()))?;
        Ok(Box::new(Reference::new(head, plan, scheme)))
    }
}
