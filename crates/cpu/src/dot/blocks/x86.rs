//! Decoders in AVX2 and AVX-512. Both unpack the 32 codes of a span to a 256-bit vector.

use super::Decoder;
use super::formats::{Format, Iq4Nl, Mxfp4, Q4, Q4K, Q5K, Q6K, Q8};
use crate::dot::lanes::Lanes;
use core::arch::x86_64::*;
use core::marker::PhantomData;
use core::mem::MaybeUninit;
use flash_sampling_core::DType;
use flash_sampling_core::backend::{E2M1, IQ4_NL, mxfp4_scale};

/// The operations of a block type.
///
/// # Safety
/// AVX2, FMA and F16C are available, and `block` points to a readable block.
pub(crate) trait Spans: Format {
    /// The scales and minima of a block.
    type Scales: Copy;
    /// Whether weights have minima.
    const HAS_MINIMA: bool = false;

    unsafe fn scales(block: *const u8, out: &mut MaybeUninit<Self::Scales>);
    /// The scale and the minimum of a half of a span, 16 weights.
    fn scale(scales: &Self::Scales, span: usize, half: usize) -> (f32, f32);
    /// The codes of a span.
    unsafe fn codes(block: *const u8, span: usize) -> __m256i;
}

/// Reads an f16 as a float32.
///
/// # Safety
/// F16C is available, and two bytes are readable.
#[inline(always)]
pub(crate) unsafe fn half_at(at: *const u8) -> f32 {
    // SAFETY: by this function's contract.
    unsafe { _mm_cvtss_f32(_mm_cvtph_ps(_mm_cvtsi32_si128(i32::from(at.cast::<u16>().read_unaligned())))) }
}

/// Unpacks 16 bytes to 32 codes of 4 bits: the low nibbles first, then the high nibbles.
///
/// # Safety
/// AVX2 is available, and 16 bytes are readable.
#[inline(always)]
unsafe fn nibbles(at: *const u8) -> __m256i {
    // SAFETY: by this function's contract.
    unsafe {
        let bytes = _mm_loadu_si128(at.cast());
        let both = _mm256_inserti128_si256::<1>(_mm256_castsi128_si256(bytes), _mm_srli_epi16::<4>(bytes));
        _mm256_and_si256(both, _mm256_set1_epi8(15))
    }
}

/// Looks up the table's entry for each code.
///
/// # Safety
/// AVX2 is available.
#[inline(always)]
unsafe fn look_up(table: [i8; 16], codes: __m256i) -> __m256i {
    // SAFETY: by this function's contract; the table has 16 bytes.
    unsafe { _mm256_shuffle_epi8(_mm256_broadcastsi128_si256(_mm_loadu_si128(table.as_ptr().cast())), codes) }
}

/// Implements [`Spans`] for a type with one scale for 32 weights.
macro_rules! one_scale {
    ($format:ty, |$at:ident| $scale:expr, $codes:expr) => {
        impl Spans for $format {
            type Scales = f32;

            #[inline(always)]
            unsafe fn scales($at: *const u8, out: &mut MaybeUninit<f32>) {
                // SAFETY: by the trait's contract (here and below).
                out.write(unsafe { $scale });
            }
            #[inline(always)]
            fn scale(scale: &f32, _: usize, _: usize) -> (f32, f32) {
                (*scale, 0.0)
            }
            #[inline(always)]
            unsafe fn codes($at: *const u8, _: usize) -> __m256i {
                // SAFETY: as above.
                unsafe { $codes }
            }
        }
    };
}

one_scale!(Q8, |at| half_at(at), _mm256_loadu_si256(at.add(2).cast()));
one_scale!(Q4, |at| half_at(at), _mm256_sub_epi8(nibbles(at.add(2)), _mm256_set1_epi8(8)));
one_scale!(Iq4Nl, |at| half_at(at), look_up(IQ4_NL, nibbles(at.add(2))));
one_scale!(Mxfp4, |at| mxfp4_scale(*at), look_up(E2M1, nibbles(at.add(1))));

