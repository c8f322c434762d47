//! The sampler that the flags choose, as a factory of the suite.

use crate::args::SamplerArgs;
use crate::error::CommandError;
use crate::sampler;
use flash_sampling::reference::ReferenceVariant;
use flash_sampling::{Backend, Head, Matrix, PerturbedArgmax, Plan, ShardMerge, VariantConfig};
use flash_sampling_conformance::{BuildError, SamplerFactory};
use half::bf16;

/// The sampler that the flags choose.
#[derive(Debug)]
pub struct FlagsFactory {
    args: SamplerArgs,
    name: String,
}

impl FlagsFactory {
    /// A factory, after a check that this machine has the sampler.
    pub fn new(args: SamplerArgs) -> Result<Self, CommandError> {
        let backend = |weight: Matrix<'_>| -> Result<_, CommandError> {
            Ok(sampler::build(Head::new(weight)?, &args, Plan::default())?.capabilities().backend)
        };
        let in_bf16 = backend(Matrix::new(&[bf16::ZERO; 4], 4, 1)?)?;
        let in_f32 = backend(Matrix::new(&[0f32; 4], 4, 1)?)?;
        // "cpu (amx)" and "cpu (avx512)" become "cpu/grouped:512/amx (avx512 for types other than bf16)".
        let parts = |backend: &'static str| backend.trim_end_matches(')').split_once(" (").unwrap_or((backend, ""));
        let ((place, isa), (_, of_f32)) = (parts(in_bf16), parts(in_f32));
        let variant = &args.variant;
        let name = match isa {
            "" => format!("{place}/{variant}"),
            isa if isa == of_f32 => format!("{place}/{variant}/{isa}"),
            isa => format!("{place}/{variant}/{isa} ({of_f32} for types other than bf16)"),
        };
        Ok(FlagsFactory { args, name })
    }

    /// Returns the first token of each shard: near-equal parts on the grid of the tiles, as in the library. With other
    /// shards, the laws that compare with the reference would fail.
    fn shard_starts(head: &Head<'_>, shards: usize) -> Vec<u32> {
        let (tokens, shards) = (head.tokens(), shards as u64);
        let cut = |shard| u64::from(tokens.start) + tokens.len() as u64 * shard / shards;
        (0..shards).map(|shard| (cut(shard) as u32 / 64 * 64).max(tokens.start)).collect()
    }
}

impl SamplerFactory for FlagsFactory {
    fn name(&self) -> String {
        self.name.clone()
    }

    fn reference_variant(&self, head: &Head<'_>) -> Option<ReferenceVariant> {
        Some(match self.args.variant {
            VariantConfig::Grouped { size } => ReferenceVariant::Grouped(size),
            VariantConfig::Online { size } => ReferenceVariant::Online(size),
            VariantConfig::Sharded { shards, merge: ShardMerge::LogMass } => {
                ReferenceVariant::Sharded(FlagsFactory::shard_starts(head, shards))
            }
            _ => ReferenceVariant::Tiled,
        })
    }

    fn pace(&self) -> usize {
        match self.args.backend {
            Backend::Reference => 1,
            Backend::Cuda { .. } => 64,
            _ => 8,
        }
    }

    fn takes_shards(&self) -> bool {
        // The outer noise of shards depends on the rank, so the shards must form the whole vocabulary.
        !matches!(self.args.variant, VariantConfig::Sharded { .. })
    }

    fn build<'w>(&self, head: Head<'w>, plan: Plan) -> Result<Box<dyn PerturbedArgmax + 'w>, BuildError> {
        sampler::build(head, &self.args, plan).map_err(|error| BuildError(error.one_line()))
    }
}
