//! The sampler that the flags choose, as a factory of the suite.

use crate::args::{BackendName, SamplerArgs, VariantName};
use crate::error::CommandError;
use crate::sampler::{self, SHARDS};
use flash_sampling::backend::group_size;
use flash_sampling::reference::ReferenceVariant;
use flash_sampling::{GroupDraw, Head, Matrix, PerturbedArgmax, Plan, ShardMerge};
use flash_sampling_conformance::{BuildError, SamplerFactory};

/// The sampler that the flags choose.
#[derive(Debug)]
pub struct FlagsFactory {
    args: SamplerArgs,
    name: String,
}

impl FlagsFactory {
    /// A factory, after a check that this machine has the sampler.
    pub fn new(args: SamplerArgs) -> Result<Self, CommandError> {
        let weight = [0f32; 4];
        let head = Head::new(Matrix::new(&weight, 4, 1)?)?;
        let backend = sampler::build(head, &args, Plan::default())?.capabilities().backend;
        let variant = sampler::config(&args, Plan::default(), 4).variant.to_string();
        // "cpu (avx512)" becomes "cpu/grouped:512/avx512".
        let (place, isa) =
            backend.split_once(" (").map_or((backend, None), |(p, isa)| (p, Some(isa.trim_end_matches(')'))));
        let name = [Some(place), Some(&*variant), isa].into_iter().flatten().collect::<Vec<_>>().join("/");
        Ok(FlagsFactory { args, name })
    }

    /// First token of each shard: near-equal parts on the grid of the tiles, as in the library. With different shards, the
    /// laws that compare with the reference would fail.
    fn shard_starts(&self, head: &Head<'_>) -> Vec<u32> {
        let (tokens, shards) = (head.tokens(), self.args.shards.unwrap_or(SHARDS) as u64);
        let cut = |shard| u64::from(tokens.start) + tokens.len() as u64 * shard / shards;
        (0..shards).map(|shard| (cut(shard) as u32 / 64 * 64).max(tokens.start)).collect()
    }
}

impl SamplerFactory for FlagsFactory {
    fn name(&self) -> String {
        self.name.clone()
    }

    fn reference_variant(&self, head: &Head<'_>) -> Option<ReferenceVariant> {
        let group = self.args.group.unwrap_or_else(|| group_size(head.vocab_size() as usize));
        match (self.args.variant, self.args.group_draw, self.args.merge) {
            (VariantName::Grouped, None | Some(GroupDraw::Fresh), _) => Some(ReferenceVariant::Grouped(group)),
            (VariantName::Online, ..) => Some(ReferenceVariant::Online(group)),
            (VariantName::Sharded, _, Some(ShardMerge::LogMass)) => {
                Some(ReferenceVariant::Sharded(self.shard_starts(head)))
            }
            _ => Some(ReferenceVariant::Tiled),
        }
    }

    fn pace(&self) -> usize {
        match (self.args.variant, self.args.backend) {
            (VariantName::Reference, _) => 1,
            (_, BackendName::Cpu) => 8,
            (_, BackendName::Cuda) => 64,
        }
    }

    fn takes_shards(&self) -> bool {
        // The outer noise of shards is numbered by rank: shards must make up the vocabulary.
        self.args.variant != VariantName::Sharded
    }

    fn build<'w>(&self, head: Head<'w>, plan: Plan) -> Result<Box<dyn PerturbedArgmax + 'w>, BuildError> {
        sampler::build(head, &self.args, plan).map_err(|error| BuildError(error.one_line()))
    }
}
