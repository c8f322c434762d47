//! Dot products with weights in quantised blocks, written once for all vector kernels.
//!
//! Plain version: decode the weight to float32, and multiply with the float32 kernel.
//! Deviations, and why each keeps the result:
//! 1. For a few hidden rows, weights are decoded in registers. The order of the sum is that of the float32 kernel, so a
//!    row has the same bits alone and in a batch.
//! 2. For more hidden rows, a few weight rows at a time are decoded to memory that stays in the second-level cache. So
//!    each weight is decoded once for the whole batch.

pub(crate) mod formats;
#[cfg(target_arch = "aarch64")]
mod neon;
mod plain;
#[cfg(target_arch = "x86_64")]
pub(crate) mod x86;

use super::TILE;
use super::lanes::Lanes;
use super::pack::{Line, PackedRows};
use crate::isa::Isa;
use core::mem::MaybeUninit;
use core::ops::Range;
use flash_sampling_core::{DType, Matrix};
pub(crate) use formats::for_format;
#[cfg(target_arch = "aarch64")]
pub(crate) use neon::{Halves, Spans128};
pub(crate) use plain::Plain;
#[cfg(target_arch = "x86_64")]
pub(crate) use x86::{Spans256, Spans512};

/// Weight rows that stay in the second-level cache while the hidden rows pass over them.
const BLOCK: usize = 32;
/// The distance of the prefetch, in weight rows.
const AHEAD: usize = 8;
/// Floats in a worker's memory for decoded rows.
const DECODED: usize = 64 << 10;
/// The least and the largest number of weight rows that are decoded at a time.
const ROWS: core::ops::RangeInclusive<usize> = 4..=32;

/// The decoder of a block type for the float32 kernel `F`.
///
/// # Safety
/// The caller of a function guarantees that the instruction set is available, and that `block` points to a readable
/// block of [`Decoder::DTYPE`]. Implementations return the bits of `Span::to_f32`.
pub(crate) trait Decoder<F: Lanes> {
    /// The values that are computed once for a block, such as its scales and minima.
    type Scales: Copy;
    /// The block type.
    const DTYPE: DType;

    /// Writes the scales of a block to `out`. Copying a return value would load vectors whose parts were just stored.
    unsafe fn scales(block: *const u8, out: &mut MaybeUninit<Self::Scales>);

    /// Decodes the `F::STEP` weights from `step * F::STEP` on, in order.
    unsafe fn weights(block: *const u8, step: usize, scales: &Self::Scales) -> F::Weights;
}

/// Whether a weight is decoded to memory for this number of hidden rows, instead of in registers.
pub(super) fn decodes(isa: Isa, weight: DType, rows: usize) -> bool {
    let most = if isa == Isa::Portable { 1 } else { 4 };
    weight.is_scaled() || !weight.is_float() && rows > most
}

/// Creates the memory for decoded rows, if a call of up to `rows` hidden rows may need it.
pub(super) fn scratch(isa: Isa, weight: DType, rows: usize) -> Vec<Line> {
    if decodes(isa, weight, rows) { vec![Line::ZERO; DECODED / 16] } else { Vec::new() }
}

/// Writes all rows of a weight with scales as floats, `stride` floats apart.
#[inline(always)]
pub(super) fn decode_scaled(weight: &Matrix<'_>, stride: usize, out: &mut [f32]) {
    for (row, out) in (0..weight.rows()).zip(out.chunks_mut(stride)) {
        weight.row_to_f32(row, &mut out[..weight.cols()]);
    }
}

/// The number of weight rows that are decoded at a time, and the stride of the decoded rows in floats.
///
/// The stride is one cache line longer than a row. At a stride of a power of two, rows would share sets of the
/// first-level cache.
pub(super) fn decoded_size(cols: usize) -> (usize, usize) {
    let stride = cols + 16;
    ((DECODED / stride / 4 * 4).clamp(*ROWS.start(), *ROWS.end()), stride)
}

