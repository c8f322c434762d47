//! Flags of `bench`.

use super::BackendName;
use super::sampler::MAX_THREADS;
use super::values::whole;
use crate::error::CommandError;
use crate::sampler::SHARDS;
use clap::{Args, ValueEnum};
use flash_sampling::{BuildError, CpuOptions, DType, GroupDraw, Isa, ShardMerge, VariantConfig};
use std::path::PathBuf;
use std::str::FromStr;

/// Tokens of a group.
const GROUP: u32 = 512;

/// Flags of `bench`.
#[derive(Clone, Debug, Args)]
pub struct BenchArgs {
    /// What is timed: the variants of the CPU, or the fused kernel on a GPU against cuBLAS.
    #[arg(long, value_enum, default_value_t = BackendName::Cpu)]
    pub backend: BackendName,
    /// Tokens of the head (default 151936).
    #[arg(long, value_name = "N", value_parser = whole(1..=u32::MAX), allow_negative_numbers = true)]
    pub vocab: Option<u32>,
    /// Hidden size of the head (default 4096).
    #[arg(long, value_name = "N", value_parser = whole(1..=u32::MAX), allow_negative_numbers = true)]
    pub hidden: Option<u32>,
    /// Several heads, tokens x hidden size (default with --backend cuda: 151936x4096,128256x8192,151936x2048,201088x2880).
    #[arg(long, value_name = "VxD,...", value_delimiter = ',', conflicts_with_all = ["vocab", "hidden"])]
    pub heads: Vec<HeadSize>,
    /// Rows of the batches (default 1,2,4,8,16,32,64,128,256; with --pipeline 1,16,64).
    #[arg(
        long,
        value_name = "A,B,...",
        value_delimiter = ',',
        value_parser = whole(1..=4096_u32),
        allow_hyphen_values = true
    )]
    pub rows: Vec<u32>,
    /// Time filters, penalties and masks against the plain draw, and count how many rows one pass decides.
    #[arg(long, conflicts_with_all = ["variants", "svg"])]
    pub pipeline: bool,
    /// Element type of the weight and the hidden states.
    #[arg(long, value_enum, default_value_t = Type::Bf16)]
    pub dtype: Type,
    /// The variants to time (default: all); for the CPU.
    #[arg(long, value_enum, value_delimiter = ',')]
    pub variants: Vec<Timed>,
    /// Threads (default: one for each processor); for the CPU.
    #[arg(long, value_name = "N", value_parser = whole(1..=MAX_THREADS), allow_negative_numbers = true)]
    pub threads: Option<usize>,
    /// Instruction set (default: the fastest that there is); for the CPU.
    #[arg(long, value_name = "ISA")]
    pub isa: Option<Isa>,
    /// Rounds; the best of them counts (default 9; with --backend cuda twice 100, a quarter as many before to warm up).
    #[arg(long, value_name = "N", value_parser = whole(1..=10_000_usize), allow_negative_numbers = true)]
    pub rounds: Option<usize>,
    /// A small head, few rows and two rounds, to see that everything runs; the figures mean nothing.
    #[arg(long, conflicts_with_all = ["vocab", "hidden", "heads", "rows", "rounds"])]
    pub quick: bool,
    /// Time all contenders by turns without a pause: a GPU under sustained load, clocks as they then are; for
    /// --backend cuda.
    #[arg(long)]
    pub sustained: bool,
    /// Let each call find a cache of lines that were read, as the layers before the head leave it, in place of lines that
    /// were written and are not yet in memory; for --backend cuda.
    #[arg(long)]
    pub clean_cache: bool,
    /// Time the portable kernel too, and what it costs there to keep the logits; for --backend cuda.
    #[arg(long)]
    pub portable: bool,
    /// Times of other programs on the same machine, one JSON object a line with V, D, B, peer, min_us and med_us: shown
    /// beside ours; for --backend cuda. With --pipeline they are times on LLM-like rows, and a name that ends in ": " and
    /// a case's name, such as ": top-p 0.95", is set against that case.
    #[arg(long, value_name = "FILE")]
    pub peers: Option<PathBuf>,
    /// Time a step on several GPUs, one rank each, by each of these ways for draws to cross, against one GPU and (with
    /// nccl) against gathering logits; with --pipeline whole calls with filters against one GPU; for --backend cuda.
    #[arg(long, value_enum, value_delimiter = ',')]
    pub transport: Vec<GpuTransport>,
    /// Number of GPUs; for --transport.
    #[arg(long, value_name = "N", default_value_t = 2, value_parser = whole(1..=32_usize), requires = "transport")]
    pub world: usize,
    /// Write the record as JSON.
    #[arg(long, value_name = "FILE")]
    pub json: Option<PathBuf>,
    /// Write the picture as SVG.
    #[arg(long, value_name = "FILE")]
    pub svg: Option<PathBuf>,
}

