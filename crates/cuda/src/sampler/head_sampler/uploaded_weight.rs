//! The weight, scales, bias and shadow of a head in host memory, copied to the GPU.

use crate::abi::DeviceAddress;
use crate::device::{Device, DeviceHead, DeviceMatrix, DeviceScales, DeviceShadow, ShadowMemory};
use crate::error::CudaError;
use cudarc::driver::{CudaSlice, CudaStream};
use flash_sampling_core::{Head, Matrix};
use std::sync::Arc;

/// The maximum bytes of the weight in one copy.
const PART: usize = 64 << 20;

/// The stride from one hidden state, or one row of an uploaded weight, to the next in memory of a sampler, in elements.
/// Rows of blocks are multiples of 8 elements, and stay as they are.
pub(crate) fn row_stride(hidden: usize) -> usize {
    hidden.next_multiple_of(8)
}

/// A weight, and scales, a bias and a shadow if the head has any, in device memory.
#[derive(Debug)]
pub(super) struct UploadedWeight {
    _weight: CudaSlice<u8>,
    _scales: Option<CudaSlice<f32>>,
    _bias: Option<CudaSlice<f32>>,
    _shadow: Option<ShadowMemory>,
}

impl UploadedWeight {
    /// Copies the head's tokens, and waits. The head in device memory is valid as long as the weight. Copies no shadow
    /// that the device's kernels cannot use.
    pub(super) fn new(
        head: &Head<'_>,
        device: &Device,
        stream: &Arc<CudaStream>,
    ) -> Result<(Self, DeviceHead), CudaError> {
        let failed = CudaError::driver("copy the head to the GPU");
        let tokens = head.tokens();
        let rows = head.weight_row(tokens.start)..head.weight_row(tokens.start) + tokens.len();
        let (cols, row_stride, dtype) = (head.hidden(), row_stride(head.hidden()), head.weight().dtype());
        let part = head.weight().row_range(rows.clone());
        let weight = upload(&part, row_stride, stream)?;
        let scales = part.scales();
        let uploaded =
            scales.map(|scales| stream.clone_htod(scales.values(rows.len()))).transpose().map_err(&failed)?;
        let scales = scales.zip(uploaded.as_ref()).map(|(scales, uploaded)| DeviceScales {
            address: DeviceAddress::of(uploaded, stream),
            block: scales.block(),
            row_of_block: scales.row_of_block(),
        });
        let shadow = head.shadow().filter(|_| DeviceShadow::serves(head, device));
        let shadow = shadow.map(|shadow| DeviceShadow::upload(&shadow.row_range(rows.clone()), stream)).transpose()?;
        let (shadow, held) = shadow.unzip();
        let bias = head.bias().map(|bias| stream.clone_htod(&bias[rows])).transpose().map_err(&failed)?;
        stream.synchronize().map_err(&failed)?;
        let address = DeviceAddress::of(&weight, stream);
        let on_device = DeviceHead {
            weight: DeviceMatrix { address, dtype, rows: tokens.len(), cols, row_stride },
            scales,
            first_token: tokens.start,
            bias: bias.as_ref().map(|bias| DeviceAddress::of(bias, stream)),
            soft_cap: head.soft_cap(),
            scale: head.scale(),
            shadow,
        };
        Ok((UploadedWeight { _weight: weight, _scales: uploaded, _bias: bias, _shadow: held }, on_device))
    }
}

/// Copies a weight to the GPU, in rows of `row_stride` elements.
fn upload(weight: &Matrix<'_>, row_stride: usize, stream: &Arc<CudaStream>) -> Result<CudaSlice<u8>, CudaError> {
    let failed = CudaError::driver("copy the weight to the GPU");
    let bytes = row_stride / weight.dtype().block_elements() * weight.dtype().block_bytes();
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
