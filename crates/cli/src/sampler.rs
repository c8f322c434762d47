//! The sampler that the flags choose.

use crate::args::{BackendName, Draw, Merge, SamplerArgs, VariantName};
use crate::error::CommandError;
use crate::output::line;
use flash_sampling::backend::group_size;
use flash_sampling::cpu::CpuError;
use flash_sampling::{
    Backend, BackendConfig, BuildError, CpuOptions, GroupDraw, Head, Knob, Knobs, PerturbedArgmax, Plan, RowError,
    RowParams, ShardError, ShardMerge, VariantConfig, build as build_config,
};

/// Shards, without `--shards`.
pub const SHARDS: usize = 4;

/// The flags as a configuration.
pub fn config(args: &SamplerArgs, plan: Plan, vocab: usize) -> BackendConfig {
    let group = args.group.unwrap_or_else(|| group_size(vocab));
    let backend = match (args.variant, args.backend) {
        (VariantName::Reference, _) => Backend::Reference,
        (_, BackendName::Cpu) => Backend::Cpu(CpuOptions { isa: args.isa, threads: args.threads }),
        (_, BackendName::Cuda) => Backend::Cuda { device: 0 },
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
    if let BuildError::Shard(ShardError::NotPathwise { .. }) = &error {
        return CommandError::usage(format!("{error} (--merge log-mass)"));
    }
    let flag = match &error {
        BuildError::Cpu(CpuError::IsaUnavailable { .. }) => "--isa",
        BuildError::Cpu(CpuError::Unsupported { knob: Knob::Canonical }) => "--canonical",
        #[cfg(feature = "cuda")]
        BuildError::Cuda(flash_sampling::cuda::CudaError::Unsupported { knob: Knob::Canonical }) => "--canonical",
        _ => return error.into(),
    };
    CommandError::usage(match flag {
        // Only what is exact in distribution refuses to be canonical.
        "--canonical" => with_instead("--canonical is not supported by this variant".into(), Some(PATHWISE_GROUPS)),
        flag => format!("{flag}: {error}"),
    })
}

/// The flags that draw by groups and pathwise, which can do what groups and streams in distribution cannot.
const PATHWISE_GROUPS: &str = "--variant grouped --group-draw reuse";

/// Whether the draw is by groups, and exact in distribution only.
fn in_distribution(args: &SamplerArgs) -> bool {
    match args.variant {
        VariantName::Online => true,
        VariantName::Grouped => args.group_draw != Some(Draw::Reuse),
        VariantName::Tiled | VariantName::Sharded | VariantName::Reference => false,
    }
}

/// The flags to take instead, where those that were given cannot do what `knob` asks.
pub(crate) fn instead(args: &SamplerArgs, knob: Knob) -> Option<&'static str> {
    let pathwise = Knobs::FILTERS.union(Knobs::of(&[Knob::Kept, Knob::WithoutReplacement]));
    match () {
        () if merge(args) == ShardMerge::LogMass => {
            pathwise.with(Knob::LogprobsMode).contains(knob).then_some("--merge winners")
        }
        () => (in_distribution(args) && pathwise.contains(knob)).then_some(PATHWISE_GROUPS),
    }
}

/// What the sampler of the flags lacks, as far as they tell: it says the same itself, once it has a head.
pub(crate) fn lacks(args: &SamplerArgs, canonical: bool) -> Knobs {
    let kept = Knobs::FILTERS.with(Knob::Kept);
    let of_shards = args.variant == VariantName::Sharded && merge(args) == ShardMerge::LogMass;
    match args.variant {
        VariantName::Reference => Knobs::NONE,
        _ if canonical || of_shards => kept.with(Knob::LogprobsMode),
        _ if in_distribution(args) => kept,
        _ => Knobs::NONE,
    }
}

/// Refuses what the flags ask of every row and their sampler lacks, before a head is read.
///
/// # Errors
/// Bad usage: what the sampler would say.
pub(crate) fn check_knobs(args: &SamplerArgs, canonical: bool, row: &RowParams<'_>) -> Result<(), CommandError> {
    let lacked = row.enabled().intersection(lacks(args, canonical)).iter().next();
    match lacked.and_then(|knob| unsupported(args, canonical, knob)) {
        Some(error) => Err(CommandError::usage(error.to_string())),
        None => Ok(()),
    }
}

/// The refusal of a flag that names a token beyond the vocabulary.
pub(crate) fn beyond(flag: &str, token: u32, vocab_size: u32) -> String {
    format!("{flag} names token {token}, but {}", line::there_are(vocab_size, "token"))
}

/// Checks that a flag's tokens are in the vocabulary.
///
/// # Errors
/// Bad usage, which names the first that is not.
pub(crate) fn known(flag: &str, tokens: Option<&[u32]>, vocab_size: u32) -> Result<(), CommandError> {
    match tokens.unwrap_or_default().iter().find(|&&token| token >= vocab_size) {
        Some(&token) => Err(CommandError::usage(beyond(flag, token, vocab_size))),
        None => Ok(()),
    }
}

/// A refusal, and the flags to take instead.
pub(crate) fn with_instead(refusal: String, instead: Option<&str>) -> String {
    match instead {
        Some(flags) => format!("{refusal}; {flags} has it"),
        None => refusal,
    }
}

/// What the sampler of the flags says of a knob that it lacks, with the flags to take instead, where there are some.
fn unsupported(args: &SamplerArgs, canonical: bool, knob: Knob) -> Option<RowError> {
    let lost = Knobs::FILTERS.union(Knobs::of(&[Knob::Kept, Knob::LogprobsMode]));
    let instead = match merge(args) {
        ShardMerge::LogMass if canonical && lost.contains(knob) => "--merge winners without --canonical",
        ShardMerge::Winners if canonical && lost.contains(knob) => "the draw without --canonical",
        _ => instead(args, knob)?,
    };
    Some(RowError::Unsupported { knob, instead })
}

/// A row's error with the flags to take instead of those that refused it, where there are some.
pub(crate) fn advised(args: &SamplerArgs, canonical: bool, error: RowError) -> RowError {
    match error {
        RowError::Unsupported { knob, .. } => unsupported(args, canonical, knob).unwrap_or(error),
        error => error,
    }
}

/// The refusal of what the flags ask of every row, where a row's error is one.
pub(crate) fn refusal(args: &SamplerArgs, canonical: bool, error: &RowError) -> Option<CommandError> {
    let (RowError::OutOfRange { .. }
    | RowError::UnknownToken { .. }
    | RowError::Invalid { .. }
    | RowError::Unsupported { .. }
    | RowError::Unplanned { .. }
    | RowError::BeyondPlan { .. }) = error
    else {
        return None;
    };
    Some(CommandError::usage(advised(args, canonical, *error).to_string()))
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ranks_that_are_not_pathwise_are_told_the_flag_of_the_other_merge() {
        let refusal = named(ShardError::NotPathwise { shard: 1 }.into()).to_string();
        assert!(refusal.contains("shard 1") && refusal.ends_with("merge by log-mass (--merge log-mass)"), "{refusal}");
    }
}
