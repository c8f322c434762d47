//! Products of a shadow by AVX2: codes and digits are widened to 16 bits.

use super::digits::{DigitLayout, Digits, GROUP};
use super::register_blocks::register_blocks;
use crate::dot::TILE;
use core::arch::x86_64::*;
use flash_sampling_core::Shadow;
use flash_sampling_core::backend::code_stride;

/// The elements of a vector.
const LANES: usize = 16;

/// Writes to `out[r * TILE + i]` the integer product of row `i` of `shadow` and row `r` of `hidden`, as a float.
///
/// # Safety
/// AVX2 is available; the hidden rows are packed in [`DigitLayout::Groups`] and have as many columns as the shadow;
/// `out` has [`TILE`] floats per hidden row.
#[target_feature(enable = "avx2")]
pub(super) unsafe fn multiply(shadow: &Shadow<'_>, hidden: &Digits, out: &mut [f32]) {
    // SAFETY: by this function's contract; the rows of a register block exist.
    unsafe {
        register_blocks!(shadow.rows(), hidden.rows.len(), 2 x 2, 4 x 1: |i, r| {
            register_block::<MR, NR>(shadow, i, (hidden, r), out)
        });
    }
}

/// Computes `MR x NR` outputs from row `i` and hidden row `r` on.
///
/// # Safety
/// As for [`multiply`]; the rows exist.
#[inline]
#[target_feature(enable = "avx2")]
unsafe fn register_block<const MR: usize, const NR: usize>(
    shadow: &Shadow<'_>,
    i: usize,
    (hidden, r): (&Digits, usize),
    out: &mut [f32],
) {
    let stride = code_stride(shadow.cols());
    let (first, row_bytes) = hidden.first_group();
    // The sums of the products with the high digits, and with the low digits.
    let mut sums = [[[_mm256_setzero_si256(); 2]; MR]; NR];
    // SAFETY: by this function's contract; a row of codes and the digits of a row have whole groups.
    unsafe {
        let widened = |from: *const u8| _mm256_cvtepi8_epi16(_mm_loadu_si128(from.cast()));
        let codes: [*const u8; MR] =
            core::array::from_fn(|m| shadow.codes().as_ptr().cast::<u8>().add((i + m) * stride));
        let digits: [*const u8; NR] = core::array::from_fn(|n| first.add((r + n) * row_bytes));
        for k in (0..stride).step_by(LANES) {
            let offset = k / GROUP * DigitLayout::Groups.group_bytes() + k % GROUP;
            let codes = codes.map(|codes| widened(codes.add(k)));
            for (digits, sums) in digits.iter().zip(&mut sums) {
                let digits = [0, GROUP].map(|at| widened(digits.add(offset + at)));
                for (codes, sums) in codes.iter().zip(sums) {
                    for (sum, digits) in sums.iter_mut().zip(digits) {
                        *sum = _mm256_add_epi32(*sum, _mm256_madd_epi16(*codes, digits));
                    }
                }
            }
        }
    }
    for (n, sums) in sums.into_iter().enumerate() {
        for (m, [high, low]) in sums.into_iter().enumerate() {
            out[(r + n) * TILE + i + m] = 256.0 * total(high) + total(low);
        }
    }
}

/// Returns the sum of the eight integers of a vector.
#[inline]
#[target_feature(enable = "avx2")]
fn total(sums: __m256i) -> f32 {
    let halves = _mm_add_epi32(_mm256_castsi256_si128(sums), _mm256_extracti128_si256::<1>(sums));
    let pairs = _mm_add_epi32(halves, _mm_shuffle_epi32::<0b_00_00_11_10>(halves));
    _mm_cvtsi128_si32(_mm_add_epi32(pairs, _mm_shuffle_epi32::<0b_00_00_00_01>(pairs))) as f32
}
