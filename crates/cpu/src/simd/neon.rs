//! The NEON version of [`Vector`]: only the operations that the compiler does not vectorise well.
//!
//! Instructions in the assembly, against those of the compiler's version: 32 instead of 72 for a Philox round of eight
//! blocks, 34 instead of 173 for the largest logit of a span, 53 instead of 146 for the bits of a span.

use super::{SPAN, Vector};
use crate::scan::granules::{BLOCKS, Granules, PHILOX_M4X32, RoundKeys, Threshold};
use core::arch::aarch64::*;

/// The NEON version.
pub(crate) struct Neon;

// SAFETY (every block of this impl): the caller guarantees NEON; loads and stores stay within the arguments and local
// arrays.
impl Vector for Neon {
    #[inline(always)]
    unsafe fn granules<const N: usize>(counter: [u32; 4], keys: &RoundKeys) -> [Granules; N] {
        let [block, c1, c2, c3] = counter;
        let mut batches = [Granules::default(); N];
        for (n, batch) in batches.iter_mut().enumerate() {
            let block = block.wrapping_add((n * BLOCKS) as u32);
            // SAFETY: as above.
            unsafe {
                let [m0, m1] = PHILOX_M4X32.map(|factor| vdupq_n_u32(factor));
                let count = vld1q_u32([0, 1, 2, 3].as_ptr());
                // Two vectors of four blocks each.
                let mut c = [0, 4].map(|from| {
                    let blocks = vaddq_u32(vdupq_n_u32(block.wrapping_add(from)), count);
                    [blocks, vdupq_n_u32(c1), vdupq_n_u32(c2), vdupq_n_u32(c3)]
                });
                for keys in keys {
                    let [k0, k1] = keys.map(|key| vdupq_n_u32(key as u32));
                    for c in &mut c {
                        let ([low0, high0], [low1, high1]) = (product(c[0], m0), product(c[2], m1));
                        let (w0, w2) = (veorq_u32(high1, c[1]), veorq_u32(high0, c[3]));
                        *c = [veorq_u32(w0, k0), low1, veorq_u32(w2, k1), low0];
                    }
                }
                for (half, [w0, w1, w2, w3]) in c.into_iter().enumerate() {
                    vst4q_u32(batch.words.as_mut_ptr().add(4 * half).cast(), uint32x4x4_t(w0, w1, w2, w3));
                    let least = vminq_u32(vminq_u32(w0, w1), vminq_u32(w2, w3));
                    vst1q_u32(batch.least.as_mut_ptr().add(4 * half), vshrq_n_u32::<4>(least));
                }
            }
        }
        batches
    }
    #[inline(always)]
    unsafe fn open(least: &[u32; BLOCKS], threshold: Threshold, tops: &[f32; BLOCKS]) -> u32 {
        let mut open = 0;
        for from in [0, 4] {
            // SAFETY: as above.
            unsafe {
                let (base, scale) = (vdupq_n_f32(threshold.base), vdupq_n_f32(Threshold::SCALE));
                let least = vld1q_u32(least.as_ptr().add(from));
                let bits = vreinterpretq_s32_f32(vcvtq_f32_u32(least));
                let least = vfmaq_f32(base, vcvtq_f32_s32(bits), scale);
                let least = vmaxnmq_f32(least, vdupq_n_f32(threshold.floor));
                let reached = vcgeq_f32(vld1q_f32(tops.as_ptr().add(from)), least);
                open |= vaddvq_u32(vandq_u32(reached, vld1q_u32([1, 2, 4, 8].as_ptr()))) << from;
            }
        }
        open
    }
    /// NEON's maximum is NaN if any of its operands is NaN, so one comparison checks a whole span.
    #[inline(always)]
    unsafe fn largest(spans: &[[f32; SPAN]], tops: &mut [f32]) -> Option<f32> {
        let (mut all, mut valid) = (f32::NEG_INFINITY, true);
        for (top, span) in tops.iter_mut().zip(spans) {
            // SAFETY: as above; a span has 64 logits.
            unsafe {
                let at = span.as_ptr();
                let mut most: [float32x4_t; 4] = core::array::from_fn(|v| vld1q_f32(at.add(4 * v)));
                for from in (16..SPAN).step_by(16) {
                    for (v, most) in most.iter_mut().enumerate() {
                        *most = vmaxq_f32(*most, vld1q_f32(at.add(from + 4 * v)));
                    }
                }
                let [a, b, c, d] = most;
                *top = vmaxvq_f32(vmaxq_f32(vmaxq_f32(a, b), vmaxq_f32(c, d)));
            }
            valid &= *top < f32::INFINITY;
            all = if *top > all { *top } else { all };
        }
        valid.then_some(all)
    }
    #[inline(always)]
    unsafe fn at_least(logits: &[f32; SPAN], cuts: [f32; 4]) -> u64 {
        // SAFETY: as above; a span has 64 logits.
        unsafe {
            let weights = vreinterpretq_u8_u64(vdupq_n_u64(0x8040_2010_0804_0201));
            // One bit per byte, for the sixteen logits of a group.
            let group = |g: usize| {
                let at = logits.as_ptr().add(16 * g);
                let cut = vdupq_n_f32(cuts[g]);
                let [a, b, c, d] = [0, 4, 8, 12].map(|v| vreinterpretq_u16_u32(vcgeq_f32(vld1q_f32(at.add(v)), cut)));
                let (low, high) = (vuzp1q_u16(a, b), vuzp1q_u16(c, d));
                vandq_u8(vuzp1q_u8(vreinterpretq_u8_u16(low), vreinterpretq_u8_u16(high)), weights)
            };
            // Three pairwise sums leave one byte per eight logits.
            let quarters = vpaddq_u8(vpaddq_u8(group(0), group(1)), vpaddq_u8(group(2), group(3)));
            vgetq_lane_u64::<0>(vreinterpretq_u64_u8(vpaddq_u8(quarters, quarters)))
        }
    }
}

/// Returns the low and the high words of the 64-bit products.
///
/// # Safety
/// NEON is available.
#[inline(always)]
unsafe fn product(words: uint32x4_t, factor: uint32x4_t) -> [uint32x4_t; 2] {
    // SAFETY: by this function's contract.
    unsafe {
        let low = vreinterpretq_u32_u64(vmull_u32(vget_low_u32(words), vget_low_u32(factor)));
        let high = vreinterpretq_u32_u64(vmull_high_u32(words, factor));
        [vuzp1q_u32(low, high), vuzp2q_u32(low, high)]
    }
}
