//! Why there is no CUDA sampler, or why a call failed.

use crate::probe::Probe;
use core::time::Duration;
use cudarc::driver::DriverError;
use flash_sampling_core::Knob;
use std::path::PathBuf;

/// Why there is no CUDA sampler, or why a call failed.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum CudaError {
    /// The machine lacks a library or a GPU; the probe says what was found.
    #[error("CUDA is unavailable: {reason} (on this machine: {probe})")]
    Unavailable {
        /// What is missing.
        reason: String,
        /// What was looked for and found.
        probe: Box<Probe>,
    },
    /// The run-time compiler's library cannot be loaded, and the work is compiling.
    #[error("the compiler library libnvrtc cannot be loaded; tried on the loader's path: {}", .tried.join(", "))]
    NoCompiler {
        /// The names that were tried.
        tried: Vec<String>,
    },
    /// The GPU is too old for the kernels.
    #[error("compute capability {major}.{minor} has no kernel; 8.0 and up have")]
    Architecture {
        /// Major number.
        major: i32,
        /// Minor number.
        minor: i32,
    },
    /// The driver failed.
    #[error("the CUDA driver failed to {action}: {name} ({code})")]
    Driver {
        /// What was being done.
        action: &'static str,
        /// The driver's code, a `CUresult`.
        code: u32,
        /// The code's name.
        name: String,
    },
    /// A folder for compiled kernels cannot be used.
    #[error("kernels cannot be kept in {}: {reason}", folder.display())]
    Folder {
        /// The folder.
        folder: PathBuf,
        /// What the system says.
        reason: String,
    },
    /// NCCL failed.
    #[error("NCCL failed to {action}: {name}")]
    Nccl {
        /// What was being done.
        action: &'static str,
        /// The library's code by name.
        name: String,
    },
    /// A text that names no group of NCCL.
    #[error("a group of NCCL is named by 256 hexadecimal digits")]
    NcclId,
    /// No group of NCCL is named where one was looked for.
    #[error("{place} names no group of NCCL: {reason}")]
    NoNcclId {
        /// The file or the environment variable.
        place: String,
        /// What the system says, or what is wrong with the text.
        reason: String,
    },
    /// The run-time compiler refused a kernel.
    #[error("the CUDA compiler refused {kernel} (code {code}): {log}")]
    Compile {
        /// The kernel's file.
        kernel: &'static str,
        /// The compiler's code, an `nvrtcResult`.
        code: u32,
        /// What the compiler said.
        log: String,
    },
    /// A knob of the plan that the sampler cannot do.
    #[error("{knob} is not supported by this CUDA sampler; `CudaTiled` has it")]
    Unsupported {
        /// The knob.
        knob: Knob,
    },
    /// The head cannot be used.
    #[error(transparent)]
    Head(#[from] flash_sampling_core::HeadError),
    /// Groups are multiples of 64 tokens.
    #[error("a group of {size} tokens cannot be used: it must be a positive multiple of 64")]
    GroupSize {
        /// What was asked for.
        size: u32,
    },
    /// The plan has none of something.
    #[error("{knob} of the plan is 0")]
    EmptyPlan {
        /// The knob.
        knob: Knob,
    },
    /// More than the kernels can index, or than was planned.
    #[error("{found} {what} are more than the kernel's {limit}")]
    TooLarge {
        /// Tokens, columns, rows or draws.
        what: &'static str,
        /// How many there are.
        found: usize,
        /// The limit.
        limit: usize,
    },
    /// A kernel wrote what it cannot have written; the driver reported nothing.
    #[error("the GPU returned {what} that no row has")]
    Corrupt {
        /// What was returned.
        what: &'static str,
    },
    /// A rank cannot be part of the group.
    #[error("rank {rank} {what}")]
    Rank {
        /// The rank.
        rank: usize,
        /// What is wrong with it.
        what: String,
    },
    /// Ranks did not come to an exchange in time: they hang, were stopped, or died. The group is of no further use.
    #[error("{} did not come to the exchange within {limit:?}", list(ranks))]
    LateRanks {
        /// The ranks, ascending; none where they are not known.
        ranks: Vec<usize>,
        /// The time limit.
        limit: Duration,
    },
    /// A rank was called with other rows or parameters than this one.
    #[error("{} was called with other parameters{}", one(rank), .row.map_or(String::new(), |row| format!(" for row {row}")))]
    OtherCall {
        /// The rank, where that is known.
        rank: Option<usize>,
        /// The row, where that is known; the first that was drawn, where what differs is the type of hidden states, a row's
        /// lists, filters or penalties.
        row: Option<usize>,
    },
    /// A call that an exchange between GPUs does not carry: log-probabilities, lists without replacement, canonical draws; or
    /// filters where its ranks do not decide them.
    #[error("the exchange between GPUs does not carry the call: {reason}")]
    NotTogether {
        /// What is asked for, or what there is not.
        reason: &'static str,
    },
    /// A matrix in device memory that no kernel can read.
    #[error("the {what} in device memory cannot be used: {reason}")]
    Layout {
        /// Weight, bias, hidden states, logits, operands, rows, filters, draws, sources or log Z.
        what: &'static str,
        /// What is wrong.
        reason: &'static str,
    },
}

fn list(ranks: &[usize]) -> String {
    let ranks: Vec<_> = ranks.iter().map(usize::to_string).collect();
    match ranks.as_slice() {
        [] => "a rank".into(),
        [rank] => format!("rank {rank}"),
        ranks => format!("ranks {}", ranks.join(", ")),
    }
}

fn one(rank: &Option<usize>) -> String {
    list(rank.as_slice())
}

impl CudaError {
    /// For `map_err`: the driver's error, with what was being done.
    pub(crate) fn driver(action: &'static str) -> impl Fn(DriverError) -> CudaError {
        move |DriverError(code)| CudaError::Driver { action, code: code as u32, name: format!("{code:?}") }
    }

    pub(crate) fn unavailable(reason: impl Into<String>) -> CudaError {
        CudaError::Unavailable { reason: reason.into(), probe: Box::new(Probe::of_this_machine()) }
    }
}
