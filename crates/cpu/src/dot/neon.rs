//! Dot products in NEON: 8 elements per step, two fused multiply-adds into one accumulator of 4 lanes.
//!
//! The block of 4 x 4 outputs takes 27 of the 32 vector registers: 16 accumulators, 8 vectors of weights, 2 of hidden
//! states, and a zero. There is no prefetch, because the second-level caches of small ARM processors do not hold a second
//! block of weight rows.

use super::blocks::{self, Spans128, for_format};
use super::entry_points::entry_points;
use super::lanes::{self, Lanes};
use super::pack::PackedRows;
use core::arch::aarch64::*;
use core::arch::asm;
use core::marker::PhantomData;
use flash_sampling_core::{DType, Matrix};
use half::{bf16, f16};

/// NEON for a weight of type `T`.
struct Neon<T>(PhantomData<T>);

/// The type `T` of decoded blocks: float32 in steps of 16, with the order of sums of `f32`.
struct Decoded;

macro_rules! lanes {
    ($type:ty, $vectors:literal x $bytes:literal, |$at:ident| $widen:expr) => {
        impl Lanes for Neon<$type> {
            type Sums = float32x4_t;
            type Weights = [float32x4_t; $vectors];
            type PackedInput = [float32x4_t; $vectors];
            const STEP: usize = 4 * $vectors;
            const WEIGHT_BYTES: usize = $vectors * $bytes;
            const HIDDEN_BYTES: usize = $vectors * 16;

            #[inline(always)]
            unsafe fn zero() -> float32x4_t {
                // SAFETY: the caller guarantees the instruction set (here and below) and the pointers.
                unsafe { vdupq_n_f32(0.0) }
            }
            #[inline(always)]
            unsafe fn weights($at: *const u8) -> [float32x4_t; $vectors] {
                // SAFETY: as above.
                unsafe { $widen }
            }
            #[inline(always)]
            unsafe fn hidden(at: *const u8) -> [float32x4_t; $vectors] {
                // SAFETY: as above.
                unsafe { floats(at) }
            }
            #[inline(always)]
            unsafe fn multiply_add(
                sums: float32x4_t,
                w: [float32x4_t; $vectors],
                h: [float32x4_t; $vectors],
            ) -> float32x4_t {
                // SAFETY: as above.
                w.into_iter().zip(h).fold(sums, |sums, (w, h)| unsafe { vfmaq_f32(sums, w, h) })
            }
            #[inline(always)]
            unsafe fn prefetch(_: *const u8) {}
            /// Returns `(s0 + s1) + (s2 + s3)`.
            #[inline(always)]
            unsafe fn total(sums: float32x4_t) -> f32 {
                // SAFETY: as above.
                unsafe {
                    let two = vpaddq_f32(sums, sums);
                    vgetq_lane_f32::<0>(vpaddq_f32(two, two))
                }
            }
        }
    };
}

// A bf16 is the high half of its float32: zeros between the elements widen them in their order.
lanes!(bf16, 2 x 8, |at| {
    let (zero, halves) = (vdupq_n_u16(0), vreinterpretq_u16_u8(vld1q_u8(at)));
    [vreinterpretq_f32_u16(vzip1q_u16(zero, halves)), vreinterpretq_f32_u16(vzip2q_u16(zero, halves))]
});
lanes!(f16, 2 x 8, |at| widen_f16(vld1q_u8(at)));
lanes!(f32, 2 x 16, |at| floats(at));
lanes!(Decoded, 4 x 16, |at| floats(at));

/// Loads float32 of any alignment.
///
/// # Safety
/// NEON is available, and `at` has `16 N` readable bytes.
#[inline(always)]
unsafe fn floats<const N: usize>(at: *const u8) -> [float32x4_t; N] {
    // SAFETY: by this function's contract.
    core::array::from_fn(|v| unsafe { vreinterpretq_f32_u8(vld1q_u8(at.add(16 * v))) })
}

/// Widens 8 f16, exactly: subnormals keep their value, a NaN becomes quiet.
///
/// Rust's intrinsic for this instruction is stable since 1.94.
///
/// # Safety
/// NEON is available.
#[inline(always)]
pub(super) unsafe fn widen_f16(halves: uint8x16_t) -> [float32x4_t; 2] {
    let (low, high): (float32x4_t, float32x4_t);
    // SAFETY: both instructions are part of NEON; they read and write these registers only. A signalling NaN also sets a
    // flag of FPSR, so the option `preserves_flags` would be wrong.
    unsafe {
        asm!(
            "fcvtl {low:v}.4s, {halves:v}.4h",
            "fcvtl2 {high:v}.4s, {halves:v}.8h",
            halves = in(vreg) halves,
            low = out(vreg) low,
            high = lateout(vreg) high,
            options(pure, nomem, nostack),
        );
    }
    [low, high]
}

entry_points!($ #[target_feature(enable = "neon")] Neon, Spans128 of Decoded, 4 x 4, 4);

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_f16_and_bf16_widens_to_its_value() {
        for first in (0..=u16::MAX).step_by(8) {
            let halves: [u16; 8] = core::array::from_fn(|i| first + i as u16);
            // SAFETY: NEON is available on every processor with these tests; the array has 16 bytes.
            let widened = unsafe {
                [Neon::<f16>::weights(halves.as_ptr().cast()), Neon::<bf16>::weights(halves.as_ptr().cast())]
                    .map(|vectors| core::mem::transmute::<[float32x4_t; 2], [f32; 8]>(vectors))
            };
            for (i, bits) in halves.into_iter().enumerate() {
                let wanted = [f16::from_bits(bits).to_f32(), bf16::from_bits(bits).to_f32()];
                for (found, wanted) in [widened[0][i], widened[1][i]].into_iter().zip(wanted) {
                    let same = found.to_bits() == wanted.to_bits() || found.is_nan() && wanted.is_nan();
                    assert!(same, "{bits:#06x}: {found} for {wanted}");
                }
            }
        }
    }
}
