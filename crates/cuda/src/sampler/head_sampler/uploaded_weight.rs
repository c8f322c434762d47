//! The weight and bias of a head in host memory, copied to the GPU.

use crate::abi::DeviceAddress;
use crate::device::head::DeviceHead;
use crate::device::matrix::DeviceMatrix;
use crate::error::CudaError;
use cudarc::driver::{CudaSlice, CudaStream};
use flash_sampling_core::{DType, Head, HeadError, Matrix};
use std::sync::Arc;

/// The maximum bytes of the weight in one copy.
const PART: usize = 64 << 20;

/// The stride from one hidden state, or one row of an uploaded weight, to the next in memory of a sampler, in elements.
pub(crate) fn row_stride(hidden: usize) -> usize {
    hidden.next_multiple_of(8)
}

/// Refuses weights that the kernels cannot read.
pub(crate) fn check_float(found: DType) -> Result<(), HeadError> {
    if found.is_float() { Ok(()) } else { Err(HeadError::WeightType { found, supported: "bf16, f16 and f32" }) }
}

/// A weight, and a bias if the head has one, in device memory.
#[derive(Debug)]
pub(super) struct UploadedWeight {
    _weight: CudaSlice<u8>,
    _bias: Option<CudaSlice<f32>>,
}

impl UploadedWeight {
    /// Copies the head's tokens, and waits. The head in device memory is valid as long as the weight.
    pub(super) fn new(head: &Head<'_>, stream: &Arc<CudaStream>) -> Result<(Self, DeviceHead), CudaError> {
        check_float(head.weight().dtype())?;
        let failed = CudaError::driver("copy the head to the GPU");
        let tokens = head.tokens();
        let rows = head.weight_row(tokens.start)..head.weight_row(tokens.start) + tokens.len();
        let (cols, row_stride, dtype) = (head.hidden(), row_stride(head.hidden()), head.weight().dtype());
        let weight = upload(&head.weight().row_range(rows.clone()), row_stride, stream)?;
        let bias = head.bias().map(|bias| stream.clone_htod(&bias[rows])).transpose().map_err(&failed)?;
        stream.synchronize().map_err(&failed)?;
        let address = DeviceAddress::of(&weight, stream);
        let on_device = DeviceHead {
            weight: DeviceMatrix { address, dtype, rows: tokens.len(), cols, row_stride },
            first_token: tokens.start,
            bias: bias.as_ref().map(|bias| DeviceAddress::of(bias, stream)),
            soft_cap: head.soft_cap(),
            scale: head.scale(),
        };
        Ok((UploadedWeight { _weight: weight, _bias: bias }, on_device))
    }
}

/// Copies a weight to the GPU, in rows of `row_stride` elements.
fn upload(weight: &Matrix<'_>, row_stride: usize, stream: &Arc<CudaStream>) -> Result<CudaSlice<u8>, CudaError> {
    let failed = CudaError::driver("copy the weight to the GPU");
    let bytes = row_stride * weight.dtype().block_bytes();
    let mut memory = stream.alloc_zeros::<u8>(weight.rows() * bytes).map_err(&failed)?;
    if weight.row_stride() == row_stride && weight.cols() == row_stride {
        stream.memcpy_htod(weight.bytes(), &mut memory).map_err(&failed)?;
        return Ok(memory);
    }
    let rows_of_part = (PART / bytes).max(1);
    let mut part = Vec::with_capacity(rows_of_part.min(weight.rows()) * bytes);
    for first in (0..weight.rows()).step_by(rows_of_part) {
        let last = (first + rows_of_part).min(weight.rows());
        part.clear();
        for row in first..last {
            part.extend_from_slice(weight.row_bytes(row));
            part.resize((row + 1 - first) * bytes, 0);
        }
        stream.memcpy_htod(&part, &mut memory.slice_mut(first * bytes..last * bytes)).map_err(&failed)?;
        stream.synchronize().map_err(&failed)?;
    }
    Ok(memory)
}