/// Multiplies all hidden rows by all rows of a weight, in the order of summation of `F`.
///
/// # Safety
/// As for [`lanes::tile`](super::lanes::tile), with a weight of `D`'s type.
#[inline(always)]
pub(super) unsafe fn multiply<F: Lanes, D: Decoder<F>>(weight: &Matrix<'_>, hidden: PackedRows<'_>, out: &mut [f32]) {
    let all = All { weight, hidden, out: out.as_mut_ptr() };
    for start in (0..weight.rows()).step_by(BLOCK) {
        let rows = start..weight.rows().min(start + BLOCK);
        let mut r = 0;
        while r < hidden.rows() {
            let (rows, is_first) = (rows.clone(), r == 0);
            // SAFETY: by this function's contract; a panel has at most the hidden rows that are left.
            r += unsafe {
                match hidden.rows() - r {
                    4.. => all.panel::<F, D, 2, 4>(rows, r, is_first),
                    2.. => all.panel::<F, D, 4, 2>(rows, r, is_first),
                    _ => all.panel::<F, D, 4, 1>(rows, r, is_first),
                }
            };
        }
    }
}

/// The operands of a tile.
struct All<'a, 'w> {
    weight: &'a Matrix<'w>,
    hidden: PackedRows<'a>,
    out: *mut f32,
}

impl All<'_, '_> {
    /// Multiplies the weight rows `rows` by `NR` hidden rows, starting at `r`, and returns `NR`.
    ///
    /// # Safety
    /// As for [`multiply`]; the rows exist.
    #[inline(always)]
    unsafe fn panel<F: Lanes, D: Decoder<F>, const MR: usize, const NR: usize>(
        &self,
        rows: Range<usize>,
        r: usize,
        prefetches: bool,
    ) -> usize {
        let mut i = rows.start;
        // SAFETY: `i + MR <= rows.end` in the first loop and `i < rows.end` in the second.
        unsafe {
            while i + MR <= rows.end {
                self.register_block::<F, D, MR, NR>(i, r, prefetches);
                i += MR;
            }
            while i < rows.end {
                self.register_block::<F, D, 1, NR>(i, r, false);
                i += 1;
            }
        }
        NR
    }

    /// Computes `MR x NR` outputs, and prefetches the weight rows [`AHEAD`] rows later.
    ///
    /// # Safety
    /// As for [`multiply`]; `MR` weight rows and `NR` hidden rows exist from `i` and `r` on.
    #[inline(always)]
    unsafe fn register_block<F: Lanes, D: Decoder<F>, const MR: usize, const NR: usize>(
        &self,
        i: usize,
        r: usize,
        prefetches: bool,
    ) {
        let (stride, bytes) = (self.weight.row_stride_bytes(), D::DTYPE.block_bytes());
        let steps = D::DTYPE.block_elements() / F::STEP;
        // SAFETY: by this function's contract; a row has whole blocks, and `out` has `TILE` floats per hidden row.
        unsafe {
            let mut sums = [[F::zero(); MR]; NR];
            let hidden: [*const u8; NR] =
                core::array::from_fn(|n| self.hidden.as_ptr().add((r + n) * self.hidden.row_bytes()));
            let first = self.weight.bytes().as_ptr().add(i * stride);
            for block in 0..self.weight.cols() / D::DTYPE.block_elements() {
                let at: [*const u8; MR] = core::array::from_fn(|m| first.add(m * stride + block * bytes));
                if prefetches {
                    for at in at {
                        (0..bytes).step_by(64).for_each(|line| F::prefetch(at.wrapping_add(AHEAD * stride + line)));
                    }
                }
                let mut scales = [const { MaybeUninit::uninit() }; MR];
                for (at, scales) in at.iter().zip(&mut scales) {
                    D::scales(*at, scales);
                }
                for step in 0..steps {
                    let states: [F::PackedInput; NR] =
                        core::array::from_fn(|n| F::hidden(hidden[n].add((block * steps + step) * F::HIDDEN_BYTES)));
                    for m in 0..MR {
                        let weights = D::weights(at[m], step, scales[m].assume_init_ref());
                        for n in 0..NR {
                            sums[n][m] = F::multiply_add(sums[n][m], weights, states[n]);
                        }
                    }
                }
            }
            for (n, sums) in sums.into_iter().enumerate() {
                for (m, sums) in sums.into_iter().enumerate() {
                    *self.out.add((r + n) * TILE + i + m) = F::total(sums);
                }
            }
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
                let mut scales = MaybeUninit::uninit();
                D::scales(block.as_ptr(), &mut scales);
                let scales = scales.assume_init_ref();
                for step in 0..steps {
                    let weights = D::weights(block.as_ptr(), step, scales);
                    out.as_mut_ptr().add(step * F::STEP).cast::<F::Weights>().write_unaligned(weights);
                }
            }
        }
    }
}
