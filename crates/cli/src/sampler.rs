//! The sampler that the flags choose.

use crate::args::{BackendName, Draw, Merge, SamplerArgs, VariantName};
use crate::error::CommandError;
use flash_sampling::cpu::CpuError;
use flash_sampling::{
    Backend, BackendConfig, BuildError, CpuOptions, GroupDraw, Head, Knob, PerturbedArgmax, Plan, ShardMerge,
    VariantConfig, build as build_config, group_size,
};

/// Shards, without `--shards`.
pub const SHARDS: usize = 4;

/// The flags as a configuration.
pub fn config(args: &SamplerArgs, plan: Plan, vocab: usize) -> BackendConfig {
    let group = args.group.unwrap_or_else(|| group_size(vocab));
    let backend = match (args.variant, args.backend) {
        (VariantName::Reference, _) => Backend::Reference,
        (_, BackendName::Cpu) => Backend::Cpu(CpuOptions { isa: args.isa, threads: args.threads }),
        (_, BackendName::Cuda) => Backend::Cuda,
    };
    let variant = match args.variant {
        VariantName::Tiled | VariantName::Reference => VariantConfig::Tiled,
        VariantName::Grouped => VariantConfig::Grouped {
            size: group,
            draw: match args.group_draw {
                None | Some(Draw::Fresh) => GroupDraw::Fresh,
                Some(Draw::Reuse) => GroupDraw::Reuse,
            },
        },
        VariantName::Online => VariantConfig::Online { size: group },
        VariantName::Sharded => VariantConfig::Sharded { shards: args.shards.unwrap_or(SHARDS), merge: merge(args) },
    };
    BackendConfig { backend, variant, plan }
}

/// What shards exchange.
pub(crate) fn merge(args: &SamplerArgs) -> ShardMerge {
    match args.merge {
        None | Some(Merge::Winners) => ShardMerge::Winners,
        Some(Merge::LogMass) => ShardMerge::LogMass,
    }
}

/// The refusal, with the flag that it is of.
pub(crate) fn named(error: BuildError) -> CommandError {
    let flag = match &error {
        BuildError::Cpu(CpuError::IsaUnavailable { .. }) => "--isa",
        BuildError::Cpu(CpuError::Unsupported { knob: Knob::Canonical }) => "--canonical",
        #[cfg(feature = "cuda")]
        BuildError::Cuda(flash_sampling::cuda::CudaError::Unsupported { knob: Knob::Canonical }) => "--canonical",
        _ => return error.into(),
    };
    CommandError::usage(format!("{flag}: {error}"))
}

/// Plans the sampler.
///
/// # Errors
/// What the backend refuses.
pub fn build<'w>(
    head: Head<'w>,
    args: &SamplerArgs,
    plan: Plan,
) -> Result<Box<dyn PerturbedArgmax + 'w>, CommandError> {
    let vocab = head.vocab_size() as usize;
    build_config(head, &config(args, plan, vocab)).map_err(named)
}
