//! A quantised tensor's blocks as a matrix.

use crate::wrap;
use candle_core::quantized::{GgmlDType, QTensor};
use candle_core::{DeviceLocation, Result, bail};
use flash_sampling::{DType, Matrix};
use std::borrow::Cow;

/// The blocks of a CPU `QTensor` `[rows, cols]` as a [`Matrix`], without a copy.
///
/// The types are `Q8_0`, `Q4_0`, `Q4K`, `Q5K`, `Q6K`, `BF16`, `F16` and `F32`.
///
/// # Errors
/// Another rank, type (by its name) or device, or a shape that is not the shape of the blocks.
pub fn qtensor_matrix(tensor: &QTensor) -> Result<Matrix<'_>> {
    let (rows, cols) = tensor.shape().dims2()?;
    let dtype = dtype(tensor.dtype())?;
    let place = tensor.device().location();
    if place != DeviceLocation::Cpu {
        bail!("a QTensor on {place:?} is not supported: move it to the CPU, or dequantize it");
    }
    let Cow::Borrowed(bytes) = tensor.data()? else { bail!("a QTensor on the CPU has no bytes to borrow") };
    let matrix = wrap(Matrix::from_bytes(bytes, dtype, rows, cols, cols))?;
    if matrix.bytes().len() != bytes.len() {
        bail!("a QTensor of shape [{rows}, {cols}] has {} bytes instead of {}", bytes.len(), matrix.bytes().len());
    }
    Ok(matrix)
}

fn dtype(dtype: GgmlDType) -> Result<DType> {
    Ok(match dtype {
        GgmlDType::F32 => DType::F32,
        GgmlDType::F16 => DType::F16,
        GgmlDType::BF16 => DType::BF16,
        GgmlDType::Q8_0 => DType::Q8_0,
        GgmlDType::Q4_0 => DType::Q4_0,
        GgmlDType::Q4K => DType::Q4_K,
        GgmlDType::Q5K => DType::Q5_K,
        GgmlDType::Q6K => DType::Q6_K,
        _ => bail!("a QTensor of type {dtype:?} is not supported: dequantize it"),
    })
}
