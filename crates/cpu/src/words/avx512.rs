//! Sixteen lanes in two AVX-512 vectors.

use super::{BLOCKS, Lanes, SPAN};
use core::arch::x86_64::*;

/// AVX-512.
pub(crate) struct Avx512;

// SAFETY (every block below): the caller vouches for AVX-512 F; loads and stores are of local arrays.
impl Lanes for Avx512 {
    type Words = [__m512i; 2];

    #[inline(always)]
    unsafe fn splat(word: u32) -> Self::Words {
        // SAFETY: as above.
        unsafe { [_mm512_set1_epi32(word as i32); 2] }
    }
    #[inline(always)]
    unsafe fn count_from(first: u32) -> Self::Words {
        // SAFETY: as above. Sums of the low halves wrap; the high halves may hold anything.
        unsafe {
            let first = _mm512_set1_epi32(first as i32);
            let (low, high) =
                (_mm512_set_epi64(7, 6, 5, 4, 3, 2, 1, 0), _mm512_set_epi64(15, 14, 13, 12, 11, 10, 9, 8));
            [_mm512_add_epi32(first, low), _mm512_add_epi32(first, high)]
        }
    }
    #[inline(always)]
    unsafe fn multiply(a: Self::Words, b: Self::Words) -> Self::Words {
        // SAFETY: as above.
        core::array::from_fn(|v| unsafe { _mm512_mul_epu32(a[v], b[v]) })
    }
    #[inline(always)]
    unsafe fn high(a: Self::Words) -> Self::Words {
        // SAFETY: as above.
        core::array::from_fn(|v| unsafe { _mm512_srli_epi64::<32>(a[v]) })
    }
    #[inline(always)]
    unsafe fn xor3(a: Self::Words, b: Self::Words, c: Self::Words) -> Self::Words {
        // SAFETY: as above. 0x96 is the truth table of a ^ b ^ c.
        core::array::from_fn(|v| unsafe { _mm512_ternarylogic_epi64::<0x96>(a[v], b[v], c[v]) })
    }
    #[inline(always)]
    unsafe fn any_at_most(words: &[Self::Words; 4], limit: u32) -> bool {
        // SAFETY: as above. The mask leaves the high halves out.
        unsafe {
            // Written out: a loop over the eight vectors went through memory, at half the cost of the words themselves.
            let [a, b, c, d] = words;
            let (a, b) = (_mm512_min_epu32(a[0], a[1]), _mm512_min_epu32(b[0], b[1]));
            let (c, d) = (_mm512_min_epu32(c[0], c[1]), _mm512_min_epu32(d[0], d[1]));
            let smallest = _mm512_min_epu32(_mm512_min_epu32(a, b), _mm512_min_epu32(c, d));
            _mm512_mask_cmple_epu32_mask(0x5555, smallest, _mm512_set1_epi32(limit as i32)) != 0
        }
    }
    #[inline(always)]
    unsafe fn largest(logits: &[f32; SPAN]) -> f32 {
        // SAFETY: as above; the loads are of the span.
        unsafe {
            let at = logits.as_ptr();
            let mut most = _mm512_loadu_ps(at);
            for v in 1..SPAN / 16 {
                most = _mm512_max_ps(most, _mm512_loadu_ps(at.add(16 * v)));
            }
            _mm512_reduce_max_ps(most)
        }
    }
    #[inline(always)]
    unsafe fn at_least(logits: &[f32; SPAN], cut: f32) -> u64 {
        // SAFETY: as above; the loads are of the span.
        unsafe {
            let (at, cut) = (logits.as_ptr(), _mm512_set1_ps(cut));
            let hits = |v: usize| {
                u64::from(_mm512_cmp_ps_mask::<_CMP_GE_OQ>(_mm512_loadu_ps(at.add(16 * v)), cut)) << (16 * v)
            };
            hits(0) | hits(1) | hits(2) | hits(3)
        }
    }
    #[inline(always)]
    unsafe fn to_array(a: Self::Words) -> [u32; BLOCKS] {
        let mut lanes = [0u32; BLOCKS];
        // SAFETY: as above; the conversion keeps the low halves.
        unsafe {
            _mm256_storeu_si256(lanes.as_mut_ptr().cast(), _mm512_cvtepi64_epi32(a[0]));
            _mm256_storeu_si256(lanes[8..].as_mut_ptr().cast(), _mm512_cvtepi64_epi32(a[1]));
        }
        lanes
    }
}
