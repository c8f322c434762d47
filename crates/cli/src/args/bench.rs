//! Flags of `bench`.
#![allow(rustdoc::broken_intra_doc_links)] // these comments are the help texts, and brackets their optional parts

use super::values::{choice, whole};
use crate::bench::cases::Ours;
use clap::Args;
use flash_sampling::{Backend, CpuOptions, DType, Isa, VariantConfig};
use std::path::PathBuf;
use std::str::FromStr;

/// The default variants, without `--variants`.
pub const VARIANTS: [&str; 4] = ["tiled", "grouped:512", "online:512", "sharded:4"];

/// Flags of `bench`.
#[derive(Clone, Debug, Args)]
pub struct BenchArgs {
    /// Where the variants are timed: cpu[:ISA[:THREADS]] (without ISA, other instruction sets of this machine are timed
    /// too) or cuda[:DEVICE].
    #[arg(long, default_value = "cpu")]
    pub backend: Backend,
    /// The variants to time: tiled, grouped:SIZE, online:SIZE or sharded:SHARDS[:log-mass].
    #[arg(long, value_name = "A,B,...", value_delimiter = ',', default_values = VARIANTS)]
    pub variants: Vec<VariantConfig>,
    /// Also time the tiled variant with a shadow, an 8-bit copy of the weight.
    #[arg(long)]
    pub shadow: bool,
    /// Heads, batches and rounds.
    #[command(flatten)]
    pub sizes: SizeArgs,
}

/// Heads, batches and rounds of a benchmark.
#[derive(Clone, Debug, Args)]
pub struct SizeArgs {
    /// Heads, tokens x hidden size.
    #[arg(long, value_name = "VxD,...", value_delimiter = ',')]
    pub heads: Vec<HeadSize>,
    /// Rows of the batches.
    #[arg(
        long,
        value_name = "A,B,...",
        value_delimiter = ',',
        value_parser = whole(1..=4096_u32),
        allow_hyphen_values = true
    )]
    pub rows: Vec<u32>,
    /// Element type of the weight and the hidden states. With a quantised weight, the hidden states are bf16.
    #[arg(long, value_parser = choice(DTYPES), default_value = "bf16")]
    pub dtype: DType,
    /// Rounds; the best of them counts.
    #[arg(long, value_name = "N", value_parser = whole(1..=10_000_usize), allow_negative_numbers = true)]
    pub rounds: Option<usize>,
    /// A small head, few rows and two rounds, to see that everything runs; the figures mean nothing.
    #[arg(long, conflicts_with_all = ["heads", "rows", "rounds"])]
    pub quick: bool,
    /// Write the record as JSON.
    #[arg(long, value_name = "FILE")]
    pub json: Option<PathBuf>,
}

const DTYPES: &[(&str, &str, DType)] = &[
    ("bf16", "bfloat16", DType::BF16),
    ("f16", "IEEE half precision", DType::F16),
    ("f32", "IEEE single precision", DType::F32),
    ("q8_0", "8-bit blocks of GGUF, on CPUs", DType::Q8_0),
    ("q6_k", "6-bit blocks", DType::Q6_K),
    ("q5_k", "5-bit blocks", DType::Q5_K),
    ("q4_k", "4-bit blocks", DType::Q4_K),
    ("q4_0", "4-bit blocks without minima", DType::Q4_0),
    ("iq4_nl", "4-bit blocks with a table", DType::IQ4_NL),
    ("mxfp4", "4-bit floats with a power of two", DType::MXFP4),
];

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

/// The head of Qwen3-8B.
pub const HEAD: HeadSize = HeadSize { vocab: 151_936, hidden: 4096 };

/// The sizes of a benchmark, after `--quick`.
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

impl SizeArgs {
    /// The sizes to time, from the flags or these defaults; one at least.
    pub fn sizes(&self, heads: &[HeadSize], rows: &[u32], rounds: usize) -> Vec<BenchSize> {
        if self.quick {
            return vec![BenchSize { vocab: 4096, hidden: 256, rows: vec![1, 4], rounds: 2 }];
        }
        let heads = if self.heads.is_empty() { heads } else { &self.heads };
        let rows = if self.rows.is_empty() { rows } else { &self.rows };
        let size = |head: &HeadSize| BenchSize {
            vocab: head.vocab as usize,
            hidden: head.hidden as usize,
            rows: rows.iter().map(|&rows| rows as usize).collect(),
            rounds: self.rounds.unwrap_or(rounds),
        };
        heads.iter().map(size).collect()
    }
}

impl BenchArgs {
    /// The sizes to time: by default 9 rounds of 1, 16 and 64 rows.
    pub fn sizes(&self) -> Vec<BenchSize> {
        self.sizes.sizes(&[HEAD], &[1, 16, 64], 9)
    }

    /// The samplers to time: the variants by the fastest or the given instruction set. Without a given one, also the
    /// tiled variant by every other instruction set of this machine.
    pub fn ours(&self) -> Ours {
        let dtype = self.sizes.dtype;
        let is_other = |isa: &Isa| isa.for_types(dtype, dtype) == *isa && *isa != Isa::best_for(dtype, dtype);
        let isas = match self.backend {
            Backend::Cpu(CpuOptions { isa: None, .. }) => Isa::available().into_iter().filter(is_other).collect(),
            _ => Vec::new(),
        };
        Ours { backend: self.backend.clone(), variants: self.variants.clone(), isas, shadow: self.shadow }
    }
}