/// Unpacks the eight scales and the eight minima of a block of `Q4_K` or `Q5_K` to bytes.
///
/// # Safety
/// `block` points to a readable block.
#[inline(always)]
pub(crate) unsafe fn packed_scales_and_minima(block: *const u8) -> [u64; 2] {
    // SAFETY: by this function's contract; the 12 bytes are three words.
    let word = |i: usize| u64::from(unsafe { block.add(4 + 4 * i).cast::<u32>().read_unaligned() });
    let (a, b, c) = (word(0), word(1), word(2));
    // The low six bits of a byte of `a` (`b`) are a scale (minimum) of spans 0 to 3. Its high two bits, and four bits
    // of `c`, are a scale (minimum) of spans 4 to 7.
    let (low, high) = (0x3f3f_3f3f, 0x0f0f_0f0f);
    let scales = a & low | (c & high | a >> 2 & 0x3030_3030) << 32;
    let minima = b & low | (c >> 4 & high | b >> 2 & 0x3030_3030) << 32;
    [scales, minima]
}

/// The scales and minima of the eight spans of a block of `Q4_K` or `Q5_K`.
///
/// # Safety
/// As for [`Spans`].
#[inline(always)]
unsafe fn scales_and_minima(block: *const u8, out: &mut MaybeUninit<[[f32; 8]; 2]>) {
    // SAFETY: by this function's contract.
    unsafe {
        let [scales, minima] = packed_scales_and_minima(block);
        let times = |numbers: u64, factor: f32| {
            let wide = _mm256_cvtepi32_ps(_mm256_cvtepu8_epi32(_mm_cvtsi64_si128(numbers as i64)));
            _mm256_mul_ps(wide, _mm256_set1_ps(factor))
        };
        let out: *mut f32 = out.as_mut_ptr().cast();
        _mm256_storeu_ps(out, times(scales, half_at(block)));
        _mm256_storeu_ps(out.add(8), times(minima, half_at(block.add(2))));
    }
}

/// The low four bits of the codes of a span of `Q4_K` or `Q5_K`: two spans share 32 bytes.
///
/// # Safety
/// As for [`Spans`]; `at` points to the first of these bytes.
#[inline(always)]
unsafe fn low_bits(at: *const u8, span: usize) -> __m256i {
    // SAFETY: by this function's contract.
    unsafe {
        let bytes = _mm256_loadu_si256(at.add(span / 2 * 32).cast());
        let shift = _mm_cvtsi32_si128((span % 2 * 4) as i32);
        _mm256_and_si256(_mm256_srl_epi16(bytes, shift), _mm256_set1_epi8(15))
    }
}

/// Implements [`Spans`] for a type with a scale and a minimum for 32 weights.
macro_rules! with_minima {
    ($format:ty, |$at:ident, $span:ident| $codes:expr) => {
        impl Spans for $format {
            type Scales = [[f32; 8]; 2];
            const HAS_MINIMA: bool = true;

            #[inline(always)]
            unsafe fn scales(block: *const u8, out: &mut MaybeUninit<[[f32; 8]; 2]>) {
                // SAFETY: by the trait's contract (here and below).
                unsafe { scales_and_minima(block, out) }
            }
            #[inline(always)]
            fn scale([scales, minima]: &[[f32; 8]; 2], span: usize, _: usize) -> (f32, f32) {
                (scales[span], minima[span])
            }
            #[inline(always)]
            unsafe fn codes($at: *const u8, $span: usize) -> __m256i {
                // SAFETY: as above.
                unsafe { $codes }
            }
        }
    };
}

with_minima!(Q4K, |at, span| low_bits(at.add(16), span));
with_minima!(Q5K, |at, span| {
    let bit = _mm256_set1_epi8((1u8 << span) as i8);
    let is_set = _mm256_cmpeq_epi8(_mm256_and_si256(_mm256_loadu_si256(at.add(16).cast()), bit), bit);
    _mm256_or_si256(low_bits(at.add(48), span), _mm256_and_si256(is_set, _mm256_set1_epi8(16)))
});

impl Spans for Q6K {
    type Scales = [f32; 16];

