//! Dot products of quantised weights in AVX-512 VNNI: integer products of codes and of digits of the hidden states.
//!
//! Plain version, for a hidden row and a weight row in blocks of codes:
//! ```text
//! for each 16 elements: v = round(h / s), s a power of two, |v| < 2^23     (once per hidden row, `digits.rs`)
//! out = sum over groups of 4 elements of scale * s * sum(code * v)
//! ```
//! Deviations, and why each keeps the result:
//! 1. `v` is three digits of 8 bits, because the instruction multiplies 8-bit numbers. It needs unsigned codes: their
//!    offset times the sum of four digits is subtracted in integers. The integer sums are exact.
//! 2. A type with minima subtracts `minimum * s * sum(v)`, whose last two factors are stored per group.
//! 3. `MR x NR` outputs are computed at the same time. Sums stay separate, so a row has the same bits in every batch.
//! 4. A hidden row without digits (a NaN, an infinity, an exponent out of range), and an output that is not finite, take
//!    the float32 product of the decoded weight.
//!
//! The digits have the 24 bits of a float32 for the largest of 16 elements, and fewer for the others: the error is about
//! that of a float32 sum. `docs/exactness.md` proves that the bound of dot products covers it.

mod codes;
mod digits;

use super::TILE;
use super::pack::Packed;
use codes::Codes;
use core::arch::x86_64::*;
use core::ops::Range;
pub(super) use digits::pack;
use digits::{GROUP, GROUP_BYTES, Row};
use flash_sampling_core::{DType, Matrix};

/// Weight rows that stay in the second-level cache while the hidden rows pass over them.
const BLOCK: usize = 32;
/// Weight rows from a row to its prefetched row.
const AHEAD: usize = 8;

/// The offset that makes the codes of a type unsigned; `None` for types with minima.
pub(super) fn offset(dtype: DType) -> Option<i32> {
    macro_rules! offset {
        ($format:ident) => {
            (!<$format as Codes>::HAS_MINIMA).then_some(<$format as Codes>::OFFSET)
        };
    }
    super::blocks::for_format!(dtype, offset, None)
}

/// Multiplies a tile; see [`super::lanes::tile`]. `decoded` has room for a weight row.
///
/// # Safety
/// AVX-512 F, BW, DQ, VL and VNNI are available; `weight` has blocks, rows of a multiple of 64 elements, and at most
/// [`TILE`] rows; `hidden` has digits for its type and as many columns; `out` has [`TILE`] floats per hidden row.
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512vnni,avx2,fma,f16c")]
pub(super) unsafe fn tile(weight: &Matrix<'_>, hidden: &Packed, out: &mut [f32], decoded: &mut [f32]) {
    let all = All { weight, hidden, out: out.as_mut_ptr() };
    macro_rules! multiply {
        ($format:ident) => {
            // SAFETY: by this function's contract.
            unsafe { all.multiply::<$format>() }
        };
    }
    super::blocks::for_format!(weight.dtype(), multiply, unreachable!("a type without blocks"));
    for i in 0..weight.rows() {
        let mut is_decoded = false;
        for r in 0..hidden.rows() {
            let out = &mut out[r * TILE + i];
            if !hidden.has_digits(r) || !out.is_finite() {
                let row = &mut decoded[..weight.cols()];
                if !core::mem::replace(&mut is_decoded, true) {
                    weight.row_to_f32(i, row);
                }
                *out = float_product(row, hidden.digit_floats(r));
            }
        }
    }
}

/// A float32 dot product in a fixed order, for rows without digits.
#[cold]
fn float_product(weight: &[f32], hidden: &[f32]) -> f32 {
    let mut sums = [0.0f32; 16];
    for (w, h) in weight.as_chunks::<16>().0.iter().zip(hidden.as_chunks::<16>().0) {
        sums.iter_mut().zip(w.iter().zip(h)).for_each(|(sum, (w, h))| *sum += w * h);
    }
    sums.into_iter().sum()
}

