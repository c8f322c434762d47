//! The samplers: core's trait on top of the entry points over device memory.
//!
//! A sampler is core's driver over the passes of a `row_scan`, which launches kernels through a source of logits: a head
//! on the GPU (`head_sampler`), or existing logits (`logits`). The head was uploaded (`tiled`, `grouped`, `online`) or is
//! in the caller's memory (`device_sampler`), and so may be the hidden states. Rows are packed by `staging`, lists and masks
//! as `pinned_items`. `streamed` takes a weight that comes in blocks.

pub(crate) mod device_sampler;
pub(crate) mod grouped;
pub(crate) mod head_sampler;
pub(crate) mod impl_sampler;
pub(crate) mod logits;
pub(crate) mod online;
pub(crate) mod pinned_items;
pub(crate) mod row_encoder;
pub(crate) mod row_scan;
pub(crate) mod staging;
pub(crate) mod streamed;
pub(crate) mod tiled;

use crate::error::CudaError;
use flash_sampling_core::{Knob, Plan};

/// Refuses plans without rows or draws, and canonical ones where none `can_be`.
fn check_plan(plan: &Plan, can_be: bool) -> Result<(), CudaError> {
    match plan {
        Plan { canonical: true, .. } if !can_be => Err(CudaError::Unsupported { knob: Knob::Canonical }),
        Plan { max_rows: 0, .. } => Err(CudaError::EmptyPlan { knob: Knob::MaxRows }),
        Plan { max_draws: 0, .. } => Err(CudaError::EmptyPlan { knob: Knob::Draws }),
        _ => Ok(()),
    }
}
