//! Borrowed matrices of floats and of quantised blocks.

pub(crate) mod blocks;
mod dtype;
mod ggml_rounding;
mod scales;

use crate::error::HeadError;
use blocks::{SPAN, Span, spans};
pub use dtype::{DType, Element};
pub use ggml_rounding::round_as_ggml;
use half::{bf16, f16};
pub use scales::Scales;
use scales::convert_row;

/// A borrowed row-major matrix `[rows, cols]`. It has native byte order and any alignment, so a mapped file works.
#[derive(Clone, Copy, Debug)]
pub struct Matrix<'a> {
    bytes: &'a [u8],
    dtype: DType,
    rows: usize,
    cols: usize,
    row_stride: usize,
    scales: Option<Scales<'a>>,
}

impl<'a> Matrix<'a> {
    /// A matrix over a slice of `rows * cols` elements.
    ///
    /// # Errors
    /// [`HeadError::Length`] when the slice has another length, [`HeadError::Shape`] when `cols` is zero.
    pub fn new<T: Element>(data: &'a [T], rows: usize, cols: usize) -> Result<Self, HeadError> {
        let m = Matrix::from_bytes(bytemuck::cast_slice(data), T::DTYPE, rows, cols, cols)?;
        if m.bytes.len() == size_of_val(data) {
            return Ok(m);
        }
        Err(HeadError::Length { rows, cols, row_stride: cols, needed: m.bytes.len(), found: size_of_val(data) })
    }

    /// A matrix over bytes, with `row_stride` elements from one row to the next. Bytes beyond the last row are ignored.
    ///
    /// # Errors
    /// * [`HeadError::Length`]: fewer bytes than the matrix needs.
    /// * [`HeadError::Shape`]: `cols` is zero, `row_stride < cols`, the size overflows, or `cols` or `row_stride` is not
    ///   a whole number of blocks.
    pub fn from_bytes(
        bytes: &'a [u8],
        dtype: DType,
        rows: usize,
        cols: usize,
        row_stride: usize,
    ) -> Result<Self, HeadError> {
        let shape = |reason| HeadError::Shape { rows, cols, row_stride, reason };
        if cols == 0 {
            return Err(shape("it has no columns"));
        }
        if cols > u32::MAX as usize {
            return Err(shape("it has 2^32 columns or more"));
        }
        if row_stride < cols {
            return Err(shape("the stride is smaller than a row"));
        }
        let block = dtype.block_elements();
        if !cols.is_multiple_of(block) || !row_stride.is_multiple_of(block) {
            return Err(shape(match block {
                32 => "a row is not whole blocks of 32 elements",
                _ => "a row is not whole blocks of 256 elements",
            }));
        }
        let elements = match rows {
            0 => Some(0),
            n => (n - 1).checked_mul(row_stride).and_then(|e| e.checked_add(cols)),
        };
        let needed = elements.and_then(|e| dtype.bytes(e)).ok_or(shape("its size overflows"))?;
        let bytes =
            bytes.get(..needed).ok_or(HeadError::Length { rows, cols, row_stride, needed, found: bytes.len() })?;
        Ok(Matrix { bytes, dtype, rows, cols, row_stride, scales: None })
    }

    /// Multiplies the elements of an `I8` or `F8_E4M3` matrix by scales.
    ///
    /// `scales` has one value for each block of `[block_rows, block_cols]` elements, row by row; the last blocks of rows
    /// and columns may be smaller. Blocks are `[1, cols]` for one scale per row, `[rows, cols]` for a single
    /// scale. A weight is the exact product, which the kernels round to float32. Without scales, the factor is 1.
    ///
    /// # Errors
    /// * [`HeadError::Scales`]: another type, or another number of scales.
    /// * [`HeadError::ScaleBlock`]: a block without rows or columns.
    pub fn with_scales(mut self, scales: &'a [f32], block: [usize; 2]) -> Result<Self, HeadError> {
        let wrong = |needed| HeadError::Scales { dtype: self.dtype, needed, found: scales.len() };
        if !self.dtype.is_scaled() {
            return Err(wrong(0));
        }
        let [rows, cols] = block;
        if rows == 0 || cols == 0 {
            return Err(HeadError::ScaleBlock { rows, cols });
        }
        self.scales = Some(Scales::new(scales, [self.rows, self.cols], block).map_err(wrong)?);
        Ok(self)
    }

