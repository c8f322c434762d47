//! Flags of `bench`.

use crate::sampler::{GROUP, SHARDS};
use clap::{Args, ValueEnum};
use flash_sampling::{CpuOptions, DType, GroupDraw, Isa, ShardMerge, VariantConfig};
use std::path::PathBuf;

/// Flags of `bench`.
#[derive(Clone, Debug, Args)]
pub struct BenchArgs {
    /// Tokens of the head.
    #[arg(long, value_name = "N", default_value = "151936", value_parser = clap::value_parser!(u32).range(1..))]
    pub vocab: u32,
    /// Hidden size of the head.
    #[arg(long, value_name = "N", default_value = "4096", value_parser = clap::value_parser!(u32).range(1..))]
    pub hidden: u32,
    /// Rows of the batches.
    #[arg(
        long,
        value_name = "A,B,...",
        value_delimiter = ',',
        default_values_t = [1, 2, 4, 8, 16, 32, 64, 128, 256],
        value_parser = clap::value_parser!(u32).range(1..=4096)
    )]
    pub rows: Vec<u32>,
    /// Element type of the weight and the hidden states.
    #[arg(long, value_enum, default_value_t = Type::Bf16)]
    pub dtype: Type,
    /// The variants to time.
    #[arg(long, value_enum, value_delimiter = ',', default_values_t = [Timed::Tiled, Timed::Grouped, Timed::Online, Timed::Sharded])]
    pub variants: Vec<Timed>,
    /// Threads (default: one for each processor).
    #[arg(long, value_name = "N")]
    pub threads: Option<usize>,
    /// Instruction set (default: the fastest that there is).
    #[arg(long, value_name = "ISA")]
    pub isa: Option<Isa>,
    /// Rounds; the best of them counts.
    #[arg(long, value_name = "N", default_value_t = 9, value_parser = rounds)]
    pub rounds: usize,
    /// A small head, few rows and two rounds, to see that everything runs; the figures mean nothing.
    #[arg(long)]
    pub quick: bool,
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

fn rounds(text: &str) -> Result<usize, String> {
    match text.parse() {
        Ok(n @ 1..=10_000) => Ok(n),
        _ => Err("it must be 1 to 10000".into()),
    }
}

impl BenchArgs {
    /// What is timed.
    pub fn size(&self) -> BenchSize {
        if self.quick {
            return BenchSize { vocab: 4096, hidden: 256, rows: vec![1, 4], rounds: 2 };
        }
        let rows = self.rows.iter().map(|&rows| rows as usize).collect();
        BenchSize { vocab: self.vocab as usize, hidden: self.hidden as usize, rows, rounds: self.rounds }
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
        self.variants.iter().map(config).collect()
    }
}
