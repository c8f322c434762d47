//! Flags that choose backend and variant, in the text form of the library's configuration.
#![allow(rustdoc::broken_intra_doc_links)] // these comments are the help texts, and brackets their optional parts

use clap::Args;
use flash_sampling::{Backend, BackendConfig, CpuOptions, Plan, VariantConfig};
use std::path::{Path, PathBuf};

/// Backend and variant.
#[derive(Clone, Debug, Args)]
#[command(next_help_heading = "Backend and variant")]
pub struct SamplerArgs {
    /// Where the sampler runs: cpu[:ISA[:THREADS]], cuda[:DEVICE], or reference, the slow float64 definition. ISA is
    /// portable, avx2, avx512, avx512bf16, amx or neon (default: the fastest of this machine). `cpu::4` has four
    /// threads (default: one per processor).
    #[arg(long, default_value = "cpu")]
    pub backend: Backend,
    /// Algorithm: tiled, grouped:SIZE, online:SIZE or sharded:SHARDS[:log-mass]. SIZE is the number of tokens of a
    /// group, a multiple of 64. tiled and sharded draw the same tokens; grouped, online and sharded
    /// with :log-mass draw others from the same distribution.
    #[arg(long, default_value = "tiled")]
    pub variant: VariantConfig,
    /// Use a shadow: an 8-bit copy of the weight, in addition to the weight; a bf16 head then takes 1.5 times the memory.
    /// FILE is a file that `flash-sampling shadow` wrote; without FILE, the copy is made at the start. Calls of few rows
    /// read the copy instead of the weight, if they have no log-probabilities, and no filters or a first filter that is
    /// min-p or a small top-k. The draws are the same; docs/shadow.md has the times by processor, rows and filters. The
    /// flag needs a weight in bf16, f16 or f32, and a variant that draws the same tokens as tiled.
    #[arg(long, value_name = "FILE", num_args = 0..=1)]
    pub shadow: Option<Option<PathBuf>>,
}

impl SamplerArgs {
    /// The flags as a configuration.
    pub fn config(&self, plan: Plan) -> BackendConfig {
        let shadow = self.shadow.is_some();
        BackendConfig { backend: self.backend.clone(), variant: self.variant.clone(), plan, shadow }
    }

    /// The file of `--shadow FILE`.
    pub fn shadow_file(&self) -> Option<&Path> {
        self.shadow.as_ref()?.as_deref()
    }

    /// Threads and instruction set of the CPU; the defaults for another backend.
    pub fn cpu(&self) -> CpuOptions {
        if let Backend::Cpu(options) = self.backend { options } else { CpuOptions::default() }
    }
}
