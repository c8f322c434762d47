//! The products of AMX: rows of codes by digits in panels.

use crate::dot::pack::PackedRows;
use crate::dot::{DotScratch, TILE};
use crate::upper_bounds::digits::Digits;
use flash_sampling_core::{DType, Matrix};

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
