//! Flags that choose backend and variant.

use crate::args::CpuArgs;
use crate::args::values::{choice, whole};
use crate::error::CommandError;
use clap::{Args, ValueEnum};
use flash_sampling::{BuildError, GroupDraw, MAX_SHARDS, ShardMerge};

/// Backend and variant.
#[derive(Clone, Debug, Args)]
#[command(next_help_heading = "Backend and variant")]
pub struct SamplerArgs {
    /// Processor or GPU.
    #[arg(long, value_enum, default_value_t = BackendName::Cpu)]
    pub backend: BackendName,
    /// Algorithm.
    #[arg(long, value_enum, default_value_t = VariantName::Tiled)]
    pub variant: VariantName,
    /// Number of vocabulary shards (default 4); for --variant sharded.
    #[arg(long, value_name = "N", value_parser = whole(1..=MAX_SHARDS), allow_negative_numbers = true)]
    pub shards: Option<usize>,
    /// The summary that shards exchange (default winners); for --variant sharded and --transport.
    #[arg(long, value_parser = choice(MERGES))]
    pub merge: Option<ShardMerge>,
    /// Tokens per group (default 512, or more so that there are at most 300 groups); for --variant grouped or online.
    #[arg(long, value_name = "TOKENS", value_parser = group, allow_negative_numbers = true)]
    pub group: Option<u32>,
    /// Noise of the draw between groups (default fresh); for --variant grouped.
    #[arg(long, value_parser = choice(GROUP_DRAWS))]
    pub group_draw: Option<GroupDraw>,
    /// Threads and instruction set.
    #[command(flatten)]
    pub cpu: CpuArgs,
}

const MERGES: &[(&str, &str, ShardMerge)] =
    &[("winners", "exact pathwise", ShardMerge::Winners), ("log-mass", "exact in distribution", ShardMerge::LogMass)];

const GROUP_DRAWS: &[(&str, &str, GroupDraw)] = &[
    ("fresh", "new noise per group", GroupDraw::Fresh),
    ("reuse", "the maximum of the group's perturbed scores", GroupDraw::Reuse),
];

/// Maximum of threads of the CPU backend.
pub(crate) const MAX_THREADS: usize = 1024;

fn group(text: &str) -> Result<u32, String> {
    let size = text.parse().ok().filter(|&size: &u32| size > 0 && size.is_multiple_of(64));
    size.ok_or_else(|| "it must be a multiple of 64, from 64 to 4294967232".into())
}

/// Processor or GPU.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum BackendName {
    /// The processor.
    Cpu,
    /// An NVIDIA GPU.
    Cuda,
}

impl BackendName {
    /// Refuses a backend that this build lacks.
    ///
    /// # Errors
    /// [`CommandError::Build`], which names the feature.
    pub fn check_built(self) -> Result<(), CommandError> {
        match self {
            BackendName::Cuda if cfg!(not(feature = "cuda")) => Err(BuildError::NotBuilt { feature: "cuda" }.into()),
            BackendName::Cuda | BackendName::Cpu => Ok(()),
        }
    }
}

/// Algorithm.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum VariantName {
    /// One pass, one winner per tile; exact pathwise.
    Tiled,
    /// A log-mass and a local sample per group, then a draw between groups; exact in distribution.
    Grouped,
    /// Groups merged one by one; exact in distribution.
    Online,
    /// Shards of the vocabulary that exchange summaries.
    Sharded,
    /// The slow float64 definition, which judges all others.
    Reference,
}

/// The use of a sampler, which decides the flags with an effect.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Work {
    /// Draws on one machine.
    Draws,
    /// Draws over ranks.
    Ranks,
    /// Text; its layers run on the CPU.
    Text,
}

impl SamplerArgs {
    /// Refuses a flag without effect on the chosen backend and variant.
    ///
    /// # Errors
    /// [`CommandError::Usage`], which names the flag; [`CommandError::Build`] if this build lacks the backend.
    pub fn check_for(&self, work: Work) -> Result<(), CommandError> {
        let sharded = self.variant == VariantName::Sharded;
        let grouped = self.variant == VariantName::Grouped;
        let online = self.variant == VariantName::Online;
        let cpu = self.backend == BackendName::Cpu && self.variant != VariantName::Reference || work == Work::Text;
        let reference = self.variant == VariantName::Reference;
        let context = if reference { "with --variant reference" } else { "with --backend cuda" };
        let ineffective = [
            ("--shards", self.shards.is_some() && !sharded, "without --variant sharded"),
            (
                "--merge",
                self.merge.is_some() && !sharded && work != Work::Ranks,
                "without --variant sharded or --transport",
            ),
            ("--group", self.group.is_some() && !(grouped || online), "without --variant grouped or online"),
            ("--group-draw", self.group_draw.is_some() && !grouped, "without --variant grouped"),
            ("--threads", self.cpu.threads.is_some() && !cpu, context),
            ("--isa", self.cpu.isa.is_some() && !cpu, context),
            (
                "--backend cuda",
                self.backend == BackendName::Cuda && reference,
                "with --variant reference, which runs on the CPU",
            ),
        ];
        match ineffective.into_iter().find(|(_, is_ineffective, _)| *is_ineffective) {
            Some((flag, _, context)) => Err(CommandError::usage(format!("{flag} has no effect {context}"))),
            None => self.backend.check_built(),
        }
    }
}
