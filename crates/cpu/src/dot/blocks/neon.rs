//! Decoders in NEON. They unpack the 16 codes of half a span to a 128-bit vector.

use super::Decoder;
use super::formats::{Format, Iq4Nl, Mxfp4, Q4, Q4K, Q5K, Q6K, Q8};
use crate::dot::lanes::Lanes;
use crate::dot::neon::widen_f16;
use core::arch::aarch64::*;
use core::marker::PhantomData;
use core::mem::MaybeUninit;
use flash_sampling_core::DType;
use flash_sampling_core::backend::{E2M1, IQ4_NL, mxfp4_scale};

/// The operations of a block type.
///
/// # Safety
/// NEON is available, and `block` points to a readable block.
pub(crate) trait Halves: Format {
    /// The scales and minima of a block.
    type Scales: Copy;
    /// Whether weights have minima.
    const HAS_MINIMA: bool = false;

    unsafe fn scales(block: *const u8, out: &mut MaybeUninit<Self::Scales>);
    /// The scale and the minimum of the 16 weights from `16 * half` on.
    fn scale(scales: &Self::Scales, half: usize) -> (f32, f32);
    /// The codes of these weights.
    unsafe fn codes(block: *const u8, half: usize) -> int8x16_t;
}

/// Reads an f16 as a float32.
///
/// # Safety
/// NEON is available, and two bytes are readable.
#[inline(always)]
unsafe fn half_at(at: *const u8) -> f32 {
    // SAFETY: by this function's contract.
    unsafe {
        let halves = vdupq_n_u16(at.cast::<u16>().read_unaligned());
        vgetq_lane_f32::<0>(widen_f16(vreinterpretq_u8_u16(halves))[0])
    }
}

/// Unpacks the low or the high nibbles of 16 bytes to 16 codes.
///
/// # Safety
/// NEON is available, and 16 bytes are readable.
#[inline(always)]
unsafe fn nibbles(at: *const u8, is_high: bool) -> uint8x16_t {
    // SAFETY: by this function's contract.
    unsafe {
        let bytes = vld1q_u8(at);
        if is_high { vshrq_n_u8::<4>(bytes) } else { vandq_u8(bytes, vdupq_n_u8(15)) }
    }
}

/// Looks up the table's entry for each code.
///
/// # Safety
/// NEON is available.
#[inline(always)]
unsafe fn look_up(table: [i8; 16], codes: uint8x16_t) -> int8x16_t {
    // SAFETY: by this function's contract; the table has 16 bytes.
    unsafe { vqtbl1q_s8(vld1q_s8(table.as_ptr()), codes) }
}

/// Implements [`Halves`] for a type with one scale for 32 weights.
macro_rules! one_scale {
    ($format:ty, |$at:ident, $half:ident| $scale:expr, $codes:expr) => {
        impl Halves for $format {
            type Scales = f32;

            #[inline(always)]
            unsafe fn scales($at: *const u8, out: &mut MaybeUninit<f32>) {
                // SAFETY: by the trait's contract (here and below).
                out.write(unsafe { $scale });
            }
            #[inline(always)]
            fn scale(scale: &f32, _: usize) -> (f32, f32) {
                (*scale, 0.0)
            }
            #[inline(always)]
            unsafe fn codes($at: *const u8, $half: usize) -> int8x16_t {
                // SAFETY: as above.
                unsafe { $codes }
            }
        }
    };
}

one_scale!(Q8, |at, half| half_at(at), vld1q_s8(at.add(2 + 16 * half).cast()));
one_scale!(Q4, |at, half| half_at(at), vsubq_s8(vreinterpretq_s8_u8(nibbles(at.add(2), half == 1)), vdupq_n_s8(8)));
one_scale!(Iq4Nl, |at, half| half_at(at), look_up(IQ4_NL, nibbles(at.add(2), half == 1)));
one_scale!(Mxfp4, |at, half| mxfp4_scale(*at), look_up(E2M1, nibbles(at.add(1), half == 1)));

/// The scales and minima of the eight spans of a block of `Q4_K` or `Q5_K`.
///
/// # Safety
/// As for [`Halves`].
#[inline(always)]
unsafe fn scales_and_minima(block: *const u8) -> [[f32; 8]; 2] {
    // SAFETY: by this function's contract; the 12 bytes are three words.
    unsafe {
        let word = |i: usize| u64::from(block.add(4 + 4 * i).cast::<u32>().read_unaligned());
        let (a, b, c) = (word(0), word(1), word(2));
        // The low six bits of a byte of `a` (`b`) are a scale (minimum) of spans 0 to 3. Its high two bits, and four
        // bits of `c`, are a scale (minimum) of spans 4 to 7.
        let (low, high) = (0x3f3f_3f3f, 0x0f0f_0f0f);
        let scales = a & low | (c & high | a >> 2 & 0x3030_3030) << 32;
        let minima = b & low | (c >> 4 & high | b >> 2 & 0x3030_3030) << 32;
        let times = |numbers: u64, factor: f32| numbers.to_le_bytes().map(|number| f32::from(number) * factor);
        [times(scales, half_at(block)), times(minima, half_at(block.add(2)))]
    }
}

