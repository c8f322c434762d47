//! Dot products in AVX2 and FMA: 16 elements per step, two fused multiply-adds into one accumulator of 8 lanes.

use super::blocks::{self, Spans256, for_format};
use super::entry_points::entry_points;
use super::lanes::{self, Lanes};
use super::pack::PackedRows;
use core::arch::x86_64::*;
use core::marker::PhantomData;
use flash_sampling_core::{DType, Matrix};
use half::{bf16, f16};

/// AVX2 for a weight of type `T`.
struct Avx2<T>(PhantomData<T>);

macro_rules! lanes {
    ($type:ty, $bytes:literal, |$at:ident| $widen:expr) => {
        impl Lanes for Avx2<$type> {
            type Sums = __m256;
            type Weights = [__m256; 2];
            type PackedInput = [__m256; 2];
            const STEP: usize = 16;
            const WEIGHT_BYTES: usize = $bytes;
            const HIDDEN_BYTES: usize = 64;

            #[inline(always)]
            unsafe fn zero() -> __m256 {
                // SAFETY: the caller guarantees the instruction set (here and below) and the pointers.
                unsafe { _mm256_setzero_ps() }
            }
            #[inline(always)]
            unsafe fn weights($at: *const u8) -> [__m256; 2] {
                // SAFETY: as above.
                unsafe { $widen }
            }
            #[inline(always)]
            unsafe fn hidden(at: *const u8) -> [__m256; 2] {
                // SAFETY: as above.
                unsafe { [_mm256_loadu_ps(at.cast()), _mm256_loadu_ps(at.add(32).cast())] }
            }
            #[inline(always)]
            unsafe fn multiply_add(sums: __m256, w: [__m256; 2], h: [__m256; 2]) -> __m256 {
                // SAFETY: as above.
                unsafe { _mm256_fmadd_ps(w[1], h[1], _mm256_fmadd_ps(w[0], h[0], sums)) }
            }
            #[inline(always)]
            unsafe fn prefetch(at: *const u8) {
                // SAFETY: a prefetch of any address is harmless.
                unsafe { _mm_prefetch::<_MM_HINT_T1>(at.cast()) }
            }
            #[inline(always)]
            unsafe fn total(sums: __m256) -> f32 {
                // SAFETY: as above.
                unsafe {
                    let four = _mm_add_ps(_mm256_castps256_ps128(sums), _mm256_extractf128_ps::<1>(sums));
                    let two = _mm_add_ps(four, _mm_movehl_ps(four, four));
                    _mm_cvtss_f32(_mm_add_ss(two, _mm_shuffle_ps::<1>(two, two)))
                }
            }
        }
    };
}

lanes!(bf16, 32, |at| {
    let pairs = _mm256_loadu_si256(at.cast());
    let odd = _mm256_and_si256(pairs, _mm256_set1_epi32(0xffff_0000_u32 as i32));
    [_mm256_castsi256_ps(_mm256_slli_epi32::<16>(pairs)), _mm256_castsi256_ps(odd)]
});
lanes!(f16, 32, |at| {
    [_mm256_cvtph_ps(_mm_loadu_si128(at.cast())), _mm256_cvtph_ps(_mm_loadu_si128(at.add(16).cast()))]
});
lanes!(f32, 64, |at| [_mm256_loadu_ps(at.cast()), _mm256_loadu_ps(at.add(32).cast())]);

entry_points!($ #[target_feature(enable = "avx2,fma,f16c")] Avx2, Spans256 of f32, 2 x 4, 4);
