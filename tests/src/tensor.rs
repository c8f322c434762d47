//! Owned matrices of bf16, f16 or f32.

use flash_sampling_core::{DType, Matrix};
use half::{bf16, f16};

/// A row-major matrix `[rows, cols]`.
#[derive(Clone, Debug)]
pub struct Tensor {
    dtype: DType,
    rows: usize,
    cols: usize,
    bytes: Vec<u8>,
}

impl Tensor {
    /// Makes a matrix of `f(row, col)`, rounded to the float type; `cols` is at least 1.
    pub fn from_fn(dtype: DType, rows: usize, cols: usize, f: impl Fn(usize, usize) -> f32) -> Self {
        let values = (0..rows * cols).map(|i| f(i / cols, i % cols));
        let bytes = match dtype {
            DType::BF16 => values.flat_map(|value| bf16::from_f32(value).to_ne_bytes()).collect(),
            DType::F16 => values.flat_map(|value| f16::from_f32(value).to_ne_bytes()).collect(),
            _ => values.flat_map(f32::to_ne_bytes).collect(),
        };
        Tensor { dtype, rows, cols, bytes }
    }

    /// Borrows the matrix.
    pub fn matrix(&self) -> Matrix<'_> {
        let matrix = Matrix::from_bytes(&self.bytes, self.dtype, self.rows, self.cols, self.cols);
        matrix.expect("the bytes have rows * cols elements and a column")
    }

    /// Returns the number of rows.
    pub fn rows(&self) -> usize {
        self.rows
    }

    /// Returns the number of columns.
    pub fn cols(&self) -> usize {
        self.cols
    }

    /// Returns a row in float32.
    pub fn row(&self, row: usize) -> Vec<f32> {
        let mut out = vec![0.0; self.cols];
        self.matrix().row_to_f32(row, &mut out);
        out
    }

    /// Copies the given rows to a matrix, in the given order.
    pub fn select(&self, rows: &[usize]) -> Tensor {
        let bytes = rows.iter().flat_map(|&row| self.matrix().row_bytes(row)).copied().collect();
        Tensor { rows: rows.len(), bytes, ..*self }
    }

    /// Copies the matrix to bytes, with `before` bytes in front and `gap` elements of NaN after each row. Returns the
    /// bytes and the row stride for [`Matrix::from_bytes`].
    pub fn strided(&self, before: usize, gap: usize) -> (Vec<u8>, usize) {
        let size = self.dtype.block_bytes();
        let mut bytes = vec![0xffu8; before];
        for row in 0..self.rows {
            bytes.extend_from_slice(self.matrix().row_bytes(row));
            bytes.extend(core::iter::repeat_n(0xff, gap * size));
        }
        (bytes, self.cols + gap)
    }
}
