//! A tensor's storage as a matrix.

use crate::wrap;
use candle_core::{CpuStorage, Layout, Result, Storage, Tensor, bail};
use flash_sampling::Element;
use flash_sampling::Matrix;

/// Calls `work` with the storage of a CPU tensor `[rows, cols]` of bf16, f16 or f32 as a [`Matrix`].
///
/// Nothing is copied; any offset and any distance between rows is valid. The storage stays locked for reading during
/// `work`.
///
/// # Errors
/// Another rank, type or device; elements of a row that do not follow each other, or rows that overlap (call
/// `contiguous` first); and the errors of `work`.
pub fn with_matrix<R>(tensor: &Tensor, work: impl FnOnce(Matrix<'_>) -> Result<R>) -> Result<R> {
    let (rows, cols) = tensor.dims2()?;
    let (storage, layout) = tensor.storage_and_layout();
    let stride = row_stride(layout)?;
    let Storage::Cpu(storage) = &*storage else { bail!("the tensor is on {:?}, not on the CPU", tensor.device()) };
    let at = layout.start_offset();
    match storage {
        CpuStorage::BF16(data) => work(matrix(data, at, rows, cols, stride)?),
        CpuStorage::F16(data) => work(matrix(data, at, rows, cols, stride)?),
        CpuStorage::F32(data) => work(matrix(data, at, rows, cols, stride)?),
        _ => bail!("a tensor of type {:?} cannot be drawn from; bf16, f16 and f32 can", tensor.dtype()),
    }
}

/// Elements from one row of a matrix to the next, at least its columns.
pub(crate) fn row_stride(layout: &Layout) -> Result<usize> {
    let (rows, cols) = layout.shape().dims2()?;
    let (row, column) = (layout.stride()[0], layout.stride()[1]);
    if (column != 1 && cols > 1) || (row < cols && rows > 1) {
        bail!("a tensor of strides [{row}, {column}] is no row-major matrix of {cols} columns; make it contiguous");
    }
    Ok(row.max(cols))
}

/// `rows x cols` elements, `stride` from one row to the next, beginning with element `at`.
fn matrix<T: Element>(data: &[T], at: usize, rows: usize, cols: usize, stride: usize) -> Result<Matrix<'_>> {
    let spread = wrap(Matrix::new(data, 1, data.len().max(1)))?;
    let bytes = spread.bytes().get(at * size_of::<T>()..).unwrap_or_default();
    wrap(Matrix::from_bytes(bytes, T::DTYPE, rows, cols, stride))
}

#[cfg(test)]
mod tests {
    use super::*;
    use candle_core::{DType, Device};

    fn rows_of(tensor: &Tensor) -> Result<Vec<Vec<f32>>> {
        with_matrix(tensor, |m| {
            let row = |r| {
                let mut out = vec![0.0; m.cols()];
                m.row_to_f32(r, &mut out);
                out
            };
            Ok((0..m.rows()).map(row).collect())
        })
    }

    #[test]
    fn views_are_read_where_they_lie() {
        let whole = Tensor::arange(0f32, 24.0, &Device::Cpu).unwrap().reshape((4, 6)).unwrap();
        for dtype in [DType::F32, DType::BF16, DType::F16] {
            let whole = whole.to_dtype(dtype).unwrap();
            let view = whole.narrow(0, 1, 2).unwrap().narrow(1, 2, 3).unwrap();
            assert!(!view.is_contiguous());
            assert_eq!(rows_of(&view).unwrap(), [[8.0, 9.0, 10.0], [14.0, 15.0, 16.0]]);
        }
        assert_eq!(rows_of(&whole.narrow(0, 3, 1).unwrap()).unwrap(), [[18.0, 19.0, 20.0, 21.0, 22.0, 23.0]]);
    }

    #[test]
    fn what_is_no_matrix_is_refused() {
        let whole = Tensor::zeros((4, 6), DType::F32, &Device::Cpu).unwrap();
        assert!(rows_of(&whole.t().unwrap()).is_err());
        assert!(rows_of(&whole.narrow(0, 0, 1).unwrap().broadcast_as((3, 6)).unwrap()).is_err());
        assert!(rows_of(&whole.flatten_all().unwrap()).is_err());
        assert!(rows_of(&whole.to_dtype(DType::U32).unwrap()).is_err());
    }
}