    /// The scales, if the matrix has [any](Matrix::with_scales).
    pub fn scales(&self) -> Option<Scales<'a>> {
        self.scales
    }

    /// Element type.
    pub fn dtype(&self) -> DType {
        self.dtype
    }

    /// Number of rows.
    pub fn rows(&self) -> usize {
        self.rows
    }

    /// Elements of a row.
    pub fn cols(&self) -> usize {
        self.cols
    }

    /// Elements from one row to the next.
    pub fn row_stride(&self) -> usize {
        self.row_stride
    }

    /// All bytes, from the start of the first row to the end of the last row.
    pub fn bytes(&self) -> &'a [u8] {
        self.bytes
    }

    /// Bytes from one row to the next.
    pub fn row_stride_bytes(&self) -> usize {
        self.row_stride / self.dtype.block_elements() * self.dtype.block_bytes()
    }

    /// The bytes of a row.
    ///
    /// # Panics
    /// If `row` is out of range.
    pub fn row_bytes(&self, row: usize) -> &'a [u8] {
        &self.bytes[row * self.row_stride_bytes()..][..self.bytes_of_a_row()]
    }

    fn bytes_of_a_row(&self) -> usize {
        self.cols / self.dtype.block_elements() * self.dtype.block_bytes()
    }

    /// Borrows the elements of a row; `None` unless the type is float32 and the address a multiple of four.
    ///
    /// # Panics
    /// If `row` is out of range.
    #[inline]
    pub fn row_f32(&self, row: usize) -> Option<&'a [f32]> {
        if self.dtype != DType::F32 {
            return None;
        }
        bytemuck::try_cast_slice(self.row_bytes(row)).ok()
    }

    /// The rows `range` as a matrix.
    ///
    /// # Panics
    /// If `range` is out of range.
    pub fn row_range(&self, range: core::ops::Range<usize>) -> Matrix<'a> {
        assert!(range.start <= range.end && range.end <= self.rows, "rows {range:?} of {}", self.rows);
        let start = range.start * self.row_stride_bytes();
        let end = (range.end.max(1) - 1) * self.row_stride_bytes() + self.bytes_of_a_row();
        let bytes = if range.is_empty() { &[] } else { &self.bytes[start..end] };
        let scales = self.scales.map(|scales| scales.skip_rows(range.start));
        Matrix { bytes, rows: range.len(), scales, ..*self }
    }

    /// Converts a row to float32: exactly for types with [`DType::is_exact_in_f32`], else rounded to nearest.
    ///
    /// # Panics
    /// If `row` is out of range, or `out` does not have `cols` elements.
    #[inline(always)]
    pub fn row_to_f32(&self, row: usize, out: &mut [f32]) {
        if self.dtype.is_scaled() {
            assert_eq!(out.len(), self.cols);
            let scales = self.scales.as_ref().map(|scales| (scales, row));
            return convert_row(self.row_bytes(row), self.dtype, scales, out, |value, scale| value * scale);
        }
        widen(self.row_bytes(row), self.dtype, out);
    }

    /// Writes the absolute values of a row. For types with minima, a value is that of the scaled code plus that of the
    /// minimum, which bounds all terms from which kernels compute a weight.
    ///
    /// # Panics
    /// As for [`Matrix::row_to_f32`].
    pub fn row_magnitudes(&self, row: usize, out: &mut [f32]) {
        if matches!(self.dtype, DType::Q4_K | DType::Q5_K) {
            return widen_each(self.row_bytes(row), self.dtype, out, f32::abs, Span::magnitudes);
        }
        self.row_to_f32(row, out);
        out.iter_mut().for_each(|weight| *weight = weight.abs());
    }

    /// Converts a row to float64, exactly.
    ///
    /// # Panics
    /// If `row` is out of range, or `out` does not have `cols` elements.
    pub fn row_to_f64(&self, row: usize, out: &mut [f64]) {
        if self.dtype.is_scaled() {
            assert_eq!(out.len(), self.cols);
            let scales = self.scales.as_ref().map(|scales| (scales, row));
            let product = |value, scale| f64::from(value) * f64::from(scale);
            return convert_row(self.row_bytes(row), self.dtype, scales, out, product);
        }
        widen_each(self.row_bytes(row), self.dtype, out, f64::from, Span::to_f64);
    }
}

/// Converts elements without scales to float32: exactly, but for `Q4_K` and `Q5_K` rounded to nearest.
///
/// # Panics
/// If the numbers of elements of `out` and `bytes` differ, they are not whole blocks, or the type is scaled.
pub fn widen(bytes: &[u8], dtype: DType, out: &mut [f32]) {
    widen_each(bytes, dtype, out, |value| value, Span::to_f32);
}

