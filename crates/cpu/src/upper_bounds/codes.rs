//! The codes of 64 weights as unsigned bytes, and their scales, for shadows and each block type.

use crate::dot::blocks::formats::{Iq4Nl, Mxfp4, Q4, Q4K, Q5K, Q6K, Q8};
use crate::dot::blocks::x86::{half_at, packed_scales_and_minima};
use core::arch::x86_64::*;
use flash_sampling_core::backend::{E2M1, IQ4_NL, mxfp4_scale};

/// Reads the codes and scales of a type. A unit is 256 weights, two blocks of 32, or 64 codes of a shadow.
///
/// # Safety
/// AVX-512 F, BW, DQ and VL are available, and `unit` points to a readable unit.
pub(crate) trait Codes {
    /// The scales of a unit.
    type Scales: Copy;
    /// Groups of 64 weights in a unit.
    const GROUPS: usize;
    /// Bytes of a unit.
    const UNIT_BYTES: usize;
    /// The number that makes a code unsigned: [`Codes::codes`] returns code + offset.
    const OFFSET: i32;
    /// Whether weights have minima.
    const HAS_MINIMA: bool = false;
    /// Whether a row has one scale. Then sums are integers, and [`Codes::scale`] is not used.
    const HAS_ROW_SCALE: bool = false;

    /// The scales of a unit.
    unsafe fn scales(unit: *const u8) -> Self::Scales;
    /// The codes of a group plus the offset, as unsigned bytes.
    unsafe fn codes(unit: *const u8, group: usize) -> __m512i;
    /// The scales and the minima of a group, in one lane for four weights.
    unsafe fn scale(scales: &Self::Scales, group: usize) -> (__m512, __m512);
}

/// The index `first + (lane >> shift)` for each of 16 lanes.
const fn lanes(first: i32, shift: u32) -> [i32; 16] {
    let mut out = [0; 16];
    let mut l = 0;
    while l < 16 {
        out[l] = first + (l as i32 >> shift);
        l += 1;
    }
    out
}

/// Entry `index[lane]` of a vector for each lane.
///
/// # Safety
/// AVX-512 F is available.
#[inline(always)]
unsafe fn select_lanes(values: __m512, index: &[i32; 16]) -> __m512 {
    // SAFETY: by this function's contract.
    unsafe { _mm512_permutexvar_ps(_mm512_loadu_si512(index.as_ptr().cast()), values) }
}

/// The same 32 bytes twice.
///
/// # Safety
/// AVX-512 F is available, and 32 bytes are readable.
#[inline(always)]
unsafe fn repeat_32(at: *const u8) -> __m512i {
    // SAFETY: by this function's contract.
    unsafe { _mm512_broadcast_i64x4(_mm256_loadu_si256(at.cast())) }
}

/// The low nibbles, then the high nibbles, of 32 bytes that `bytes` holds twice.
///
/// # Safety
/// AVX-512 F is available.
#[inline(always)]
unsafe fn low_then_high(bytes: __m512i) -> __m512i {
    // SAFETY: by this function's contract.
    unsafe {
        let shifted = _mm512_srlv_epi64(bytes, _mm512_set_epi64(4, 4, 4, 4, 0, 0, 0, 0));
        _mm512_and_si512(shifted, _mm512_set1_epi8(15))
    }
}

/// A number for the first eight lanes, and a number for the others.
///
/// # Safety
/// AVX-512 F is available.
#[inline(always)]
unsafe fn two_halves(first: f32, second: f32) -> __m512 {
    // SAFETY: by this function's contract.
    unsafe { _mm512_mask_blend_ps(0xff00, _mm512_set1_ps(first), _mm512_set1_ps(second)) }
}

/// The codes of a [`Shadow`](flash_sampling_core::Shadow).
pub(crate) struct ShadowCodes;

impl Codes for ShadowCodes {
    type Scales = ();
    const GROUPS: usize = 1;
    const UNIT_BYTES: usize = 64;
    const OFFSET: i32 = 128;
    const HAS_ROW_SCALE: bool = true;

