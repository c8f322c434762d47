//! The samplers: the core crate's trait on top of the entry points over device memory.
//!
//! A sampler runs the core crate's driver over the passes of a `row_scan`. The passes launch kernels through a source
//! of logits: a head on the GPU (`head_sampler`), or existing logits (`logit_sampler`). `tiled`, `grouped` and `online`
//! upload the head. `standalone` copies logits from the host. `device_sampler` reads a head, hidden states and logits in
//! the caller's device memory. `staging` packs rows, and `pinned_items` has lists and masks. `streamed` reads a weight in
//! blocks.

pub(crate) mod column_call;
pub(crate) mod device_sampler;
pub(crate) mod grouped;
pub(crate) mod head_sampler;
pub(crate) mod impl_sampler;
pub(crate) mod logit_sampler;
pub(crate) mod online;
pub(crate) mod pinned_items;
pub(crate) mod row_encoder;
pub(crate) mod row_scan;
pub(crate) mod staging;
pub(crate) mod standalone;
pub(crate) mod streamed;
pub(crate) mod tiled;

pub(crate) use column_call::ColumnCall;
pub(crate) use device_sampler::DeviceHidden;
pub(crate) use head_sampler::{HeadSampler, row_stride};
pub(crate) use logit_sampler::LogitSampler;
pub(crate) use row_scan::{CallRows, DrawItem, FilterSource, LogitSource, PassPlace, RowScan, SourcePass, idle};
pub(crate) use staging::Staging;
pub(crate) use tiled::CudaTiled;

use crate::device::DeviceMatrix;
use crate::error::CudaError;
use flash_sampling_core::backend::check_call;
use flash_sampling_core::{DType, Description, Knob, Matrix, Plan, SampleError};

/// Rejects plans without rows or draws, and canonical plans unless `can_be`.
fn check_plan(plan: &Plan, can_be: bool) -> Result<(), CudaError> {
    match plan {
        Plan { canonical: true, .. } if !can_be => Err(CudaError::Unsupported { knob: Knob::Canonical }),
        Plan { max_rows: 0, .. } => Err(CudaError::EmptyPlan { knob: Knob::MaxRows }),
        Plan { max_draws: 0, .. } => Err(CudaError::EmptyPlan { knob: Knob::Draws }),
        _ => Ok(()),
    }
}

/// Checks the size of a call with `params` parameters of rows. Returns an input without rows, because the input of the
/// call is not on the host.
fn check_device_call(input: &DeviceMatrix, params: usize, of: &Description) -> Result<Matrix<'static>, SampleError> {
    let empty = Matrix::from_bytes(&[], DType::F32, 0, input.cols, input.cols).map_err(CudaError::from)?;
    check_call(&empty, &[], &of.shape, &of.plan)?;
    if input.rows != params {
        return Err(SampleError::RowCount { rows: input.rows, params });
    }
    if input.rows > of.plan.max_rows {
        return Err(SampleError::TooManyRows { rows: input.rows, max_rows: of.plan.max_rows });
    }
    Ok(empty)
}