/// Converts elements: `float` converts a float, `span` a span of a block.
fn widen_each<T: Copy>(
    bytes: &[u8],
    dtype: DType,
    out: &mut [T],
    float: impl Fn(f32) -> T,
    span: impl Fn(Span) -> [T; SPAN],
) {
    fn each<E: Element, T>(bytes: &[u8], out: &mut [T], float: impl Fn(f32) -> T) {
        for (wide, bytes) in out.iter_mut().zip(bytes.chunks_exact(size_of::<E>())) {
            *wide = float(bytemuck::pod_read_unaligned::<E>(bytes).widen());
        }
    }
    assert!(!dtype.is_scaled(), "{} needs scales", dtype.name());
    assert!(out.len().is_multiple_of(dtype.block_elements()), "{} elements of {}", out.len(), dtype.name());
    assert_eq!(Some(bytes.len()), dtype.bytes(out.len()));
    match dtype {
        DType::BF16 => each::<bf16, T>(bytes, out, float),
        DType::F16 => each::<f16, T>(bytes, out, float),
        DType::F32 => each::<f32, T>(bytes, out, float),
        _ => spans(dtype, bytes, |at, weights| out[at..at + SPAN].copy_from_slice(&span(weights))),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bad_shapes_are_named() {
        let data = [0f32; 6];
        assert!(matches!(Matrix::new(&data, 2, 4), Err(HeadError::Length { needed: 32, found: 24, .. })));
        assert!(matches!(Matrix::new(&data, 1, 4), Err(HeadError::Length { .. })));
        assert!(matches!(Matrix::new(&data, 2, 0), Err(HeadError::Shape { .. })));
        assert!(matches!(
            Matrix::from_bytes(&[0; 24], DType::F32, usize::MAX, 3, 3),
            Err(HeadError::Shape { reason: "its size overflows", .. })
        ));
        assert!(matches!(Matrix::from_bytes(&[0; 24], DType::F32, 2, 3, 2), Err(HeadError::Shape { .. })));
    }

    #[test]
    fn strided_and_unaligned_rows_read_back() {
        let values: Vec<bf16> = (0..10).map(|i| bf16::from_f32(i as f32)).collect();
        let mut bytes = vec![0u8];
        bytes.extend_from_slice(bytemuck::cast_slice(&values));
        let m = Matrix::from_bytes(&bytes[1..], DType::BF16, 3, 2, 4).unwrap();
        let mut row = [0.0; 2];
        m.row_to_f32(2, &mut row);
        assert_eq!(row, [8.0, 9.0]);
        m.row_range(1..3).row_to_f32(0, &mut row);
        assert_eq!(row, [4.0, 5.0]);
        assert_eq!(m.row_range(3..3).rows(), 0);
    }

    #[test]
    fn rows_of_blocks_are_whole_blocks() {
        let bytes = [0u8; 4 * 210];
        let m = Matrix::from_bytes(&bytes, DType::Q6_K, 2, 256, 512).unwrap();
        assert_eq!((m.bytes().len(), m.row_bytes(1).len(), m.row_stride_bytes()), (3 * 210, 210, 420));
        assert_eq!(m.row_range(1..2).bytes().len(), 210);
        for (cols, stride) in [(128, 256), (256, 300)] {
            let error = Matrix::from_bytes(&bytes, DType::Q6_K, 2, cols, stride).unwrap_err();
            assert!(error.to_string().contains("whole blocks of 256"), "{error}");
        }
        assert!(matches!(
            Matrix::from_bytes(&bytes, DType::Q8_0, 25, 32, 32),
            Err(HeadError::Length { needed: 850, .. })
        ));
    }

    #[test]
    #[should_panic(expected = "i8 needs scales")]
    fn widening_refuses_scaled_types() {
        widen(&[1; 8], DType::I8, &mut [0.0; 8]);
    }

    #[test]
    #[should_panic(expected = "33 elements of q8_0")]
    fn widening_refuses_parts_of_blocks() {
        widen(&[0; 34], DType::Q8_0, &mut [0.0; 33]);
    }

    #[test]
    fn scales_belong_to_blocks_of_rows_and_columns() {
        let bytes: Vec<u8> = (0..5 * 7).collect();
        let m = Matrix::from_bytes(&bytes, DType::I8, 5, 7, 7).unwrap();
        let scales: Vec<f32> = (0..9).map(|i| 2f32.powi(i)).collect();
        let m = m.with_scales(&scales, [2, 3]).unwrap();
        for (first, m) in [(0, m), (3, m.row_range(3..5))] {
            let (mut row, mut exact) = ([0.0f32; 7], [0.0f64; 7]);
            for r in 0..m.rows() {
                m.row_to_f32(r, &mut row);
                m.row_to_f64(r, &mut exact);
                for k in 0..7 {
                    let at = first + r;
                    let expected = (at * 7 + k) as f32 * scales[at / 2 * 3 + k / 3];
                    assert_eq!((row[k], exact[k]), (expected, f64::from(expected)));
                }
            }
        }
        assert!(matches!(m.with_scales(&scales[..8], [2, 3]), Err(HeadError::Scales { needed: 9, found: 8, .. })));
        // The last two rows begin in the second row of a block.
        let last = m.row_range(3..5).scales().unwrap();
        assert_eq!((last.values(2), last.block(), last.row_of_block()), (&scales[3..], [2, 3], 1));
        assert_eq!(last.values(1), &scales[3..6]);
        for block in [[0, 3], [2, 0]] {
            let error = m.with_scales(&scales, block).unwrap_err();
            assert_eq!(error, HeadError::ScaleBlock { rows: block[0], cols: block[1] });
            assert!(error.to_string().contains("both must be 1 or more"), "{error}");
        }
        let floats = Matrix::from_bytes(&bytes, DType::F16, 2, 7, 7).unwrap();
        assert!(matches!(floats.with_scales(&[1.0], [2, 7]), Err(HeadError::Scales { needed: 0, found: 1, .. })));
    }
}
