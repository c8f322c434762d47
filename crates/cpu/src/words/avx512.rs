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
        let counts: [u64; BLOCKS] = core::array::from_fn(|i| u64::from(first.wrapping_add(i as u32)));
        // SAFETY: as above.
        core::array::from_fn(|v| unsafe { _mm512_loadu_si512(counts[8 * v..].as_ptr().cast()) })
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
            let mut smallest = _mm512_set1_epi32(-1);
            for word in words.iter().flatten() {
                smallest = _mm512_min_epu32(smallest, *word);
            }
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
    unsafe fn to_array(a: Self::Words) -> [u32; BLOCKS] {
        let mut lanes = [0u64; BLOCKS];
        for (v, &x) in a.iter().enumerate() {
            // SAFETY: as above.
            unsafe { _mm512_storeu_si512(lanes[8 * v..].as_mut_ptr().cast(), x) };
        }
        lanes.map(|w| w as u32)
    }
}