/// The operands of a tile.
struct All<'a, 'w> {
    weight: &'a Matrix<'w>,
    hidden: &'a Packed,
    out: *mut f32,
}

impl All<'_, '_> {
    /// # Safety
    /// As for [`tile`], with a weight of `T`.
    #[inline(always)]
    unsafe fn multiply<T: Codes>(&self) {
        for start in (0..self.weight.rows()).step_by(BLOCK) {
            let rows = start..self.weight.rows().min(start + BLOCK);
            let mut r = 0;
            while r < self.hidden.rows() {
                // SAFETY: by this function's contract; a panel has at most the hidden rows that are left.
                r += unsafe {
                    match self.hidden.rows() - r {
                        4.. => self.panel::<T, 2, 4>(rows.clone(), r),
                        2.. => self.panel::<T, 4, 2>(rows.clone(), r),
                        _ => self.panel::<T, 4, 1>(rows.clone(), r),
                    }
                };
            }
        }
    }

    /// Multiplies the weight rows `rows` by `NR` hidden rows, starting at `r`, and returns `NR`.
    ///
    /// # Safety
    /// As for [`All::multiply`]; the rows exist.
    #[inline(always)]
    unsafe fn panel<T: Codes, const MR: usize, const NR: usize>(&self, rows: Range<usize>, r: usize) -> usize {
        let mut i = rows.start;
        // SAFETY: `i + MR <= rows.end` in the first loop and `i < rows.end` in the second.
        unsafe {
            while i + MR <= rows.end {
                self.register_block::<T, MR, NR>(i, r);
                i += MR;
            }
            while i < rows.end {
                self.register_block::<T, 1, NR>(i, r);
                i += 1;
            }
        }
        NR
    }

    /// Computes `MR x NR` outputs. The first panel of hidden rows prefetches later weight rows.
    ///
    /// # Safety
    /// As for [`All::multiply`]; `MR` weight rows and `NR` hidden rows exist from `i` and `r` on.
    #[inline(always)]
    unsafe fn register_block<T: Codes, const MR: usize, const NR: usize>(&self, i: usize, r: usize) {
        let (stride, bytes) = (self.weight.row_stride_bytes(), T::UNIT_BYTES);
        // SAFETY: by this function's contract; a row has whole units, and hidden rows have digits for all of them.
        unsafe {
            let mut sums = [[_mm512_setzero_ps(); MR]; NR];
            let hidden: [*const u8; NR] =
                core::array::from_fn(|n| self.hidden.as_ptr().add((r + n) * self.hidden.row_bytes()));
            let first = self.weight.bytes().as_ptr().add(i * stride);
            for unit in 0..self.weight.cols() / (T::GROUPS * GROUP) {
                let at: [*const u8; MR] = core::array::from_fn(|m| first.add(m * stride + unit * bytes));
                if r == 0 {
                    for at in at {
                        for line in (0..bytes).step_by(64) {
                            _mm_prefetch::<_MM_HINT_T1>(at.wrapping_add(AHEAD * stride + line).cast());
                        }
                    }
                }
                let scales: [T::Scales; MR] = core::array::from_fn(|m| T::scales(at[m]));
                for group in 0..T::GROUPS {
                    let states: [Row; NR] =
                        core::array::from_fn(|n| Row::load(hidden[n].add((unit * T::GROUPS + group) * GROUP_BYTES)));
                    for m in 0..MR {
                        let codes = T::codes(at[m], group);
                        let (scale, minimum) = T::scale(&scales[m], group);
                        for n in 0..NR {
                            sums[n][m] = states[n].multiply::<T>(codes, scale, minimum, sums[n][m]);
                        }
                    }
                }
            }
            for (n, sums) in sums.into_iter().enumerate() {
                for (m, sums) in sums.into_iter().enumerate() {
                    *self.out.add((r + n) * TILE + i + m) = _mm512_reduce_add_ps(sums);
                }
            }
        }
    }
}
