//! The errors of CUDA samplers.

use core::time::Duration;
use cudarc::driver::DriverError;
use flash_sampling_core::{Knob, SampleError};
use std::path::PathBuf;

/// An error of a CUDA sampler's construction or of a call.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum CudaError {
    /// The machine lacks a library or a GPU.
    #[error("CUDA is unavailable: {reason}")]
    Unavailable {
        /// What is missing.
        reason: String,
    },
    /// The run-time compiler's library cannot be loaded, and a kernel must be compiled.
    #[error("the compiler library libnvrtc cannot be loaded; tried on the loader's path: {}", .tried.join(", "))]
    NoCompiler {
        /// The names that were tried.
        tried: Vec<String>,
    },
    /// The GPU is too old for the kernels.
    #[error("compute capability {major}.{minor} is not supported: the kernels need 8.0 or higher")]
    Architecture {
        /// Major number.
        major: i32,
        /// Minor number.
        minor: i32,
    },
    /// The driver failed.
    #[error("the CUDA driver failed to {action}: {name} ({code})")]
    Driver {
        /// The failed action.
        action: &'static str,
        /// The driver's code, a `CUresult`.
        code: u32,
        /// The code's name.
        name: String,
    },
    /// The folder for compiled kernels is unusable.
    #[error("kernels cannot be stored in {}: {reason}", folder.display())]
    Folder {
        /// The folder.
        folder: PathBuf,
        /// The system's error.
        reason: String,
    },
    /// NCCL failed.
    #[error("NCCL failed to {action}: {name}")]
    Nccl {
        /// The failed action.
        action: &'static str,
        /// The name of NCCL's error code.
        name: String,
    },
    /// The run-time compiler rejected a kernel.
    #[error("the CUDA compiler rejected {kernel} (code {code}): {log}")]
    Compile {
        /// The kernel's file.
        kernel: &'static str,
        /// The compiler's code, an `nvrtcResult`.
        code: u32,
        /// The compiler's log.
        log: String,
    },
    /// The sampler does not support a knob of the plan.
    #[error("{knob} is not supported by this CUDA sampler; `CudaTiled` supports it")]
    Unsupported {
        /// The knob.
        knob: Knob,
    },
    /// The head is unsupported.
    #[error(transparent)]
    Head(#[from] flash_sampling_core::HeadError),
    /// The group size is not a positive multiple of 64 tokens.
    #[error("a group of {size} tokens cannot be used: it must be a positive multiple of 64")]
    GroupSize {
        /// The requested size.
        size: u32,
    },
    /// A limit of the plan is 0.
    #[error("{knob} of the plan is 0")]
    EmptyPlan {
        /// The knob.
        knob: Knob,
    },
    /// A size exceeds the kernels' limit or the plan.
    #[error("{found} {what} exceed the limit of {limit}")]
    TooLarge {
        /// Tokens, columns, rows or draws.
        what: &'static str,
        /// The actual size.
        found: usize,
        /// The limit.
        limit: usize,
    },
    /// A kernel's output is impossible, although the driver reports no error.
    #[error("internal error of the CUDA backend: {what}")]
    Corrupt {
        /// The impossible output.
        what: &'static str,
    },
    /// A rank cannot be part of the group.
    #[error("rank {rank} {what}")]
    Rank {
        /// The rank.
        rank: usize,
        /// The reason.
        what: String,
    },
    /// Ranks missed an exchange: they hang, were stopped, or died. The group is unusable.
    #[error("{} did not come to the exchange within {limit:?}", list(ranks))]
    LateRanks {
        /// The ranks, ascending; empty if unknown.
        ranks: Vec<usize>,
        /// The time limit.
        limit: Duration,
    },
    /// A rank's call differs from this rank's call: in rows, parameters, or the type, memory or alignment of hidden
    /// states.
    #[error(
        "{} made another call{}: rows, parameters, or the type, memory or alignment of hidden states differ",
        one(rank),
        at(row)
    )]
    OtherCall {
        /// The rank, if known.
        rank: Option<usize>,
        /// The row, if known. If hidden states, or a row's lists, filters or penalties differ, the first drawn row.
        row: Option<usize>,
    },
    /// The exchange between GPUs does not support a call: log-probabilities, lists without replacement, canonical
    /// draws, or filters that its ranks do not support.
    #[error("the exchange between GPUs does not support the call: {reason}")]
    NotSharded {
        /// The unsupported request, or the missing condition.
        reason: &'static str,
    },
    /// Ranks do not support a parameter or a result in calls that do not wait.
    #[error("calls of ranks that do not wait do not support {knob}; calls that wait do")]
    NotEnqueued {
        /// The parameter, or the requested result.
        knob: Knob,
    },
    /// The kernels cannot read a matrix in device memory.
    #[error("the {what} in device memory cannot be used: {reason}")]
    Layout {
        /// Weight, scales, bias, hidden states, logits, operands, rows, filters, draws, sources, shadow or log Z.
        what: &'static str,
        /// The fault.
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

fn at(row: &Option<usize>) -> String {
    row.map_or(String::new(), |row| format!(" at row {row}"))
}

impl From<CudaError> for SampleError {
    fn from(error: CudaError) -> Self {
        SampleError::Backend { backend: "cuda", source: Box::new(error) }
    }
}

impl CudaError {
    /// Checks sizes against their limits; each entry has a name, the size and the limit.
    pub(crate) fn check_limits(limits: &[(&'static str, usize, usize)]) -> Result<(), CudaError> {
        match limits.iter().find(|(_, found, limit)| found > limit) {
            Some(&(what, found, limit)) => Err(CudaError::TooLarge { what, found, limit }),
            None => Ok(()),
        }
    }

    /// The driver's error during an action, for `map_err`.
    pub(crate) fn driver(action: &'static str) -> impl Fn(DriverError) -> CudaError {
        move |DriverError(code)| CudaError::Driver { action, code: code as u32, name: format!("{code:?}") }
    }

    pub(crate) fn unavailable(reason: impl Into<String>) -> CudaError {
        CudaError::Unavailable { reason: reason.into() }
    }
}
