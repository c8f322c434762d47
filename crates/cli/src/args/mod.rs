//! The command line.

mod bench;
mod generate;
mod head;
pub(crate) mod ineffective_flags;
mod kernels;
pub(crate) mod params;
pub(crate) mod rows;
mod sampler;
mod shadow;
mod transport;
pub(crate) mod values;
mod verify;

pub use bench::{BenchArgs, BenchSize, HEAD, HeadSize, SizeArgs, VARIANTS};
pub use generate::{DrawArgs, GenerateArgs, TextArgs};
pub use head::{HeadArgs, HeadOverrides};
pub use kernels::{KernelsBuildArgs, KernelsCommand};
pub use params::{FilterArgs, ParamArgs, PenaltyArgs};
pub use rows::RowArgs;
pub use sampler::SamplerArgs;
pub use shadow::{ShadowArgs, WeightArgs};
pub use transport::{ExchangeName, TransportArgs, TransportName};
pub use verify::VerifyArgs;

use clap::error::{ContextKind, ContextValue, ErrorKind};
use clap::{Args, Id, Parser, Subcommand, ValueEnum};

const GENERATE_EXIT_CODES: &str = "Exit codes: 0 success; 1 a sequence failed, and its output has the error; 2 bad usage, or a file that cannot \
be read; 130 Ctrl-C.";
const SAMPLE_EXIT_CODES: &str = "Exit codes: 0 success; 1 a row failed, and its output has the error, or ranks failed; 2 bad usage, or a file \
that cannot be read or written; 130 Ctrl-C.";

/// Exact token sampling fused into the LM-head matmul.
#[derive(Debug, Parser)]
#[command(
    name = "flash-sampling",
    version,
    after_help = "Log lines go to standard error; FLASH_SAMPLING_LOG=warn or debug sets their level."
)]
pub struct Cli {
    /// The subcommand.
    #[command(subcommand)]
    pub command: Command,
}

/// The subcommands.
#[derive(Debug, Subcommand)]
pub enum Command {
    /// Write text with a Llama, Qwen3 or Gemma 2 model on the CPU and the fused head after it.
    #[command(after_help = GENERATE_EXIT_CODES)]
    Generate(Box<GenerateArgs>),
    /// Draw tokens for rows of hidden states.
    #[command(after_help = SAMPLE_EXIT_CODES)]
    Sample(Box<SampleArgs>),
    /// Check the laws of exact sampling on this machine; the exit code is 1 if one fails.
    #[command(after_long_help = verify::list())]
    Verify(VerifyArgs),
    /// Time the variants and instruction sets of this machine against a plain read and a greedy draw.
    ///
    /// By default the head has 151936 tokens and hidden size 4096, the batches 1, 16 and 64 rows, and the best of 9 rounds
    /// counts. On a GPU, calls are whole calls over host memory.
    Bench(BenchArgs),
    /// Write the shadow of a head to a file, for --shadow FILE of `generate` and `sample`.
    ///
    /// A shadow is an 8-bit copy of the head's weight, with upper bounds of its errors.
    Shadow(ShadowArgs),
    /// Compile CUDA kernels ahead of time (feature `cuda`).
    #[command(subcommand)]
    Kernels(KernelsCommand),
    /// List the instruction sets of this machine, its first GPU, and the compiled CUDA kernels.
    Info {
        /// Output format.
        #[arg(long, value_enum, default_value_t = Format::Text)]
        format: Format,
    },
}

/// Flags of `sample`.
#[derive(Debug, Args)]
pub struct SampleArgs {
    /// The head and the hidden states.
    #[command(flatten)]
    pub head: HeadArgs,
    /// Backend and variant.
    #[command(flatten)]
    pub sampler: SamplerArgs,
    /// Ranks.
    #[command(flatten)]
    pub transport: TransportArgs,
    /// Draws.
    #[command(flatten)]
    pub rows: RowArgs,
    /// Output format: text, or one JSON object per row.
    #[arg(long, value_enum, default_value_t = Format::Text, help_heading = "Output")]
    pub format: Format,
}

/// Output format.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum Format {
    /// Text; long lists of draws are summarised.
    Text,
    /// One JSON object per line.
    Json,
}

/// An error of clap with its suggestion, on one line.
pub(crate) fn one_line(error: &clap::Error) -> String {
    let text = error.to_string();
    let mut parts = text.trim_start_matches("error: ").split("\n\n").map(words);
    let mut message = parts.next().unwrap_or_default().replace("no more were expected", "the flag takes no value here");
    // Other tips concern values that begin with a dash, which no flag accepts.
    if let Some(similar) = parts.find(|part| part.starts_with("tip: ") && part.contains("similar")) {
        message.push_str(&format!("; {}", &similar["tip: ".len()..]));
    }
    let is_text = |arg: &ContextValue| matches!(arg, ContextValue::String(arg) if !arg.starts_with('-'));
    if error.kind() == ErrorKind::UnknownArgument
        && error.get(ContextKind::InvalidArg).is_some_and(is_text)
        && text.contains("Usage: flash-sampling generate ")
    {
        message.push_str("; the flag of a prompt is --prompt <TEXT>");
    }
    if matches!(error.kind(), ErrorKind::UnknownArgument | ErrorKind::InvalidSubcommand) {
        message.push_str("; --help lists all");
    }
    message
}

/// The words of a text, separated by single spaces.
fn words(text: &str) -> String {
    text.split_whitespace().collect::<Vec<_>>().join(" ")
}

/// The flags of a group.
fn flags_of<T: Args>() -> Vec<Id> {
    T::augment_args(clap::Command::new("")).get_arguments().map(|flag| flag.get_id().clone()).collect()
}
