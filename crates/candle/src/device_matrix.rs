//! A CUDA tensor's storage as a matrix.

use crate::matrix::row_stride;
use candle_core::cuda_backend::CudaStorageSlice;
use candle_core::cuda_backend::cudarc::driver::{CudaSlice, CudaStream, DevicePtr};
use candle_core::{Result, Storage, Tensor, bail};
use flash_sampling::DType;
use flash_sampling::cuda::{DeviceAddress, DeviceMatrix};
use std::sync::Arc;

/// Calls `work` with the storage of a GPU tensor `[rows, cols]` of bf16, f16 or f32 as a [`DeviceMatrix`].
///
/// Nothing is copied; any offset and any distance between rows is valid. `work` also gets the stream of candle's
/// device, on which the tensor is made. The storage stays locked for reading during `work`. Work on other streams must
/// be complete when `work` returns.
///
/// # Errors
/// Another rank, type or device; elements of a row that do not follow each other, or rows that overlap (call
/// `contiguous` first); and the errors of `work`.
pub fn with_device_matrix<R>(
    tensor: &Tensor,
    work: impl FnOnce(&Arc<CudaStream>, DeviceMatrix) -> Result<R>,
) -> Result<R> {
    let (rows, cols) = tensor.dims2()?;
    let (storage, layout) = tensor.storage_and_layout();
    let row_stride = row_stride(layout)?;
    let Storage::Cuda(storage) = &*storage else { bail!("the tensor is on {:?}, not on a GPU", tensor.device()) };
    let stream = storage.device.cuda_stream();
    let at = layout.start_offset();
    let end = at + rows.saturating_sub(1) * row_stride + if rows > 0 { cols } else { 0 };
    let matrix = |address, dtype| DeviceMatrix { address, dtype, rows, cols, row_stride };
    // Until `work` is done, `_kept` keeps the memory from writes.
    match &storage.slice {
        CudaStorageSlice::BF16(data) => {
            let (address, _kept) = address(data, at, end, &stream)?;
            work(&stream, matrix(address, DType::BF16))
        }
        CudaStorageSlice::F16(data) => {
            let (address, _kept) = address(data, at, end, &stream)?;
            work(&stream, matrix(address, DType::F16))
        }
        CudaStorageSlice::F32(data) => {
            let (address, _kept) = address(data, at, end, &stream)?;
            work(&stream, matrix(address, DType::F32))
        }
        _ => bail!("a tensor of type {:?} cannot be drawn from; bf16, f16 and f32 can", tensor.dtype()),
    }
}

/// The address of element `at`, in memory that ends at element `end`.
fn address<'a, T>(
    data: &'a CudaSlice<T>,
    at: usize,
    end: usize,
    stream: &'a CudaStream,
) -> Result<(DeviceAddress<u8>, impl Drop + use<'a, T>)> {
    if end > data.len() {
        bail!("the tensor reaches beyond its storage");
    }
    let (address, kept) = data.device_ptr(stream);
    Ok((DeviceAddress::<T>::new(address).add(at).cast(), kept))
}
