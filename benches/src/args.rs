//! The command line.

use clap::{Args, Parser, Subcommand};
use flash_sampling::{CpuOptions, Isa};
use flash_sampling_cli::args::{HEAD, SizeArgs};
use flash_sampling_cli::error::CommandError;
use flash_sampling_cli::output::try_path;

#[cfg(feature = "cuda")]
pub use cuda::{GpuArgs, GpuTransport, RankArgs};

/// Benchmarks against other programs, of filters, and of ranks.
#[derive(Debug, Parser)]
#[command(name = "flash-sampling-bench", version)]
pub struct Cli {
    /// The benchmark.
    #[command(subcommand)]
    pub command: Command,
}

/// The benchmarks.
#[derive(Debug, Subcommand)]
pub enum Command {
    /// On the CPU: the variants, and draws from a row of existing logits.
    ///
    /// By default one head of 151936x4096, batches of 1,2,4,8,16,32,64,128,256 rows, and 9 rounds.
    Cpu(CpuBench),
    /// On a GPU: the fused kernel against cuBLAS and samplers over its logits.
    ///
    /// By default heads of 151936x4096,128256x8192,151936x2048,201088x2880, batches of 1,2,4,8,16,32,64,128,256 rows, and
    /// twice 100 rounds after a quarter as many to warm up.
    #[cfg(feature = "cuda")]
    Gpu(GpuArgs),
    /// On several GPUs, one rank each: a step against one GPU and (with nccl) against gathered logits.
    ///
    /// Heads and batches are by default those of `gpu`; the number of rounds is fixed.
    #[cfg(feature = "cuda")]
    Ranks(RankArgs),
}

/// Flags of `cpu`.
#[derive(Clone, Debug, Args)]
pub struct CpuBench {
    /// Time filters, penalties and masks instead, and count the rows that one pass decides (default rows: 1,16,64).
    #[arg(long)]
    pub filters: bool,
    /// Time draws from a shadow of the weight too.
    #[arg(long)]
    pub shadow: bool,
    /// Threads and instruction set.
    #[command(flatten)]
    pub cpu: CpuArgs,
    /// Heads, batches and rounds.
    #[command(flatten)]
    pub sizes: SizeArgs,
}

/// Threads and instruction set of the CPU.
#[derive(Clone, Debug, Args)]
pub struct CpuArgs {
    /// Number of threads (default: one per processor).
    #[arg(long, value_name = "N")]
    pub threads: Option<usize>,
    /// Instruction set (default: the fastest of this machine).
    #[arg(long, value_name = "ISA")]
    pub isa: Option<Isa>,
}

impl CpuArgs {
    /// Threads and instruction set.
    pub fn options(&self) -> CpuOptions {
        CpuOptions { isa: self.isa, threads: self.threads }
    }
}

/// Rows of the batches without `--rows`.
pub const ROWS: [u32; 9] = [1, 2, 4, 8, 16, 32, 64, 128, 256];
/// Rows of the batches with `--filters` and without `--rows`.
pub const FILTER_ROWS: [u32; 3] = [1, 16, 64];

impl CpuBench {
    /// The sizes to time.
    pub fn sizes(&self) -> Vec<flash_sampling_cli::args::BenchSize> {
        self.sizes.sizes(&[HEAD], if self.filters { &FILTER_ROWS } else { &ROWS }, 9)
    }
}

impl Command {
    /// Heads, batches and rounds.
    pub fn sizes(&self) -> &SizeArgs {
        match self {
            Command::Cpu(args) => &args.sizes,
            #[cfg(feature = "cuda")]
            Command::Gpu(args) => &args.sizes,
            #[cfg(feature = "cuda")]
            Command::Ranks(args) => &args.sizes,
        }
    }

    /// Refuses sizes that cannot be timed, and a record that cannot be written.
    ///
    /// # Errors
    /// [`CommandError::Usage`], naming the flag; [`CommandError::Write`].
    pub fn check(&self) -> Result<(), CommandError> {
        self.sizes().json.iter().try_for_each(|path| try_path(path))?;
        match self {
            Command::Cpu(_) => Ok(()),
            #[cfg(feature = "cuda")]
            Command::Gpu(args) => cuda::check(self.sizes(), args.fp8),
            #[cfg(feature = "cuda")]
            Command::Ranks(args) => args.check().and_then(|()| cuda::check(self.sizes(), false)),
        }
    }
}

