//! Sixteen lanes in two AVX-512 vectors.

use super::{BLOCKS, EXP2, LOWEST, Lanes, SPAN, exp_below};
use crate::above::{Above, GATHERED, Run, VECTOR};
use core::arch::x86_64::*;
use core::mem::MaybeUninit;
use flash_sampling_core::{MassHistogram, Moments};

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
    unsafe fn reaching(
        words: &[Self::Words; 4],
        logits: &[f32; SPAN],
        cut: f32,
        _: u32,
        ordered: &mut [u32; SPAN],
    ) -> u64 {
        let mut hits = 0;
        // SAFETY: as above; loads are of the span, stores of the words.
        unsafe {
            let low = _mm512_set1_epi64(0xffff_ffff);
            let (first, last) =
                (_mm512_set_epi64(11, 3, 10, 2, 9, 1, 8, 0), _mm512_set_epi64(15, 7, 14, 6, 13, 5, 12, 4));
            let pair = |a, b| _mm512_or_epi64(_mm512_and_epi64(a, low), _mm512_slli_epi64::<32>(b));
            for half in [0, 1] {
                let [a, b, c, d] = [words[0][half], words[1][half], words[2][half], words[3][half]];
                let (ab, cd) = (pair(a, b), pair(c, d));
                for (v, order) in [(2 * half, first), (2 * half + 1, last)] {
                    let word = _mm512_permutex2var_epi64(ab, order, cd);
                    _mm512_storeu_si512(ordered.as_mut_ptr().add(16 * v).cast(), word);
                    let limit = word_limits(_mm512_loadu_ps(logits.as_ptr().add(16 * v)), cut);
                    hits |= u64::from(_mm512_cmple_epu32_mask(word, limit)) << (16 * v);
                }
            }
        }
        hits
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
    unsafe fn weigh(spans: &[[f32; SPAN]], top: f32, mass: &mut MassHistogram) {
        let Some(floor) = mass.make_room(top) else { return mass.extend_from_slice(spans.as_flattened()) };
        let mut entries = [0; SPAN];
        for span in spans {
            // SAFETY: as above.
            if unsafe { write_entries(span, floor, &mut entries) } {
                mass.add_entries(&entries);
            }
        }
    }
    #[inline(always)]
    unsafe fn weigh_above(
        spans: &[[f32; SPAN]],
        tops: &[f32],
        floor: f32,
        mass: &mut MassHistogram,
        (above, run): (&mut Above, &mut Run),
    ) -> f32 {
        let top = tops.iter().copied().fold(f32::NEG_INFINITY, f32::max);
        let Some(room) = mass.make_room(top) else {
            // Logits of this size are pushed one by one.
            run.end();
            let mut sum = 0.0;
            for &logit in spans.as_flattened() {
                if logit >= floor {
                    mass.push(logit);
                } else {
                    sum += exp_below(logit - floor);
                }
            }
            return sum;
        };
        if room > floor {
            run.end();
        }
        let mut sum = 0.0;
        for at in (0..spans.len()).step_by(4) {
            let end = spans.len().min(at + 4);
            let mut own = [MaybeUninit::<f32>::uninit(); GATHERED + VECTOR];
            let (kept, keeps) = match above.room(run) {
                Some(room) => (room.as_mut_ptr().cast(), true),
                None => (own.as_mut_ptr().cast(), false),
            };
            // SAFETY: as above; both have room for four spans and a vector.
            let (below, count) = unsafe { sum_below(&spans[at..end], &tops[at..end], floor, room, kept, mass) };
            sum += below;
            if keeps {
                above.keep(run, count);
            }
        }
        sum
    }
    #[inline(always)]
    unsafe fn sum_moments(spans: &[[f32; SPAN]], moments: &mut Moments) {
        moments.extend_from_slice(spans.as_flattened());
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

/// At least [`word_limit`](crate::perturb::word_limit) of each logit.
///
/// # Safety
/// AVX-512 F is available.
#[inline(always)]
unsafe fn word_limits(logit: __m512, cut: f32) -> __m512i {
    // SAFETY: as this function's contract says.
    unsafe {
        let size = _mm512_add_ps(_mm512_abs_ps(logit), _mm512_set1_ps(cut.abs()));
        let slack = _mm512_fmadd_ps(size, _mm512_set1_ps(2.4e-7), _mm512_set1_ps(1.54e-5));
        let gap = _mm512_add_ps(_mm512_sub_ps(logit, _mm512_set1_ps(cut)), slack);
        let y = _mm512_fmadd_ps(gap, _mm512_set1_ps(core::f32::consts::LOG2_E), _mm512_set1_ps(32.0));
        // NaN, of a logit and a cut of -inf, becomes the second operand.
        let y = _mm512_min_ps(_mm512_max_ps(y, _mm512_set1_ps(-1.0)), _mm512_set1_ps(33.0));
        let bits = _mm512_mul_ps(_mm512_add_ps(y, _mm512_set1_ps(127.0)), _mm512_set1_ps(8_388_608.0));
        let limit = _mm512_castsi512_ps(_mm512_cvttps_epi32(bits));
        // What is too large for a word becomes the largest one.
        _mm512_cvttps_epu32(_mm512_fmadd_ps(limit, _mm512_set1_ps(1.000_2), _mm512_set1_ps(2.0)))
    }
}

/// [`MassHistogram::entry_of`] of the logits that reach `floor`, and zeros, in another order; whether there are any. 2.4 ns
/// a logit were 1.3 by this, on a busy Xeon: 0.3 for the entries, the rest to add them one by one.
///
/// # Safety
/// AVX-512 F is available.
#[inline(always)]
unsafe fn write_entries(span: &[f32; SPAN], floor: f32, entries: &mut [u64; SPAN]) -> bool {
    // SAFETY: as this function's contract says; loads are of the span, stores of the entries.
    unsafe {
        let mut any = 0;
        for v in 0..SPAN / 16 {
            let logit = _mm512_loadu_ps(span.as_ptr().add(16 * v));
            let (slot, mass) = entries_of(logit);
            let kept = _mm512_cmp_ps_mask::<_CMP_GE_OQ>(logit, _mm512_set1_ps(floor));
            any |= kept;
            let mass = _mm512_maskz_mov_epi32(kept, mass);
            // The nine bits that count come to the top.
            let slot = _mm512_maskz_slli_epi32::<23>(kept, slot);
            let at = entries.as_mut_ptr().add(16 * v);
            _mm512_storeu_si512(at.cast(), _mm512_unpacklo_epi32(mass, slot));
            _mm512_storeu_si512(at.add(8).cast(), _mm512_unpackhi_epi32(mass, slot));
        }
        any != 0
    }
}

/// The numbers of the bins of logits, of which the last nine bits count, and their masses there.
///
/// # Safety
/// AVX-512 F is available.
#[inline(always)]
unsafe fn entries_of(logit: __m512) -> (__m512i, __m512i) {
    const DOWN: i32 = _MM_FROUND_TO_NEG_INF | _MM_FROUND_NO_EXC;
    // SAFETY: as this function's contract says.
    unsafe {
        // Beside this number an integer's last bits are those of the float.
        let beside = _mm512_set1_ps(12_582_912.0);
        let [p0, p1, p2] = MassHistogram::POLYNOMIAL;
        let [p0, p1, p2] = [_mm512_set1_ps(p0), _mm512_set1_ps(p1), _mm512_set1_ps(p2)];
        let bin = _mm512_fmadd_round_ps::<DOWN>(logit, _mm512_set1_ps(8.0), beside);
        let r = _mm512_fnmadd_ps(_mm512_sub_ps(bin, beside), _mm512_set1_ps(0.125), logit);
        let p = _mm512_fmadd_ps(_mm512_fmadd_ps(p2, r, p1), r, p0);
        let excess = _mm512_fmadd_ps(_mm512_mul_ps(r, r), p, r);
        let excess = _mm512_cvttps_epi32(_mm512_mul_ps(excess, _mm512_set1_ps(1_073_741_824.0)));
        (_mm512_castps_si512(bin), _mm512_add_epi32(excess, _mm512_set1_epi32(1 << 30)))
    }
}

/// `e^(l - floor)` of the logits that are below `floor`, added to `sum`; the others are left out.
///
/// # Safety
/// AVX-512 F is available.
#[inline(always)]
unsafe fn add_powers(sum: __m512, logit: __m512, floor: __m512) -> __m512 {
    const NEAREST: i32 = _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC;
    // SAFETY: as this function's contract says.
    unsafe {
        let y = _mm512_mul_ps(_mm512_sub_ps(logit, floor), _mm512_set1_ps(core::f32::consts::LOG2_E));
        let y = _mm512_max_ps(y, _mm512_set1_ps(LOWEST));
        let n = _mm512_roundscale_ps::<NEAREST>(y);
        let f = _mm512_sub_ps(y, n);
        let p = _mm512_fmadd_ps(_mm512_set1_ps(EXP2[3]), f, _mm512_set1_ps(EXP2[2]));
        let p = _mm512_fmadd_ps(p, f, _mm512_set1_ps(EXP2[1]));
        let p = _mm512_fmadd_ps(p, f, _mm512_set1_ps(EXP2[0]));
        let power = _mm512_scalef_ps(_mm512_fmadd_ps(p, f, _mm512_set1_ps(1.0)), n);
        _mm512_mask_add_ps(sum, _mm512_cmp_ps_mask::<_CMP_LT_OQ>(logit, floor), sum, power)
    }
}

/// The sum of `e^(l - floor)` of the logits of four spans at most that are below `floor`; of the others, those that reach
/// `room` are added to their bins, and how many these are. Nothing branches for a logit or a vector: the logits to be added
/// come side by side first, in `kept`.
///
/// # Safety
/// * AVX-512 F is available.
/// * `kept` may be written from there on, as many logits as there are in the spans and 16 more.
#[inline(always)]
unsafe fn sum_below(
    spans: &[[f32; SPAN]],
    tops: &[f32],
    floor: f32,
    room: f32,
    kept: *mut f32,
    mass: &mut MassHistogram,
) -> (f32, usize) {
    let mut count = 0;
    // SAFETY: as this function's contract says; loads are of the spans, stores of 16 words after at most as many as were
    // loaded before, and loads of what was stored so.
    unsafe {
        let (edge, lowest) = (_mm512_set1_ps(floor), _mm512_set1_ps(floor.max(room)));
        let mut sums = [_mm512_setzero_ps(); 2];
        for (s, span) in spans.iter().enumerate() {
            for v in 0..SPAN / 16 {
                let logit = _mm512_loadu_ps(span.as_ptr().add(16 * v));
                sums[v % 2] = add_powers(sums[v % 2], logit, edge);
                if tops[s] >= floor {
                    let hits = _mm512_cmp_ps_mask::<_CMP_GE_OQ>(logit, lowest);
                    _mm512_storeu_ps(kept.add(count), _mm512_maskz_compress_ps(hits, logit));
                    count += hits.count_ones() as usize;
                }
            }
        }
        let (mut slots, mut masses) = ([0u32; 16], [0u32; 16]);
        for at in (0..count).step_by(16) {
            let some = (count - at).min(16);
            let logits = _mm512_maskz_loadu_ps((u32::MAX >> (32 - some)) as u16, kept.add(at));
            let (slot, weight) = entries_of(logits);
            _mm512_storeu_si512(slots.as_mut_ptr().cast(), slot);
            _mm512_storeu_si512(masses.as_mut_ptr().cast(), weight);
            mass.add_masses(&slots[..some], &masses[..some]);
        }
        (_mm512_reduce_add_ps(_mm512_add_ps(sums[0], sums[1])), count)
    }
}
