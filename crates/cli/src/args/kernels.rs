//! Flags of `kernels`.

use crate::args::Format;
use crate::args::values::whole;
use clap::{Args, Subcommand};
use std::path::PathBuf;

/// What is done with compiled CUDA kernels.
#[derive(Debug, Subcommand)]
pub enum KernelsCommand {
    /// Compile the CUDA kernels ahead of time, for hosts that have a driver and no compiler; needs NVRTC, but no GPU.
    Build(KernelsBuildArgs),
    /// List the compiled kernels of the cache and of the folders that FLASH_SAMPLING_KERNELS names.
    List {
        /// How it is written.
        #[arg(long, value_enum, default_value_t = Format::Text)]
        format: Format,
    },
}

/// Flags of `kernels build`.
#[derive(Debug, Args)]
pub struct KernelsBuildArgs {
    /// What to compile for; `a` after the number: for this compute capability alone, with all that it can do.
    #[arg(long, value_name = "A,B,...", value_delimiter = ',', default_values_t = ["sm_80", "sm_90a", "sm_100a", "sm_120a"].map(String::from))]
    pub arch: Vec<String>,
    /// Files of kernels, as select.cu (default: all).
    #[arg(long, value_name = "A,B,...", value_delimiter = ',')]
    pub kernel: Vec<String>,
    /// The folder to write to (default: the cache); the host names it in FLASH_SAMPLING_KERNELS.
    #[arg(long, value_name = "DIR")]
    pub out: Option<PathBuf>,
    /// Kernels compiled at a time (default: one for each processor).
    #[arg(long, value_name = "N", value_parser = whole(1..=256_u16))]
    pub jobs: Option<u16>,
    /// Compile what the folder has, too.
    #[arg(long, conflicts_with = "check")]
    pub force: bool,
    /// Compile all and print what each kernel takes; exit with code 1 when a kernel that draws wait for spills registers, has
    /// local memory, or serialises wgmma, and when any kernel has instructions that the assembler is known to encode wrongly.
    #[arg(long)]
    pub check: bool,
    /// How the report is written.
    #[arg(long, value_enum, default_value_t = Format::Text)]
    pub format: Format,
}
