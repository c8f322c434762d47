//! Owned matrices of bf16, f16 or f32.

use flash_sampling_core::{DType, Matrix};
use half::{bf16, f16};

#[derive(Clone, Debug)]
enum Data {
    BF16(Vec<bf16>),
    F16(Vec<f16>),
    F32(Vec<f32>),
}

/// A row-major matrix `[rows, cols]`.
#[derive(Clone, Debug)]
pub struct Tensor {
    rows: usize,
    cols: usize,
    data: Data,
}

impl Tensor {
    /// Makes a matrix of `f(row, col)`, rounded to the element type; `cols` is at least 1.
    pub fn from_fn(dtype: DType, rows: usize, cols: usize, f: impl Fn(usize, usize) -> f32) -> Self {
        let values = (0..rows * cols).map(|i| f(i / cols, i % cols));
        let data = match dtype {
            DType::BF16 => Data::BF16(values.map(bf16::from_f32).collect()),
            DType::F16 => Data::F16(values.map(f16::from_f32).collect()),
            DType::F32 => Data::F32(values.collect()),
        };
        Tensor { rows, cols, data }
    }

    /// Borrows the matrix.
    pub fn matrix(&self) -> Matrix<'_> {
        let matrix = match &self.data {
            Data::BF16(data) => Matrix::new(data, self.rows, self.cols),
            Data::F16(data) => Matrix::new(data, self.rows, self.cols),
            Data::F32(data) => Matrix::new(data, self.rows, self.cols),
        };
        matrix.expect("the data has rows * cols elements and a column")
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
        let cols = self.cols;
        fn pick<T: Copy>(data: &[T], rows: &[usize], cols: usize) -> Vec<T> {
            rows.iter().flat_map(|&r| data[r * cols..(r + 1) * cols].iter().copied()).collect()
        }
        let data = match &self.data {
            Data::BF16(data) => Data::BF16(pick(data, rows, cols)),
            Data::F16(data) => Data::F16(pick(data, rows, cols)),
            Data::F32(data) => Data::F32(pick(data, rows, cols)),
        };
        Tensor { rows: rows.len(), cols, data }
    }

    /// Copies the matrix to bytes, with `before` bytes in front and `gap` elements of NaN after each row. Returns the
    /// bytes and the row stride for [`Matrix::from_bytes`].
    pub fn strided(&self, before: usize, gap: usize) -> (Vec<u8>, usize) {
        let size = self.matrix().dtype().size();
        let mut bytes = vec![0xffu8; before];
        for row in 0..self.rows {
            bytes.extend_from_slice(self.matrix().row_bytes(row));
            bytes.extend(core::iter::repeat_n(0xff, gap * size));
        }
        (bytes, self.cols + gap)
    }
}