    #[inline(always)]
    unsafe fn scales(_: *const u8) {}
    #[inline(always)]
    unsafe fn codes(unit: *const u8, _: usize) -> __m512i {
        // SAFETY: by the trait's contract.
        unsafe { _mm512_xor_si512(_mm512_loadu_si512(unit.cast()), _mm512_set1_epi8(-128)) }
    }
    #[inline(always)]
    unsafe fn scale((): &(), _: usize) -> (__m512, __m512) {
        // SAFETY: by the trait's contract.
        unsafe { (_mm512_set1_ps(1.0), _mm512_setzero_ps()) }
    }
}

/// Implements [`Codes`] for a type with one scale for 32 weights.
macro_rules! two_blocks {
    ($format:ty, $bytes:literal, $offset:literal, |$at:ident| $scale:expr, $codes:expr) => {
        impl Codes for $format {
            type Scales = __m512;
            const GROUPS: usize = 1;
            const UNIT_BYTES: usize = 2 * $bytes;
            const OFFSET: i32 = $offset;

            #[inline(always)]
            unsafe fn scales(unit: *const u8) -> __m512 {
                // SAFETY: by the trait's contract (here and below).
                unsafe {
                    let scale = |$at: *const u8| $scale;
                    two_halves(scale(unit), scale(unit.add($bytes)))
                }
            }
            #[inline(always)]
            unsafe fn codes($at: *const u8, _: usize) -> __m512i {
                // SAFETY: as above.
                unsafe { $codes }
            }
            #[inline(always)]
            unsafe fn scale(scales: &__m512, _: usize) -> (__m512, __m512) {
                (*scales, *scales)
            }
        }
    };
}

/// The nibbles of two blocks of 16 bytes, in order.
///
/// # Safety
/// AVX-512 F is available, and 16 bytes are readable at both addresses.
#[inline(always)]
unsafe fn nibbles(first: *const u8, second: *const u8) -> __m512i {
    // SAFETY: by this function's contract.
    unsafe {
        let both = |at: *const u8| _mm256_broadcastsi128_si256(_mm_loadu_si128(at.cast()));
        let bytes = _mm512_inserti64x4::<1>(_mm512_castsi256_si512(both(first)), both(second));
        let shifted = _mm512_srlv_epi64(bytes, _mm512_set_epi64(4, 4, 0, 0, 4, 4, 0, 0));
        _mm512_and_si512(shifted, _mm512_set1_epi8(15))
    }
}

/// Entry `i` of a table for each code `i`.
///
/// # Safety
/// AVX-512 BW is available.
#[inline(always)]
unsafe fn look_up(table: &[u8; 16], codes: __m512i) -> __m512i {
    // SAFETY: by this function's contract; the table has 16 bytes.
    unsafe { _mm512_shuffle_epi8(_mm512_broadcast_i32x4(_mm_loadu_si128(table.as_ptr().cast())), codes) }
}

/// A table of codes plus an offset.
const fn shifted(table: [i8; 16], offset: i16) -> [u8; 16] {
    let mut out = [0; 16];
    let mut i = 0;
    while i < 16 {
        out[i] = (table[i] as i16 + offset) as u8;
        i += 1;
    }
    out
}

two_blocks!(Q8, 34, 128, |at| half_at(at), {
    let second = _mm256_loadu_si256(at.add(36).cast());
    let bytes = _mm512_inserti64x4::<1>(_mm512_castsi256_si512(_mm256_loadu_si256(at.add(2).cast())), second);
    _mm512_xor_si512(bytes, _mm512_set1_epi8(-128))
});
two_blocks!(Q4, 18, 8, |at| half_at(at), nibbles(at.add(2), at.add(20)));
two_blocks!(Iq4Nl, 18, 128, |at| half_at(at), {
    const TABLE: [u8; 16] = shifted(IQ4_NL, 128);
    look_up(&TABLE, nibbles(at.add(2), at.add(20)))
});
two_blocks!(Mxfp4, 17, 12, |at| mxfp4_scale(*at), {
    const TABLE: [u8; 16] = shifted(E2M1, 12);
    look_up(&TABLE, nibbles(at.add(1), at.add(18)))
});

