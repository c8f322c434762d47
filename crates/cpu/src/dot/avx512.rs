//! Dot products in AVX-512: 32 elements per step, two fused multiply-adds into one accumulator of 16 lanes.

use super::blocks::{self, Spans512, for_format};
use super::entry_points::entry_points;
use super::lanes::{self, Lanes};
use super::pack::PackedRows;
use core::arch::x86_64::*;
use core::marker::PhantomData;
use flash_sampling_core::{DType, Matrix};
use half::{bf16, f16};

/// AVX-512 for a weight of type `T`.
struct Avx512<T>(PhantomData<T>);

macro_rules! lanes {
    ($type:ty, $bytes:literal, |$at:ident| $widen:expr) => {
        impl Lanes for Avx512<$type> {
            type Sums = __m512;
            type Weights = [__m512; 2];
            type PackedInput = [__m512; 2];
            const STEP: usize = 32;
            const WEIGHT_BYTES: usize = $bytes;
            const HIDDEN_BYTES: usize = 128;

            #[inline(always)]
            unsafe fn zero() -> __m512 {
                // SAFETY: the caller guarantees the instruction set (here and below) and the pointers.
                unsafe { _mm512_setzero_ps() }
            }
            #[inline(always)]
            unsafe fn weights($at: *const u8) -> [__m512; 2] {
                // SAFETY: as above.
                unsafe { $widen }
            }
            #[inline(always)]
            unsafe fn hidden(at: *const u8) -> [__m512; 2] {
                // SAFETY: as above.
                unsafe { [_mm512_loadu_ps(at.cast()), _mm512_loadu_ps(at.add(64).cast())] }
            }
            #[inline(always)]
            unsafe fn multiply_add(sums: __m512, w: [__m512; 2], h: [__m512; 2]) -> __m512 {
                // SAFETY: as above.
                unsafe { _mm512_fmadd_ps(w[1], h[1], _mm512_fmadd_ps(w[0], h[0], sums)) }
            }
            #[inline(always)]
            unsafe fn prefetch(at: *const u8) {
                // SAFETY: a prefetch of any address is harmless.
                unsafe { _mm_prefetch::<_MM_HINT_T1>(at.cast()) }
            }
            #[inline(always)]
            unsafe fn total(sums: __m512) -> f32 {
                // SAFETY: as above.
                unsafe { _mm512_reduce_add_ps(sums) }
            }
        }
    };
}

lanes!(bf16, 64, |at| {
    let pairs = _mm512_loadu_si512(at.cast());
    let odd = _mm512_and_si512(pairs, _mm512_set1_epi32(0xffff_0000_u32 as i32));
    [_mm512_castsi512_ps(_mm512_slli_epi32::<16>(pairs)), _mm512_castsi512_ps(odd)]
});
lanes!(f16, 64, |at| {
    [_mm512_cvtph_ps(_mm256_loadu_si256(at.cast())), _mm512_cvtph_ps(_mm256_loadu_si256(at.add(32).cast()))]
});
lanes!(f32, 128, |at| [_mm512_loadu_ps(at.cast()), _mm512_loadu_ps(at.add(64).cast())]);

entry_points!(
    $ #[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx2,fma,f16c")]
    Avx512, Spans512 of f32, 4 x 4, 8
);
