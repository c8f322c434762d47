//! The errors of CPU samplers.

use crate::isa::Isa;
use flash_sampling_core::{DType, HeadError, Knob};

/// The reason why a sampler cannot be made from a plan.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum CpuError {
    /// The machine lacks the requested instruction set.
    #[error("this machine has no {isa}; it has {}", names(.available))]
    IsaUnavailable {
        /// The requested instruction set.
        isa: Isa,
        /// The available instruction sets.
        available: Vec<Isa>,
    },
    /// The number of threads is 0 or unreasonably large.
    #[error("{threads} threads cannot be used: it must be 1 to {limit}")]
    ThreadCount {
        /// The requested number.
        threads: usize,
        /// The largest number.
        limit: usize,
    },
    /// The thread pool could not be started.
    #[error("the thread pool could not be started")]
    Threads(#[from] rayon::ThreadPoolBuildError),
    /// The group size is not a positive multiple of 64 tokens.
    #[error("a group of {size} tokens cannot be used: it must be a positive multiple of 64")]
    GroupSize {
        /// The requested size.
        size: u32,
    },
    /// This variant does not support a knob of the plan.
    #[error("{knob} is not supported by this variant; the tiled one has it")]
    Unsupported {
        /// The knob of the plan.
        knob: Knob,
    },
    /// The plan allows no rows, or no draws.
    #[error("the plan's {knob} must be at least 1")]
    EmptyPlan {
        /// The knob of the plan.
        knob: Knob,
    },
    /// The plan needs more scratch than any call can use.
    #[error("the plan's {knob} is {requested}; at most {limit} can be planned for")]
    PlanSize {
        /// The knob of the plan.
        knob: Knob,
        /// The plan's value.
        requested: u64,
        /// The largest possible value.
        limit: u64,
    },
    /// The resumed plan is for a weight of another shape or type.
    #[error("planned for a weight of (rows, columns, type) {planned:?}, but this one has {found:?}")]
    OtherWeight {
        /// The plan's weight: rows, columns, type.
        planned: (usize, usize, DType),
        /// The given weight: rows, columns, type.
        found: (usize, usize, DType),
    },
    /// The head cannot be used.
    #[error(transparent)]
    Head(#[from] HeadError),
}

fn names(isas: &[Isa]) -> String {
    isas.iter().map(|isa| isa.name()).collect::<Vec<_>>().join(", ")
}
