//! Products of codes and digits, by ARM's dot products of 8-bit integers (`sdot`).

use super::digits::{DigitLayout, Digits, GROUP};
use super::register_blocks::register_blocks;
use crate::dot::TILE;
use crate::dot::blocks::Halves;
use core::arch::aarch64::*;
use core::arch::asm;
use core::mem::MaybeUninit;

/// Whether this machine has the instructions.
pub(super) fn is_available() -> bool {
    std::arch::is_aarch64_feature_detected!("dotprod")
}

/// Adds the products of four pairs of bytes to each of four integers.
///
/// This is inline assembly, because Rust's intrinsic for this instruction is stable only since 1.98.
#[inline]
#[target_feature(enable = "neon,dotprod")]
fn sdot(mut sums: int32x4_t, a: int8x16_t, b: int8x16_t) -> int32x4_t {
    // SAFETY: the instruction is available, and reads and writes these registers only.
    unsafe {
        asm!(
            "sdot {sums:v}.4s, {a:v}.16b, {b:v}.16b",
            sums = inout(vreg) sums, a = in(vreg) a, b = in(vreg) b,
            options(pure, nomem, nostack, preserves_flags),
        );
    }
    sums
}

/// The sums of an output in two vectors.
///
/// With a shadow, the vectors hold integer sums of products with the high digits, and with the low digits. With blocks,
/// the vectors hold float32 sums over the even and over the odd runs of 16 weights.
type Sums = [int32x4_t; 2];

/// A type of codes, and its products with digits.
pub(super) trait Codes {
    /// The layout of the digits.
    const DIGITS: DigitLayout;

    /// Adds the products of `MR` rows from `codes` on and the digits at `NR` addresses, of all columns.
    ///
    /// # Safety
    /// NEON and dot products are available; the rows have `cols` codes; the digits have the layout [`Codes::DIGITS`].
    unsafe fn add<const MR: usize, const NR: usize>(
        codes: [*const u8; MR],
        digits: [*const u8; NR],
        cols: usize,
        sums: &mut [[Sums; MR]; NR],
    );

    /// Returns an output from its sums.
    ///
    /// # Safety
    /// NEON is available.
    unsafe fn total(sums: Sums) -> f32;
}

/// The codes of a [`Shadow`](flash_sampling_core::Shadow).
pub(super) struct ShadowCodes;

impl Codes for ShadowCodes {
    const DIGITS: DigitLayout = DigitLayout::Groups;

    #[inline]
    #[target_feature(enable = "neon,dotprod")]
    unsafe fn add<const MR: usize, const NR: usize>(
        codes: [*const u8; MR],
        digits: [*const u8; NR],
        cols: usize,
        sums: &mut [[Sums; MR]; NR],
    ) {
        for k in (0..cols).step_by(16) {
            let offset = k / GROUP * Self::DIGITS.group_bytes() + k % GROUP;
            for (n, digits) in digits.into_iter().enumerate() {
                // SAFETY: by this function's contract.
                let [high, low] = [0, GROUP].map(|i| unsafe { vld1q_s8(digits.add(offset + i).cast()) });
                for (m, codes) in codes.into_iter().enumerate() {
                    // SAFETY: as above.
                    let codes = unsafe { vld1q_s8(codes.add(k).cast()) };
                    let [first, second] = sums[n][m];
                    sums[n][m] = [sdot(first, codes, high), sdot(second, codes, low)];
                }
            }
        }
    }

    #[inline]
    #[target_feature(enable = "neon,dotprod")]
    unsafe fn total([high, low]: Sums) -> f32 {
        256.0 * vaddvq_s32(high) as f32 + vaddvq_s32(low) as f32
    }
}

impl<T: Halves> Codes for T {
    const DIGITS: DigitLayout = if T::HAS_MINIMA { DigitLayout::GroupsAndSums } else { DigitLayout::Groups };

