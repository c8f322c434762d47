//! Tensor maps: descriptions of matrices for the copy engine.
#![allow(unsafe_code)]

use crate::abi::TensorMap;
use crate::device::DeviceMatrix;
use crate::error::CudaError;
use cudarc::driver::sys::{
    CUtensorMapDataType, CUtensorMapFloatOOBfill, CUtensorMapInterleave, CUtensorMapL2promotion, CUtensorMapSwizzle,
    cuTensorMapEncodeTiled,
};
use flash_sampling_core::DType;

/// Bytes of a box's row, the width of the swizzle.
const BOX_ROW_BYTES: u32 = 128;

/// Encodes a matrix in boxes of `box_rows` rows and 128 bytes; elements outside the matrix read as zero.
///
/// Address and stride must be multiples of 16 bytes, the type bf16, f16 or of 8 bits.
pub(crate) fn encode(matrix: &DeviceMatrix, box_rows: u32) -> Result<TensorMap, CudaError> {
    let dtype = match matrix.dtype {
        DType::I8 | DType::F8_E4M3 => CUtensorMapDataType::CU_TENSOR_MAP_DATA_TYPE_UINT8,
        DType::F16 => CUtensorMapDataType::CU_TENSOR_MAP_DATA_TYPE_FLOAT16,
        _ => CUtensorMapDataType::CU_TENSOR_MAP_DATA_TYPE_BFLOAT16,
    };
    let sizes = [matrix.cols as u64, matrix.rows as u64];
    let strides = [matrix.stride_bytes()];
    let (boxes, steps) = ([BOX_ROW_BYTES / matrix.dtype.block_bytes() as u32, box_rows], [1u32; 2]);
    let mut map = TensorMap::default();
    // SAFETY: the map is 128 bytes at a multiple of 64; the arrays have two, one, two and two entries, as rank 2
    // requires. The driver does not read the matrix.
    unsafe {
        cuTensorMapEncodeTiled(
            (&raw mut map).cast(),
            dtype,
            2,
            matrix.address.get() as *mut _,
            sizes.as_ptr(),
            strides.as_ptr(),
            boxes.as_ptr(),
            steps.as_ptr(),
            CUtensorMapInterleave::CU_TENSOR_MAP_INTERLEAVE_NONE,
            CUtensorMapSwizzle::CU_TENSOR_MAP_SWIZZLE_128B,
            CUtensorMapL2promotion::CU_TENSOR_MAP_L2_PROMOTION_L2_128B,
            CUtensorMapFloatOOBfill::CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE,
        )
    }
    .result()
    .map_err(CudaError::driver("describe a matrix to the copy engine"))?;
    Ok(map)
}