/// The low four bits of 16 codes of `Q4_K` or `Q5_K`: two spans share 32 bytes.
///
/// # Safety
/// As for [`Halves`]; `at` points to the first of these bytes.
#[inline(always)]
unsafe fn low_bits(at: *const u8, half: usize) -> uint8x16_t {
    let (span, half) = (half / 2, half % 2);
    // SAFETY: by this function's contract.
    unsafe { nibbles(at.add(span / 2 * 32 + half * 16), span % 2 == 1) }
}

/// Implements [`Halves`] for a type with a scale and a minimum for 32 weights.
macro_rules! with_minima {
    ($format:ty, |$at:ident, $half:ident| $codes:expr) => {
        impl Halves for $format {
            type Scales = [[f32; 8]; 2];
            const HAS_MINIMA: bool = true;

            #[inline(always)]
            unsafe fn scales(block: *const u8, out: &mut MaybeUninit<[[f32; 8]; 2]>) {
                // SAFETY: by the trait's contract (here and below).
                out.write(unsafe { scales_and_minima(block) });
            }
            #[inline(always)]
            fn scale([scales, minima]: &[[f32; 8]; 2], half: usize) -> (f32, f32) {
                (scales[half / 2], minima[half / 2])
            }
            #[inline(always)]
            unsafe fn codes($at: *const u8, $half: usize) -> int8x16_t {
                // SAFETY: as above.
                unsafe { vreinterpretq_s8_u8($codes) }
            }
        }
    };
}

with_minima!(Q4K, |at, half| low_bits(at.add(16), half));
with_minima!(Q5K, |at, half| {
    let bit = vdupq_n_u8(1u8 << (half / 2));
    let is_set = vtstq_u8(vld1q_u8(at.add(16 + half % 2 * 16)), bit);
    vorrq_u8(low_bits(at.add(48), half), vandq_u8(is_set, vdupq_n_u8(16)))
});

impl Halves for Q6K {
    type Scales = [f32; 16];

    #[inline(always)]
    unsafe fn scales(block: *const u8, out: &mut MaybeUninit<[f32; 16]>) {
        // SAFETY: by the trait's contract (here and below).
        unsafe {
            let d = half_at(block.add(208));
            out.write(core::array::from_fn(|half| f32::from(*block.add(192 + half).cast::<i8>()) * d));
        }
    }

    #[inline(always)]
    fn scale(scales: &[f32; 16], half: usize) -> (f32, f32) {
        (scales[half], 0.0)
    }

    #[inline(always)]
    unsafe fn codes(block: *const u8, half: usize) -> int8x16_t {
        // Each half of the block has four spans: the low nibbles of 64 bytes, then the high nibbles.
        let (side, part, from) = (half / 8, half / 2 % 4, half % 2 * 16);
        // SAFETY: as above.
        unsafe {
            let low = nibbles(block.add(side * 64 + part % 2 * 32 + from), part / 2 == 1);
            let high = vld1q_u8(block.add(128 + side * 32 + from));
            // A negative shift is a shift to the right.
            let high = vandq_u8(vshlq_u8(high, vdupq_n_s8(-2 * part as i8)), vdupq_n_u8(3));
            vsubq_s8(vreinterpretq_s8_u8(vorrq_u8(low, vshlq_n_u8::<4>(high))), vdupq_n_s8(32))
        }
    }
}

/// The decoder in NEON.
pub(crate) struct Spans128<T>(PhantomData<T>);

impl<T: Halves, F: Lanes<Weights = [float32x4_t; 4]>> Decoder<F> for Spans128<T> {
    type Scales = T::Scales;
    const DTYPE: DType = T::DTYPE;

    #[inline(always)]
    unsafe fn scales(block: *const u8, out: &mut MaybeUninit<T::Scales>) {
        // SAFETY: by the trait's contract (here and below).
        unsafe { T::scales(block, out) }
    }

    #[inline(always)]
    unsafe fn weights(block: *const u8, half: usize, scales: &T::Scales) -> [float32x4_t; 4] {
        // SAFETY: as above.
        unsafe {
            let codes = T::codes(block, half);
            let (low, high) = (vmovl_s8(vget_low_s8(codes)), vmovl_high_s8(codes));
            let (scale, minimum) = T::scale(scales, half);
            let (scale, minimum) = (vdupq_n_f32(scale), vdupq_n_f32(-minimum));
            let codes = [
                vmovl_s16(vget_low_s16(low)),
                vmovl_high_s16(low),
                vmovl_s16(vget_low_s16(high)),
                vmovl_high_s16(high),
            ];
            codes.map(|codes| {
                let codes = vcvtq_f32_s32(codes);
                if T::HAS_MINIMA { vfmaq_f32(minimum, codes, scale) } else { vmulq_f32(codes, scale) }
            })
        }
    }
}
