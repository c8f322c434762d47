//! The products of AMX: rows of codes by digits in panels.

use crate::dot::pack::PackedRows;
use crate::dot::{DotScratch, TILE};
use crate::upper_bounds::REQUANTISED_ROWS;
use crate::upper_bounds::digits::Digits;
use flash_sampling_core::{DType, Matrix};

/// Requantises some rows of a quantised weight at a time, and multiplies their codes.
pub(super) fn multiply_requantised(
    weight: &Matrix<'_>,
    scales: &[f32],
    hidden: &Digits,
    out: &mut [f32],
    scratch: &mut DotScratch,
) {
    let stride = flash_sampling_core::backend::code_stride(weight.cols());
    let mut lines = core::mem::take(&mut scratch.decoded);
    if lines.len() < REQUANTISED_ROWS * stride / 64 {
        lines.resize(REQUANTISED_ROWS * stride / 64, crate::dot::pack::Line::ZERO);
    }
    let codes = &mut crate::dot::pack::bytes_mut(&mut lines)[..REQUANTISED_ROWS * stride];
    for (at, scales) in (0..weight.rows()).step_by(REQUANTISED_ROWS).zip(scales.chunks(REQUANTISED_ROWS)) {
        let rows = weight.row_range(at..at + scales.len());
        // SAFETY: AMX is available, and every processor with AMX has AVX-512.
        unsafe { crate::dot::avx512::requantise(&rows, scales, stride, codes) };
        let codes = &codes[..scales.len() * stride];
        multiply_panels(codes, stride, hidden, &mut out[at..], scratch, integer_tile);
    }
    scratch.decoded = lines;
}

/// [`amx::integer_tile`](crate::dot::amx::integer_tile) as a safe function; only for digits in AMX panels.
pub(super) fn integer_tile(codes: &Matrix<'_>, digits: PackedRows<'_>, out: &mut [f32], scratch: &mut DotScratch) {
    // SAFETY: `kernels` found AMX-INT8. The codes and the panels have equally many pairs, and `out` has a row for each
    // row of digits.
    unsafe { crate::dot::amx::integer_tile(codes, digits, out, scratch) }
}

/// Multiplies rows of codes, `stride` bytes apart, by digits in AMX panels.
pub(super) fn multiply_panels(
    codes: &[u8],
    stride: usize,
    hidden: &Digits,
    out: &mut [f32],
    scratch: &mut DotScratch,
    multiply: impl Fn(&Matrix<'_>, PackedRows<'_>, &mut [f32], &mut DotScratch),
) {
    let rows = codes.len() / stride;
    let pairs = Matrix::from_bytes(codes, DType::BF16, rows, stride / 2, stride / 2).expect("these are whole rows");
    let mut integers = core::mem::take(&mut scratch.integers);
    integers.resize(2 * hidden.rows.len() * TILE, 0.0);
    multiply(&pairs, hidden.panels(), &mut integers, scratch);
    for (integers, out) in integers.chunks_exact(2 * TILE).zip(out.chunks_mut(TILE)) {
        let (high, low) = integers.split_at(TILE);
        for (out, (high, low)) in out.iter_mut().zip(high.iter().zip(low)).take(rows) {
            let [high, low] = [high, low].map(|bits| bits.to_bits() as i32 as f32);
            *out = 256.0 * high + low;
        }
    }
    scratch.integers = integers;
}