/// Element types.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum Type {
    /// bfloat16.
    Bf16,
    /// IEEE half precision.
    F16,
    /// IEEE single precision.
    F32,
}

impl From<Type> for DType {
    fn from(dtype: Type) -> Self {
        match dtype {
            Type::Bf16 => DType::BF16,
            Type::F16 => DType::F16,
            Type::F32 => DType::F32,
        }
    }
}

/// How draws cross between GPUs.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum GpuTransport {
    /// Stores to the memory of the other GPUs.
    Peers,
    /// One max all-reduce of NCCL (feature nccl).
    Nccl,
}

/// A variant to time.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum Timed {
    /// Fused tiled.
    Tiled,
    /// Groups of 512 with fresh outer noise.
    Grouped,
    /// Groups of 512 through the binary merge.
    Online,
    /// Four shards merged by winners.
    Sharded,
}

/// The size of a head, `VxD`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct HeadSize {
    /// Tokens.
    pub vocab: u32,
    /// Hidden size.
    pub hidden: u32,
}

impl FromStr for HeadSize {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let number = |text: &str| text.parse().ok().filter(|&n: &u32| n > 0);
        let pair = text.split_once('x').and_then(|(vocab, hidden)| Some((number(vocab)?, number(hidden)?)));
        let (vocab, hidden) = pair.ok_or("it must be tokens x hidden size, as 151936x4096")?;
        Ok(HeadSize { vocab, hidden })
    }
}

/// The heads that a GPU is timed on, those of the paper among them: Qwen3-8B, Llama-3.3-70B, Qwen3-1.7B, gpt-oss.
const HEADS: [HeadSize; 4] = [
    HeadSize { vocab: 151_936, hidden: 4096 },
    HeadSize { vocab: 128_256, hidden: 8192 },
    HeadSize { vocab: 151_936, hidden: 2048 },
    HeadSize { vocab: 201_088, hidden: 2880 },
];

/// What is timed, after `--quick`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct BenchSize {
    /// Tokens.
    pub vocab: usize,
    /// Hidden size.
    pub hidden: usize,
    /// Rows of the batches.
    pub rows: Vec<usize>,
    /// Rounds.
    pub rounds: usize,
}

impl BenchArgs {
    /// The heads to time; one at least.
    pub fn sizes(&self) -> Vec<BenchSize> {
        let cuda = self.backend == BackendName::Cuda;
        if self.quick {
            return vec![BenchSize { vocab: 4096, hidden: 256, rows: vec![1, 4], rounds: 2 }];
        }
        let one =
            HeadSize { vocab: self.vocab.unwrap_or(HEADS[0].vocab), hidden: self.hidden.unwrap_or(HEADS[0].hidden) };
        let heads = match () {
            () if !self.heads.is_empty() => self.heads.clone(),
            () if cuda && self.vocab.is_none() && self.hidden.is_none() => HEADS.to_vec(),
            () => vec![one],
        };
        let rows: Vec<usize> = match () {
            () if !self.rows.is_empty() => self.rows.iter().map(|&rows| rows as usize).collect(),
            () if self.pipeline => vec![1, 16, 64],
            () => (0..9).map(|power| 1 << power).collect(),
        };
        let rounds = self.rounds.unwrap_or(if cuda { 100 } else { 9 });
        let size = |head: HeadSize| BenchSize {
            vocab: head.vocab as usize,
            hidden: head.hidden as usize,
            rows: rows.clone(),
            rounds,
        };
        heads.into_iter().map(size).collect()
    }