    #[inline(always)]
    unsafe fn scales(block: *const u8, out: &mut MaybeUninit<[f32; 16]>) {
        // SAFETY: by the trait's contract (here and below).
        unsafe {
            let d = _mm256_set1_ps(half_at(block.add(208)));
            let out: *mut f32 = out.as_mut_ptr().cast();
            for half in [0, 8] {
                let numbers = _mm_loadl_epi64(block.add(192 + half).cast());
                let scales = _mm256_mul_ps(_mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(numbers)), d);
                _mm256_storeu_ps(out.add(half), scales);
            }
        }
    }

    #[inline(always)]
    fn scale(scales: &[f32; 16], span: usize, half: usize) -> (f32, f32) {
        (scales[span * 2 + half], 0.0)
    }

    #[inline(always)]
    unsafe fn codes(block: *const u8, span: usize) -> __m256i {
        // SAFETY: as above.
        unsafe {
            let (half, part) = (span / 4, span % 4);
            let low = _mm256_loadu_si256(block.add(half * 64 + part % 2 * 32).cast());
            let low = _mm256_srl_epi16(low, _mm_cvtsi32_si128((part / 2 * 4) as i32));
            let high = _mm256_loadu_si256(block.add(128 + half * 32).cast());
            let high = _mm256_srl_epi16(high, _mm_cvtsi32_si128((part * 2) as i32));
            let high = _mm256_slli_epi16::<4>(_mm256_and_si256(high, _mm256_set1_epi8(3)));
            let codes = _mm256_or_si256(_mm256_and_si256(low, _mm256_set1_epi8(15)), high);
            _mm256_sub_epi8(codes, _mm256_set1_epi8(32))
        }
    }
}

/// The decoder in AVX2.
pub(crate) struct Spans256<T>(PhantomData<T>);

impl<T: Spans, F: Lanes<Weights = [__m256; 2]>> Decoder<F> for Spans256<T> {
    type Scales = T::Scales;
    const DTYPE: DType = T::DTYPE;

    #[inline(always)]
    unsafe fn scales(block: *const u8, out: &mut MaybeUninit<T::Scales>) {
        // SAFETY: by the trait's contract (here and below).
        unsafe { T::scales(block, out) }
    }

    #[inline(always)]
    unsafe fn weights(block: *const u8, step: usize, scales: &T::Scales) -> [__m256; 2] {
        // SAFETY: as above.
        unsafe {
            let codes = T::codes(block, step / 2);
            let half = if step.is_multiple_of(2) {
                _mm256_castsi256_si128(codes)
            } else {
                _mm256_extracti128_si256::<1>(codes)
            };
            let (scale, minimum) = T::scale(scales, step / 2, step % 2);
            let (scale, minimum) = (_mm256_set1_ps(scale), _mm256_set1_ps(minimum));
            [half, _mm_srli_si128::<8>(half)].map(|codes| {
                let wide = _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(codes));
                if T::HAS_MINIMA { _mm256_fmsub_ps(wide, scale, minimum) } else { _mm256_mul_ps(wide, scale) }
            })
        }
    }
}

/// The decoder in AVX-512.
pub(crate) struct Spans512<T>(PhantomData<T>);

impl<T: Spans, F: Lanes<Weights = [__m512; 2]>> Decoder<F> for Spans512<T> {
    type Scales = T::Scales;
    const DTYPE: DType = T::DTYPE;

    #[inline(always)]
    unsafe fn scales(block: *const u8, out: &mut MaybeUninit<T::Scales>) {
        // SAFETY: by the trait's contract (here and below).
        unsafe { T::scales(block, out) }
    }

    #[inline(always)]
    unsafe fn weights(block: *const u8, span: usize, scales: &T::Scales) -> [__m512; 2] {
        // SAFETY: as above.
        unsafe {
            let codes = T::codes(block, span);
            let halves = [_mm256_castsi256_si128(codes), _mm256_extracti128_si256::<1>(codes)];
            core::array::from_fn(|half| {
                let wide = _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(halves[half]));
                let (scale, minimum) = T::scale(scales, span, half);
                let (scale, minimum) = (_mm512_set1_ps(scale), _mm512_set1_ps(minimum));
                if T::HAS_MINIMA { _mm512_fmsub_ps(wide, scale, minimum) } else { _mm512_mul_ps(wide, scale) }
            })
        }
    }
}