/// Implements [`Codes`] for a type with a scale and a minimum for 32 weights.
macro_rules! with_minima {
    ($format:ty, $bytes:literal, |$at:ident, $group:ident| $codes:expr) => {
        impl Codes for $format {
            /// Eight scales, then eight minima.
            type Scales = __m512;
            const GROUPS: usize = 4;
            const UNIT_BYTES: usize = $bytes;
            const OFFSET: i32 = 0;
            const HAS_MINIMA: bool = true;

            #[inline(always)]
            unsafe fn scales(unit: *const u8) -> __m512 {
                // SAFETY: by the trait's contract (here and below).
                unsafe {
                    let [scales, minima] = packed_scales_and_minima(unit);
                    let numbers = _mm_set_epi64x(minima as i64, scales as i64);
                    let factors = two_halves(half_at(unit), half_at(unit.add(2)));
                    _mm512_mul_ps(_mm512_cvtepi32_ps(_mm512_cvtepu8_epi32(numbers)), factors)
                }
            }
            #[inline(always)]
            unsafe fn codes($at: *const u8, $group: usize) -> __m512i {
                // SAFETY: as above.
                unsafe { $codes }
            }
            #[inline(always)]
            unsafe fn scale(scales: &__m512, group: usize) -> (__m512, __m512) {
                const SCALES: [[i32; 16]; 4] = [lanes(0, 3), lanes(2, 3), lanes(4, 3), lanes(6, 3)];
                const MINIMA: [[i32; 16]; 4] = [lanes(8, 3), lanes(10, 3), lanes(12, 3), lanes(14, 3)];
                // SAFETY: as above.
                unsafe { (select_lanes(*scales, &SCALES[group]), select_lanes(*scales, &MINIMA[group])) }
            }
        }
    };
}

with_minima!(Q4K, 144, |at, group| low_then_high(repeat_32(at.add(16 + 32 * group))));
with_minima!(Q5K, 176, |at, group| {
    let low = low_then_high(repeat_32(at.add(48 + 32 * group)));
    let (first, second) = (1u8 << (2 * group), 2u8 << (2 * group));
    let bits = _mm512_inserti64x4::<1>(_mm512_set1_epi8(first as i8), _mm256_set1_epi8(second as i8));
    let is_set = _mm512_test_epi8_mask(repeat_32(at.add(16)), bits);
    _mm512_mask_add_epi8(low, is_set, low, _mm512_set1_epi8(16))
});

impl Codes for Q6K {
    type Scales = __m512;
    const GROUPS: usize = 4;
    const UNIT_BYTES: usize = 210;
    const OFFSET: i32 = 32;

    #[inline(always)]
    unsafe fn scales(unit: *const u8) -> __m512 {
        // SAFETY: by the trait's contract (here and below).
        unsafe {
            let numbers = _mm512_cvtepi8_epi32(_mm_loadu_si128(unit.add(192).cast()));
            _mm512_mul_ps(_mm512_cvtepi32_ps(numbers), _mm512_set1_ps(half_at(unit.add(208))))
        }
    }

    #[inline(always)]
    unsafe fn codes(unit: *const u8, group: usize) -> __m512i {
        // SAFETY: as above. Rotations of whole words move the two bits to bits 4 and 5 of their byte.
        unsafe {
            let (half, is_high) = (group / 2, group % 2 == 1);
            let low = _mm512_loadu_si512(unit.add(half * 64).cast());
            let low = _mm512_srl_epi16(low, _mm_cvtsi32_si128(if is_high { 4 } else { 0 }));
            let left = if is_high {
                _mm512_set_epi64(62, 62, 62, 62, 0, 0, 0, 0)
            } else {
                _mm512_set_epi64(2, 2, 2, 2, 4, 4, 4, 4)
            };
            let high = _mm512_rolv_epi64(repeat_32(unit.add(128 + half * 32)), left);
            let high = _mm512_and_si512(high, _mm512_set1_epi8(0x30));
            _mm512_or_si512(_mm512_and_si512(low, _mm512_set1_epi8(15)), high)
        }
    }

    #[inline(always)]
    unsafe fn scale(scales: &__m512, group: usize) -> (__m512, __m512) {
        const SCALES: [[i32; 16]; 4] = [lanes(0, 2), lanes(4, 2), lanes(8, 2), lanes(12, 2)];
        // SAFETY: as above.
        unsafe {
            let scale = select_lanes(*scales, &SCALES[group]);
            (scale, scale)
        }
    }
}