    /// The first head to time.
    pub fn size(&self) -> BenchSize {
        self.sizes().remove(0)
    }

    /// Refuses flags that mean nothing to the backend, and sizes that it cannot time.
    ///
    /// # Errors
    /// [`CommandError::Usage`], naming the flag.
    pub fn check(&self) -> Result<(), CommandError> {
        let cuda = self.backend == BackendName::Cuda;
        let ranks = !self.transport.is_empty();
        let (on_gpus, on_cpus) = ("with --backend cuda", "without --backend cuda");
        let idle = [
            ("--variants", cuda && !self.variants.is_empty(), on_gpus),
            ("--threads", cuda && self.threads.is_some(), on_gpus),
            ("--isa", cuda && self.isa.is_some(), on_gpus),
            ("--sustained", !cuda && self.sustained, on_cpus),
            ("--clean-cache", !cuda && self.clean_cache, on_cpus),
            ("--portable", !cuda && self.portable, on_cpus),
            ("--peers", !cuda && self.peers.is_some(), on_cpus),
            ("--transport", !cuda && ranks, on_cpus),
            ("--sustained", ranks && self.sustained, "with --transport"),
            ("--clean-cache", ranks && self.clean_cache, "with --transport"),
            ("--portable", ranks && self.portable, "with --transport"),
            ("--peers", ranks && self.peers.is_some(), "with --transport"),
            ("--rounds", ranks && self.rounds.is_some(), "with --transport"),
            ("--svg", ranks && self.svg.is_some(), "with --transport"),
            ("--portable", self.pipeline && self.portable, "with --pipeline"),
        ];
        if let Some((flag, _, beside)) = idle.into_iter().find(|(_, idle, _)| *idle) {
            return Err(CommandError::usage(format!("{flag} means nothing {beside}")));
        }
        let sizes = self.sizes();
        let refused = [
            ("--dtype f32: the fused kernel takes bf16 and f16", self.dtype == Type::F32),
            ("--rows: one launch takes at most 256", sizes.iter().any(|size| size.rows.iter().any(|&rows| rows > 256))),
            ("--hidden: the benchmark takes multiples of 8", sizes.iter().any(|size| size.hidden % 8 != 0)),
        ];
        match refused.into_iter().find(|(_, refused)| cuda && *refused) {
            Some((why, _)) => Err(CommandError::usage(format!("cannot be timed on a GPU: {why}"))),
            None if self.transport.contains(&GpuTransport::Nccl) && cfg!(not(feature = "nccl")) => {
                Err(BuildError::NotBuilt { feature: "nccl" }.into())
            }
            None => self.backend.check_built(),
        }
    }

    /// Instruction set and threads.
    pub fn options(&self) -> CpuOptions {
        CpuOptions { isa: self.isa, threads: self.threads }
    }

    /// The variants, with the names that tables show.
    pub fn variants(&self) -> Vec<(String, VariantConfig)> {
        let config = |variant: &Timed| match variant {
            Timed::Tiled => ("tiled".into(), VariantConfig::Tiled),
            Timed::Grouped => ("grouped".into(), VariantConfig::Grouped { size: GROUP, draw: GroupDraw::Fresh }),
            Timed::Online => ("online".into(), VariantConfig::Online { size: GROUP }),
            Timed::Sharded => {
                (format!("{SHARDS} shards"), VariantConfig::Sharded { shards: SHARDS, merge: ShardMerge::Winners })
            }
        };
        let all = [Timed::Tiled, Timed::Grouped, Timed::Online, Timed::Sharded];
        if self.variants.is_empty() { all.iter() } else { self.variants.iter() }.map(config).collect()
    }
}
