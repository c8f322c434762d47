//! The command line.

mod bench;
mod filters;
mod generate;
mod head;
mod kernels;
mod penalties;
pub(crate) mod rows;
mod sampler;
mod sequence;
mod transport;
pub(crate) mod values;
mod verify;

pub use bench::{BenchArgs, BenchSize, GpuTransport, HeadSize, Timed, Type};
pub use filters::{FilterArgs, OrderArg};
pub use generate::{DrawArgs, GenerateArgs, TextArgs};
pub use head::HeadArgs;
pub use kernels::{KernelsBuildArgs, KernelsCommand};
pub use penalties::PenaltyArgs;
pub use rows::{LogitBias, RowArgs};
pub(crate) use sampler::MAX_THREADS;
pub use sampler::{BackendName, Draw, Merge, SamplerArgs, VariantName, Work};
pub use transport::{ExchangeName, TransportArgs, TransportName};
pub use verify::{Effort, Named, VerifyArgs};

use clap::error::{ContextKind, ContextValue, ErrorKind};
use clap::{Args, Parser, Subcommand, ValueEnum};

/// What `generate` exits with.
const GENERATE_EXIT_CODES: &str = "Exit codes: 0 every sequence came to its end; 1 one failed, a line says why; 2 bad usage, or a file that cannot be \
read; 130 Ctrl-C.";
/// What `sample` exits with.
const EXIT_CODES: &str = "Exit codes: 0 every row has its draws; 1 a row failed, its line says why, or ranks did; 2 bad usage, or a file that cannot be read or \
written; 130 Ctrl-C.";

/// Exact token sampling fused into the LM-head matmul.
#[derive(Debug, Parser)]
#[command(
    name = "flash-sampling",
    version,
    after_help = "Notes go to standard error; FLASH_SAMPLING_LOG=warn silences them, FLASH_SAMPLING_LOG=debug says more."
)]
pub struct Cli {
    /// What to do.
    #[command(subcommand)]
    pub command: Command,
}

/// The subcommands.
#[derive(Debug, Subcommand)]
pub enum Command {
    /// Write text: a language model of the Llama or Qwen3 family on the CPU, and the fused head after it.
    #[command(after_help = GENERATE_EXIT_CODES)]
    Generate(GenerateArgs),
    /// Draw tokens for rows of hidden states.
    #[command(after_help = EXIT_CODES)]
    Sample(Box<SampleArgs>),
    /// Check the laws of exact sampling on this machine; the exit code is 1 when one fails.
    Verify(VerifyArgs),
    /// Time the variants against the read bandwidth and the same kernel without noise.
    Bench(BenchArgs),
    /// CUDA kernels compiled ahead of time (feature `cuda`).
    #[command(subcommand)]
    Kernels(KernelsCommand),
    /// Tell what this machine has and which kernels would run.
    Info {
        /// How it is written.
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
    /// What is drawn.
    #[command(flatten)]
    pub rows: RowArgs,
    /// How results are written: a text for people, or one JSON object a line.
    #[arg(long, value_enum, default_value_t = Format::Text)]
    pub format: Format,
}

/// How results are written.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum Format {
    /// For people; long lists of draws are summarised.
    Text,
    /// One JSON object a line.
    Json,
}

/// The message of a bad command line and what may have been meant, on one line.
pub(crate) fn one_line(error: &clap::Error) -> String {
    let text = error.to_string();
    let mut parts = text.trim_start_matches("error: ").split("\n\n").map(words);
    let mut said = parts.next().unwrap_or_default();
    // The other kind, how a word with a dash is given as a value, no argument here takes.
    if let Some(similar) = parts.find(|part| part.starts_with("tip: ") && part.contains("similar")) {
        said.push_str(&format!("; {}", &similar["tip: ".len()..]));
    }
    let is_text = |arg: &ContextValue| matches!(arg, ContextValue::String(arg) if !arg.starts_with('-'));
    if error.kind() == ErrorKind::UnknownArgument
        && error.get(ContextKind::InvalidArg).is_some_and(is_text)
        && text.contains("Usage: flash-sampling generate ")
    {
        said.push_str("; a prompt is given by --prompt <TEXT>");
    }
    if matches!(error.kind(), ErrorKind::UnknownArgument | ErrorKind::InvalidSubcommand) {
        said.push_str("; --help lists what there is");
    }
    said
}

/// With one space between words.
fn words(text: &str) -> String {
    text.split_whitespace().collect::<Vec<_>>().join(" ")
}

#[cfg(test)]
mod tests {
    use super::*;
    use clap::CommandFactory;

    /// A flag of the filters or penalties that the list lacked would be dropped in silence.
    #[test]
    fn a_file_of_parameters_stands_in_place_of_all_flags_of_filters_and_penalties() {
        let all = Cli::command();
        for (command, groups, listed) in [
            ("sample", &["FilterArgs", "PenaltyArgs", "SequenceArgs"][..], &rows::OF_THE_FILE[..]),
            ("generate", &["FilterArgs", "PenaltyArgs"], &generate::OF_THE_FILE),
        ] {
            let command = all.find_subcommand(command).unwrap();
            let flags: Vec<_> = command.get_arguments().map(|flag| flag.get_id().as_str()).collect();
            assert!(listed.iter().all(|flag| flags.contains(flag)), "{listed:?}");
            for group in groups {
                let group = command.get_groups().find(|g| g.get_id() == group).unwrap();
                for flag in group.get_args() {
                    assert!(listed.contains(&flag.as_str()), "--params does not exclude {flag}");
                }
            }
        }
    }
}
