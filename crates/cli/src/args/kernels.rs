//! Flags of `kernels`.

use crate::args::values::whole;
use clap::{Args, Subcommand};
use std::path::PathBuf;

/// Subcommand of `kernels`.
#[derive(Debug, Subcommand)]
pub enum KernelsCommand {
    /// Compile the CUDA kernels ahead of time, for hosts with a driver and no compiler. Needs NVRTC and no GPU.
    Build(KernelsBuildArgs),
}

/// Flags of `kernels build`.
#[derive(Debug, Args)]
pub struct KernelsBuildArgs {
    /// GPU architectures; `a` after the number means this compute capability only, with all its instructions.
    #[arg(long, value_name = "A,B,...", value_delimiter = ',', default_values_t = ["sm_80", "sm_90a", "sm_100a", "sm_120a"].map(String::from))]
    pub arch: Vec<String>,
    /// Source files, such as select.cu (default: all).
    #[arg(long, value_name = "A,B,...", value_delimiter = ',')]
    pub kernel: Vec<String>,
    /// Definitions of the instances to leave out, such as OPERAND=F16 (default: none).
    #[arg(long, value_name = "A,B,...", value_delimiter = ',')]
    pub skip: Vec<String>,
    /// Output folder (default: the cache). The host sets FLASH_SAMPLING_KERNELS to this folder.
    #[arg(long, value_name = "DIR")]
    pub out: Option<PathBuf>,
    /// Number of parallel compilations (default: one per processor).
    #[arg(long, value_name = "N", value_parser = whole(1..=256_u16))]
    pub jobs: Option<u16>,
    /// Compile all kernels, also those in the folder.
    #[arg(long, conflicts_with = "check")]
    pub force: bool,
    /// Compile all kernels and print the resources of each. The exit code is 1 if a kernel on the hot path spills registers,
    /// has local memory or serialises wgmma, or if any kernel has instructions that the assembler is known to encode wrongly.
    #[arg(long)]
    pub check: bool,
}