    #[inline]
    #[target_feature(enable = "neon,dotprod")]
    unsafe fn add<const MR: usize, const NR: usize>(
        codes: [*const u8; MR],
        digits: [*const u8; NR],
        cols: usize,
        sums: &mut [[Sums; MR]; NR],
    ) {
        let (elements, bytes) = (T::DTYPE.block_elements(), T::DTYPE.block_bytes());
        for block in 0..cols / elements {
            let mut scales = [MaybeUninit::uninit(); MR];
            for (codes, scales) in codes.into_iter().zip(&mut scales) {
                // SAFETY: by this function's contract.
                unsafe { T::scales(codes.add(block * bytes), scales) };
            }
            for half in 0..elements / 16 {
                let k = block * elements + 16 * half;
                let offset = k / GROUP * Self::DIGITS.group_bytes() + k % GROUP;
                for (m, row) in codes.into_iter().enumerate() {
                    // SAFETY: by this function's contract; the scales were written.
                    let (codes, scales) =
                        unsafe { (T::codes(row.add(block * bytes), half), scales[m].assume_init_ref()) };
                    let (scale, minimum) = T::scale(scales, half);
                    for (n, digits) in digits.into_iter().enumerate() {
                        // SAFETY: as above.
                        let vector = |i: usize| unsafe { vld1q_s8(digits.add(offset + i * GROUP).cast()) };
                        let high = sdot(vdupq_n_s32(0), codes, vector(0));
                        let sum = vcvtq_f32_s32(sdot(vshlq_n_s32::<8>(high), codes, vector(1)));
                        let sums = &mut sums[n][m][half % 2];
                        let mut total = vfmaq_n_f32(vreinterpretq_f32_s32(*sums), sum, scale);
                        if T::HAS_MINIMA {
                            total = vfmsq_n_f32(total, vreinterpretq_f32_s8(vector(2)), minimum);
                        }
                        *sums = vreinterpretq_s32_f32(total);
                    }
                }
            }
        }
    }

    #[inline]
    #[target_feature(enable = "neon,dotprod")]
    unsafe fn total([even, odd]: Sums) -> f32 {
        vaddvq_f32(vaddq_f32(vreinterpretq_f32_s32(even), vreinterpretq_f32_s32(odd)))
    }
}

/// Writes to `out[r * TILE + i]` the product of row `i` of the codes and hidden row `r`.
///
/// Rows of codes begin `stride` bytes apart.
///
/// # Safety
/// NEON and dot products are available; there are `rows` rows of `cols` codes of `T`; the hidden rows are packed in the
/// layout [`Codes::DIGITS`] and have as many columns; `out` has [`TILE`] floats per hidden row.
#[target_feature(enable = "neon,dotprod")]
pub(super) unsafe fn multiply<T: Codes>(
    (codes, stride): (*const u8, usize),
    [rows, cols]: [usize; 2],
    hidden: &Digits,
    out: &mut [f32],
) {
    // SAFETY: by this function's contract; the rows of a register block exist.
    unsafe {
        register_blocks!(rows, hidden.rows.len(), 2 x 4, 4 x 2, 4 x 1: |i, r| {
            register_block::<T, MR, NR>((codes, stride), i, cols, (hidden, r), out)
        });
    }
}

/// Computes `MR x NR` outputs from row `i` and hidden row `r` on.
///
/// # Safety
/// As for [`multiply`]; the rows exist.
#[inline]
#[target_feature(enable = "neon,dotprod")]
unsafe fn register_block<T: Codes, const MR: usize, const NR: usize>(
    (codes, stride): (*const u8, usize),
    i: usize,
    cols: usize,
    (hidden, r): (&Digits, usize),
    out: &mut [f32],
) {
    let (first, row_bytes) = hidden.first_group();
    // SAFETY: by this function's contract.
    unsafe {
        let codes = core::array::from_fn(|m| codes.add((i + m) * stride));
        let digits = core::array::from_fn(|n| first.add((r + n) * row_bytes));
        let mut sums = [[[vdupq_n_s32(0); 2]; MR]; NR];
        T::add::<MR, NR>(codes, digits, cols, &mut sums);
        for (n, sums) in sums.into_iter().enumerate() {
            for (m, sums) in sums.into_iter().enumerate() {
                out[(r + n) * TILE + i + m] = T::total(sums);
            }
        }
    }
}