#[cfg(feature = "cuda")]
mod cuda {
    use super::{FILTER_ROWS, ROWS};
    use clap::{Args, ValueEnum};
    use flash_sampling_cli::args::{BenchSize, HEAD, HeadSize, SizeArgs};
    use flash_sampling_cli::error::CommandError;
    use std::path::PathBuf;

    /// Flags of `gpu`.
    #[derive(Clone, Debug, Args)]
    pub struct GpuArgs {
        /// Time filters, penalties and masks against the plain draw instead (default rows: 1,16,64).
        #[arg(long, conflicts_with = "portable")]
        pub filters: bool,
        /// Time the portable kernel too, and the draw that stores its logits.
        #[arg(long)]
        pub portable: bool,
        /// Time draws from a shadow of the weight too.
        #[arg(long, conflicts_with = "filters")]
        pub shadow: bool,
        /// Time draws from the weight rounded to fp8, with a scale for each row, too.
        #[arg(long, conflicts_with = "filters")]
        pub fp8: bool,
        /// Times of other programs on the same machine, one JSON object a line with V, D, B, peer, min_us and med_us,
        /// for the table. With --filters these are times of LLM-like rows; a name that ends in ": " and the name of a
        /// case, such as ": top-p 0.95", is compared with that case.
        #[arg(long, value_name = "FILE")]
        pub peers: Option<PathBuf>,
        /// Heads, batches and rounds.
        #[command(flatten)]
        pub sizes: SizeArgs,
    }

    /// Flags of `ranks`.
    #[derive(Clone, Debug, Args)]
    pub struct RankArgs {
        /// How draws cross between GPUs.
        #[arg(long, value_enum, value_delimiter = ',', default_value = "peers")]
        pub transport: Vec<GpuTransport>,
        /// Number of GPUs.
        #[arg(long, value_name = "N", default_value_t = 2, value_parser = clap::value_parser!(u8).range(1..=32))]
        pub world: u8,
        /// Time whole calls with filters, penalties and masks instead, against one GPU (default rows: 1,16,64).
        #[arg(long)]
        pub filters: bool,
        /// Heads and batches.
        #[command(flatten)]
        pub sizes: SizeArgs,
    }

    /// How draws cross between GPUs.
    #[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
    pub enum GpuTransport {
        /// Stores to the memory of the other GPUs.
        Peers,
        /// One max all-reduce of NCCL (feature nccl).
        Nccl,
    }

    /// Qwen3-8B, Llama-3.3-70B, Qwen3-1.7B, gpt-oss.
    const HEADS: [HeadSize; 4] = [
        HEAD,
        HeadSize { vocab: 128_256, hidden: 8192 },
        HeadSize { vocab: 151_936, hidden: 2048 },
        HeadSize { vocab: 201_088, hidden: 2880 },
    ];

    fn sizes(sizes: &SizeArgs, filters: bool) -> Vec<BenchSize> {
        sizes.sizes(&HEADS, if filters { &FILTER_ROWS } else { &ROWS }, 100)
    }

    impl GpuArgs {
        /// The sizes to time.
        pub fn sizes(&self) -> Vec<BenchSize> {
            sizes(&self.sizes, self.filters)
        }
    }

    impl RankArgs {
        /// The sizes to time.
        pub fn sizes(&self) -> Vec<BenchSize> {
            sizes(&self.sizes, self.filters)
        }

        pub(super) fn check(&self) -> Result<(), CommandError> {
            if self.sizes.rounds.is_some() {
                return Err(CommandError::usage("--rounds means nothing for ranks"));
            }
            let lacks_nccl = self.transport.contains(&GpuTransport::Nccl) && cfg!(not(feature = "nccl"));
            if lacks_nccl { Err(flash_sampling::BuildError::NotBuilt { feature: "nccl" }.into()) } else { Ok(()) }
        }
    }

    /// Refuses sizes that the fused kernel does not support.
    pub(super) fn check(args: &SizeArgs, fp8: bool) -> Result<(), CommandError> {
        let refused = [
            ("--dtype f32: the fused kernel takes bf16 and f16", args.dtype == flash_sampling::DType::F32),
            ("--fp8: the hidden states must be bf16", fp8 && args.dtype != flash_sampling::DType::BF16),
            ("--rows: one launch takes at most 256", args.rows.iter().any(|&rows| rows > 256)),
            ("--heads: the hidden size must be a multiple of 8", args.heads.iter().any(|head| head.hidden % 8 != 0)),
        ];
        match refused.into_iter().find(|(_, refused)| *refused) {
            Some((why, _)) => Err(CommandError::usage(format!("cannot be timed on a GPU: {why}"))),
            None => Ok(()),
        }
    }
}
