//! Dot products with weights in quantised blocks, written once for all vector kernels.
//!
//! Plain version: decode the weight to float32, and multiply with the float32 kernel.
//! Deviations, and why each keeps the result:
//! 1. A single hidden row takes the weights from registers. The order of the sum is that of the float32 kernel, so a row
//!    has the same bits alone and in a batch.
//! 2. For more rows, a few weight rows are decoded to memory that stays in the second-level cache. So the whole batch
//!    decodes a weight once.

pub(crate) mod formats;
mod plain;
#[cfg(target_arch = "x86_64")]
mod x86;

use super::lanes::Lanes;
use super::pack::{Line, Packed};
use flash_sampling_core::{DType, Matrix};
pub(crate) use formats::for_format;
pub(crate) use plain::Plain;
#[cfg(target_arch = "x86_64")]
pub(crate) use x86::{Spans256, Spans512};

/// Floats of the decoded rows of a worker.
const DECODED: usize = 64 << 10;
/// The numbers of weight rows that are decoded at a time.
const ROWS: core::ops::RangeInclusive<usize> = 4..=32;

/// The decoder of a block type for the float32 kernel `F`.
///
/// # Safety
/// The instruction set is available for every function, and `block` points to a readable block of [`Decoder::DTYPE`].
/// Implementations return the bits of `Span::to_f32`.
pub(crate) trait Decoder<F: Lanes> {
    /// What all weights of a block need.
    type Scales: Copy;
    /// The block type.
    const DTYPE: DType;

    unsafe fn scales(block: *const u8) -> Self::Scales;

    /// The elements `step * F::STEP ..` of a block, in order.
    unsafe fn weights(block: *const u8, step: usize, scales: &Self::Scales) -> F::Weights;
}

/// Creates the memory for decoded rows; none for floats and for a single hidden row.
pub(super) fn scratch(weight: DType, rows: usize) -> Vec<Line> {
    if weight.is_float() || rows <= 1 { Vec::new() } else { vec![Line::ZERO; DECODED / 16] }
}

/// The weight rows that are decoded at a time, and the floats from one to the next. One more line per row, because rows
/// of a power of two would share the sets of the first-level cache.
pub(super) fn decoded_size(cols: usize) -> (usize, usize) {
    let stride = cols + 16;
    ((DECODED / stride / 4 * 4).clamp(*ROWS.start(), *ROWS.end()), stride)
}

/// Multiplies the only hidden row by all rows of a weight, `M1` rows at a time, in the order of summation of `F`.
///
/// # Safety
/// As for [`lanes::tile`](super::lanes::tile), with a weight of `D`'s type and one hidden row.
#[inline(always)]
pub(super) unsafe fn multiply<F: Lanes, D: Decoder<F>, const M1: usize>(
    weight: &Matrix<'_>,
    hidden: &Packed,
    out: &mut [f32],
) {
    let rows = weight.rows();
    let mut at = 0;
    // SAFETY: by this function's contract; `at + M1` or `at + 1` is at most the number of rows.
    unsafe {
        while at + M1 <= rows {
            multiply_rows::<F, D, M1>(&weight.row_range(at..rows), hidden, &mut out[at..]);
            at += M1;
        }
        while at < rows {
            multiply_rows::<F, D, 1>(&weight.row_range(at..rows), hidden, &mut out[at..]);
            at += 1;
        }
    }
}

/// Multiplies the first `M` rows.
///
/// # Safety
/// As for [`multiply`]; the weight has `M` rows, and `out` has `M` floats.
#[inline(always)]
unsafe fn multiply_rows<F: Lanes, D: Decoder<F>, const M: usize>(
    weight: &Matrix<'_>,
    hidden: &Packed,
    out: &mut [f32],
) {
    let (stride, bytes) = (weight.row_stride_bytes(), D::DTYPE.block_bytes());
    let steps = D::DTYPE.block_elements() / F::STEP;
    // SAFETY: by this function's contract; a row has whole blocks.
    unsafe {
        let mut sums = [F::zero(); M];
        for block in 0..weight.cols() / D::DTYPE.block_elements() {
            let at: [*const u8; M] = core::array::from_fn(|m| weight.bytes().as_ptr().add(m * stride + block * bytes));
            for at in at {
                (0..bytes).step_by(64).for_each(|line| F::prefetch(at.wrapping_add(M * stride + line)));
            }
            let scales: [D::Scales; M] = core::array::from_fn(|m| D::scales(at[m]));
            for step in 0..steps {
                let hidden = F::hidden(hidden.as_ptr().add((block * steps + step) * F::HIDDEN_BYTES));
                for m in 0..M {
                    sums[m] = F::multiply_add(sums[m], D::weights(at[m], step, &scales[m]), hidden);
                }
            }
        }
        for (out, sums) in out[..M].iter_mut().zip(sums) {
            *out = F::total(sums);
        }
    }
}

/// Writes all rows of a weight as floats, `stride` floats apart.
///
/// # Safety
/// The instruction set of `F` is available, and the weight has `D`'s type. `F` is a float32 kernel: its weights are
/// `F::STEP` floats in memory order.
#[inline(always)]
pub(super) unsafe fn decode<F: Lanes, D: Decoder<F>>(weight: &Matrix<'_>, stride: usize, out: &mut [f32]) {
    const { assert!(F::WEIGHT_BYTES == 4 * F::STEP && size_of::<F::Weights>() == F::WEIGHT_BYTES) }
    let steps = D::DTYPE.block_elements() / F::STEP;
    for (row, out) in (0..weight.rows()).zip(out.chunks_mut(stride)) {
        let blocks = weight.row_bytes(row).chunks_exact(D::DTYPE.block_bytes());
        for (block, out) in blocks.zip(out.chunks_exact_mut(D::DTYPE.block_elements())) {
            // SAFETY: by this function's contract; `block` and `out` are whole blocks.
            unsafe {
                let scales = D::scales(block.as_ptr());
                for step in 0..steps {
                    let weights = D::weights(block.as_ptr(), step, &scales);
                    out.as_mut_ptr().add(step * F::STEP).cast::<F::Weights>().write_unaligned(weights);
                }
            }
        }
    }
}
