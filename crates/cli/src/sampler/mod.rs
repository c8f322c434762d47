//! The sampler that the flags of backend and variant choose.

pub(crate) mod unsupported;

use crate::args::{BackendName, SamplerArgs, VariantName};
use crate::error::CommandError;
use flash_sampling::backend::group_size;
use flash_sampling::cpu::CpuError;
use flash_sampling::{
    Backend, BackendConfig, BuildError, GroupDraw, Head, Knob, PerturbedArgmax, Plan, ShardError, ShardMerge,
    VariantConfig, build as build_config,
};

/// Number of shards without `--shards`.
pub const SHARDS: usize = 4;

/// The flags as a configuration.
pub fn config(args: &SamplerArgs, plan: Plan, vocab: usize) -> BackendConfig {
    let group = args.group.unwrap_or_else(|| group_size(vocab));
    let backend = match (args.variant, args.backend) {
        (VariantName::Reference, _) => Backend::Reference,
        (_, BackendName::Cpu) => Backend::Cpu(args.cpu.options()),
        (_, BackendName::Cuda) => Backend::Cuda { device: 0 },
    };
    let variant = match args.variant {
        VariantName::Tiled | VariantName::Reference => VariantConfig::Tiled,
        VariantName::Grouped => {
            VariantConfig::Grouped { size: group, draw: args.group_draw.unwrap_or(GroupDraw::Fresh) }
        }
        VariantName::Online => VariantConfig::Online { size: group },
        VariantName::Sharded => {
            VariantConfig::Sharded { shards: args.shards.unwrap_or(SHARDS), merge: shard_merge(args) }
        }
    };
    BackendConfig { backend, variant, plan }
}

/// The merge of shards and ranks.
pub(crate) fn shard_merge(args: &SamplerArgs) -> ShardMerge {
    args.merge.unwrap_or(ShardMerge::Winners)
}

/// A build error with the flag that caused it.
pub(crate) fn named(error: BuildError) -> CommandError {
    match &error {
        BuildError::Shard(ShardError::NotPathwise { .. }) => CommandError::usage(format!("{error} (--merge log-mass)")),
        BuildError::Cpu(CpuError::IsaUnavailable { .. }) => CommandError::usage(format!("--isa: {error}")),
        BuildError::Cpu(CpuError::Unsupported { knob: Knob::Canonical }) => not_canonical(),
        #[cfg(feature = "cuda")]
        BuildError::Cuda(flash_sampling::cuda::CudaError::Unsupported { knob: Knob::Canonical }) => not_canonical(),
        _ => error.into(),
    }
}

/// Only samplers that are exact in distribution refuse a canonical plan.
fn not_canonical() -> CommandError {
    let alternatives = "use --variant tiled, or --variant grouped --group-draw reuse";
    CommandError::usage(format!("--canonical is not supported with this variant; {alternatives}"))
}

/// Builds the sampler.
pub fn build<'w>(
    head: Head<'w>,
    args: &SamplerArgs,
    plan: Plan,
) -> Result<Box<dyn PerturbedArgmax + 'w>, CommandError> {
    let vocab = head.vocab_size() as usize;
    build_config(head, &config(args, plan, vocab)).map_err(named)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_error_about_ranks_that_are_not_pathwise_names_the_flag_of_the_other_merge() {
        let refusal = named(ShardError::NotPathwise { shard: 1 }.into()).to_string();
        assert!(refusal.contains("shard 1") && refusal.ends_with("merge by log-mass (--merge log-mass)"), "{refusal}");
    }
}
