//! The suite on the float64 reference, in all four schemes: what judges the others obeys the laws itself.

use flash_sampling_conformance::laws::uneven_starts;
use flash_sampling_conformance::{BuildError, SamplerFactory, suite};
use flash_sampling_core::reference::{Reference, Scheme};
use flash_sampling_core::{Head, PerturbedArgmax, Plan};

/// The scheme for a head, by name.
struct Referee(&'static str);

impl SamplerFactory for Referee {
    fn name(&self) -> String {
        format!("reference/{}", self.0)
    }

    fn scheme(&self, head: &Head<'_>) -> Option<Scheme> {
        Some(match self.0 {
            "grouped" => Scheme::Grouped(512),
            "online" => Scheme::Online(512),
            "sharded" => Scheme::Sharded(uneven_starts(head.tokens().start, head.tokens().end)),
            _ => Scheme::Tiled,
        })
    }

    // Alg. I.4 numbers its outer noise by rank: a shard of a shard would use the same noise twice.
    fn takes_shards(&self) -> bool {
        self.0 != "sharded"
    }

    fn build<'w>(&self, head: Head<'w>, plan: Plan) -> Result<Box<dyn PerturbedArgmax + 'w>, BuildError> {
        let scheme = self.scheme(&head).ok_or(BuildError("no scheme".into()))?;
        Ok(Box::new(Reference::new(head, plan, scheme)))
    }
}

suite!(tiled, Referee("tiled"));
suite!(grouped, Referee("grouped"));
suite!(online, Referee("online"));
suite!(sharded, Referee("sharded"));
