//! Flags that choose backend and variant.

use crate::args::values::whole;
use crate::error::CommandError;
use clap::{Args, ValueEnum};
use flash_sampling::{BuildError, Isa, MAX_SHARDS};

/// Backend and variant.
#[derive(Clone, Debug, Args)]
#[command(next_help_heading = "Backend and variant")]
pub struct SamplerArgs {
    /// Where the work is done.
    #[arg(long, value_enum, default_value_t = BackendName::Cpu)]
    pub backend: BackendName,
    /// How the vocabulary is summarised.
    #[arg(long, value_enum, default_value_t = VariantName::Tiled)]
    pub variant: VariantName,
    /// Shards of the vocabulary (default 4); for --variant sharded.
    #[arg(long, value_name = "N", value_parser = whole(1..=MAX_SHARDS), allow_negative_numbers = true)]
    pub shards: Option<usize>,
    /// What the shards exchange (default winners); for --variant sharded and --transport.
    #[arg(long, value_enum)]
    pub merge: Option<Merge>,
    /// Tokens of a group (default 512, or as many as make at most 300 groups); for --variant grouped or online.
    #[arg(long, value_name = "TOKENS", value_parser = group, allow_negative_numbers = true)]
    pub group: Option<u32>,
    /// How a group is drawn (default fresh); for --variant grouped.
    #[arg(long, value_enum)]
    pub group_draw: Option<Draw>,
    /// Threads (default: one for each processor).
    #[arg(long, value_name = "N", value_parser = whole(1..=MAX_THREADS), allow_negative_numbers = true)]
    pub threads: Option<usize>,
    /// Instruction set: portable, avx2, avx512, avx512bf16 or amx (default: the fastest that there is).
    #[arg(long, value_name = "ISA")]
    pub isa: Option<Isa>,
}

/// The most threads that the CPU backend takes.
pub(crate) const MAX_THREADS: usize = 1024;

fn group(text: &str) -> Result<u32, String> {
    let size = text.parse().ok().filter(|&size: &u32| size > 0 && size.is_multiple_of(64));
    size.ok_or_else(|| "it must be a multiple of 64, from 64 to 4294967232".into())
}

/// Where the work is done.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum BackendName {
    /// The processor.
    Cpu,
    /// An NVIDIA GPU.
    Cuda,
}

impl BackendName {
    /// Refuses a backend that this build does not have.
    ///
    /// # Errors
    /// [`CommandError::Build`], naming the feature.
    pub fn check_built(self) -> Result<(), CommandError> {
        match self {
            BackendName::Cuda if cfg!(not(feature = "cuda")) => Err(BuildError::NotBuilt { feature: "cuda" }.into()),
            BackendName::Cuda | BackendName::Cpu => Ok(()),
        }
    }
}

/// How the vocabulary is summarised.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum VariantName {
    /// One pass, one winner a tile; exact pathwise.
    Tiled,
    /// Log-mass and local sample per group, then a draw of the group; exact in distribution.
    Grouped,
    /// Groups streamed through the binary merge; exact in distribution.
    Online,
    /// Shards of the vocabulary that exchange summaries.
    Sharded,
    /// The slow float64 definition that all others are judged against.
    Reference,
}

/// What shards exchange.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum Merge {
    /// Winners: exact pathwise.
    Winners,
    /// Log-mass and local sample: exact in distribution.
    LogMass,
}

/// How a group is drawn.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum Draw {
    /// By noise of its own.
    Fresh,
    /// By the maximum of its perturbed scores, which is such noise already.
    Reuse,
}

/// What the sampler is for, besides draws on one machine.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Work {
    /// Nothing.
    Draws,
    /// Draws over ranks, which exchange summaries.
    Ranks,
    /// Text, whose layers are the processor's.
    Text,
}

impl SamplerArgs {
    /// Refuses a flag that the chosen backend and variant have no use for: no knob is dropped in silence.
    ///
    /// # Errors
    /// [`CommandError::Usage`], naming the flag; [`CommandError::Build`] when this build does not have the backend.
    pub fn check_for(&self, work: Work) -> Result<(), CommandError> {
        let sharded = self.variant == VariantName::Sharded;
        let grouped = self.variant == VariantName::Grouped;
        let online = self.variant == VariantName::Online;
        let cpu = self.backend == BackendName::Cpu && self.variant != VariantName::Reference || work == Work::Text;
        let reference = self.variant == VariantName::Reference;
        let elsewhere = if reference { "with --variant reference" } else { "with --backend cuda" };
        let idle = [
            ("--shards", self.shards.is_some() && !sharded, "without --variant sharded"),
            (
                "--merge",
                self.merge.is_some() && !sharded && work != Work::Ranks,
                "without --variant sharded or --transport",
            ),
            ("--group", self.group.is_some() && !(grouped || online), "without --variant grouped or online"),
            ("--group-draw", self.group_draw.is_some() && !grouped, "without --variant grouped"),
            ("--threads", self.threads.is_some() && !cpu, elsewhere),
            ("--isa", self.isa.is_some() && !cpu, elsewhere),
            (
                "--backend cuda",
                self.backend == BackendName::Cuda && reference,
                "with --variant reference, which runs on the CPU",
            ),
        ];
        match idle.into_iter().find(|(_, idle, _)| *idle) {
            Some((flag, _, beside)) => Err(CommandError::usage(format!("{flag} means nothing {beside}"))),
            None => self.backend.check_built(),
        }
    }
}
