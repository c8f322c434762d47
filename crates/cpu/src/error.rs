//! Why a sampler of this crate cannot be planned.

use crate::isa::Isa;
use flash_sampling_core::{DType, HeadError, Knob};

/// Errors of planning.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum CpuError {
    /// The instruction set that was asked for is not there.
    #[error("this machine has no {isa}; it has {}", names(.available))]
    IsaUnavailable {
        /// What was asked for.
        isa: Isa,
        /// What there is.
        available: Vec<Isa>,
    },
    /// A number of threads that cannot be meant.
    #[error("{threads} threads cannot be used: it must be 1 to {limit}")]
    ThreadCount {
        /// What was asked for.
        threads: usize,
        /// The largest number.
        limit: usize,
    },
    /// The thread pool could not be started.
    #[error("the thread pool could not be started")]
    Threads(#[from] rayon::ThreadPoolBuildError),
    /// Groups are multiples of 64 tokens.
    #[error("a group of {size} tokens cannot be used: it must be a positive multiple of 64")]
    GroupSize {
        /// What was asked for.
        size: u32,
    },
    /// The plan asks for what this variant cannot do.
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
    /// The plan asks for more scratch than any call could need.
    #[error("the plan's {knob} is {asked}; at most {limit} can be planned for")]
    PlanSize {
        /// The knob of the plan.
        knob: Knob,
        /// The plan's value.
        asked: u64,
        /// The largest there can be.
        limit: u64,
    },
    /// A plan is resumed over a weight that it was not made for; rows, columns and type of both.
    #[error("planned for a weight of (rows, columns, type) {planned:?}, but this one has {found:?}")]
    OtherWeight {
        /// The weight of the plan.
        planned: (usize, usize, DType),
        /// The weight that was brought.
        found: (usize, usize, DType),
    },
    /// The head cannot be used.
    #[error(transparent)]
    Head(#[from] HeadError),
}

fn names(isas: &[Isa]) -> String {
    isas.iter().map(|isa| isa.name()).collect::<Vec<_>>().join(", ")
}
