//! Sixteen lanes in four AVX2 vectors.

use super::{BLOCKS, Lanes, SPAN};
use core::arch::x86_64::*;

/// AVX2.
pub(crate) struct Avx2;

// SAFETY (every block below): the caller vouches for AVX2; loads and stores are of local arrays.
impl Lanes for Avx2 {
    type Words = [__m256i; 4];

    #[inline(always)]
    unsafe fn splat(word: u32) -> Self::Words {
        // SAFETY: as above.
        unsafe { [_mm256_set1_epi32(word as i32); 4] }
    }
    #[inline(always)]
    unsafe fn count_from(first: u32) -> Self::Words {
        let counts: [u64; BLOCKS] = core::array::from_fn(|i| u64::from(first.wrapping_add(i as u32)));
        // SAFETY: as above.
        core::array::from_fn(|v| unsafe { _mm256_loadu_si256(counts[4 * v..].as_ptr().cast()) })
    }
    #[inline(always)]
    unsafe fn multiply(a: Self::Words, b: Self::Words) -> Self::Words {
        // SAFETY: as above.
        core::array::from_fn(|v| unsafe { _mm256_mul_epu32(a[v], b[v]) })
    }
    #[inline(always)]
    unsafe fn high(a: Self::Words) -> Self::Words {
        // SAFETY: as above.
        core::array::from_fn(|v| unsafe { _mm256_srli_epi64::<32>(a[v]) })
    }
    #[inline(always)]
    unsafe fn xor3(a: Self::Words, b: Self::Words, c: Self::Words) -> Self::Words {
        // SAFETY: as above.
        core::array::from_fn(|v| unsafe { _mm256_xor_si256(_mm256_xor_si256(a[v], b[v]), c[v]) })
    }
    #[inline(always)]
    unsafe fn any_at_most(words: &[Self::Words; 4], limit: u32) -> bool {
        // SAFETY: as above. The high halves are shifted out of the comparison.
        unsafe {
            let mut smallest = _mm256_set1_epi32(-1);
            for word in words.iter().flatten() {
                smallest = _mm256_min_epu32(smallest, *word);
            }
            let limit = _mm256_set1_epi32(limit as i32);
            let hits = _mm256_cmpeq_epi32(_mm256_min_epu32(smallest, limit), smallest);
            _mm256_movemask_epi8(_mm256_slli_epi64::<32>(hits)) != 0
        }
    }
    #[inline(always)]
    unsafe fn largest(logits: &[f32; SPAN]) -> f32 {
        // SAFETY: as above; the loads are of the span.
        unsafe {
            let at = logits.as_ptr();
            let mut most = _mm256_loadu_ps(at);
            for v in 1..SPAN / 8 {
                most = _mm256_max_ps(most, _mm256_loadu_ps(at.add(8 * v)));
            }
            let four = _mm_max_ps(_mm256_castps256_ps128(most), _mm256_extractf128_ps::<1>(most));
            let two = _mm_max_ps(four, _mm_movehl_ps(four, four));
            _mm_cvtss_f32(_mm_max_ss(two, _mm_shuffle_ps::<1>(two, two)))
        }
    }
    #[inline(always)]
    unsafe fn at_least(logits: &[f32; SPAN], cut: f32) -> u64 {
        // SAFETY: as above; the loads are of the span.
        unsafe {
            let (at, cut) = (logits.as_ptr(), _mm256_set1_ps(cut));
            let mut hits = 0;
            for v in 0..SPAN / 8 {
                let reached = _mm256_cmp_ps::<_CMP_GE_OQ>(_mm256_loadu_ps(at.add(8 * v)), cut);
                hits |= u64::from(_mm256_movemask_ps(reached) as u8) << (8 * v);
            }
            hits
        }
    }
    #[inline(always)]
    unsafe fn to_array(a: Self::Words) -> [u32; BLOCKS] {
        let mut lanes = [0u64; BLOCKS];
        for (v, &x) in a.iter().enumerate() {
            // SAFETY: as above.
            unsafe { _mm256_storeu_si256(lanes[4 * v..].as_mut_ptr().cast(), x) };
        }
        lanes.map(|w| w as u32)
    }
}
