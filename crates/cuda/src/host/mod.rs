//! The samplers over host memory: core's trait on top of the entry points over device memory.
//!
//! `tiled`, `grouped` and `online` are one `frame` with what each can do: rows are packed (`staging`, lists and masks as
//! `gathered`), drawn by a head that stays on the GPU (`resident`), and those that ask for more are answered from stored
//! logits (`answers`, `filtered` for filters, `raw` for raw log-probabilities). `standalone` takes logits, `streamed` a
//! weight that comes in blocks. `shared` borrows weight and hidden states in device memory. `exchange` makes one draw of
//! the draws of several GPUs; `together` says which rows with filters these decide.

pub(crate) mod device_sampler;
pub(crate) mod exchange;
pub(crate) mod filtered;
pub(crate) mod grouped;
pub(crate) mod host_sampler;
pub(crate) mod online;
pub(crate) mod pinned_items;
pub(crate) mod raw;
pub(crate) mod results;
pub(crate) mod sharded;
pub(crate) mod staging;
pub(crate) mod standalone;
pub(crate) mod stored_results;
pub(crate) mod streamed;
pub(crate) mod tiled;
pub(crate) mod uploaded_head;

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
