//! The words of 64 consecutive tokens at once: `philox4x32-10` over sixteen blocks.
//!
//! Each 32-bit word sits in the low half of a 64-bit lane. A widening multiplication reads the low halves only, so the
//! high halves may hold anything, and no lane has to be moved: a round is two multiplications, two shifts and two
//! three-way exclusive ors for as many blocks as there are lanes.
//!
//! One row of 151936 logits on one thread of an Intel Xeon with AVX-512, best of 2000 draws: 95 us while the smallest word of
//! a span was sought by a loop over its vectors, which went through memory; 79 us since that is written out. The same row
//! without noise takes 28 us.

#[cfg(target_arch = "x86_64")]
pub(crate) mod avx2;
#[cfg(target_arch = "x86_64")]
pub(crate) mod avx512;
pub(crate) mod portable;

use crate::above::{Above, Run};
use flash_sampling_core::{Domain, MassHistogram, Moments, Noise};

/// Tokens of a span: sixteen blocks of four words.
pub(crate) const SPAN: usize = 64;
/// Blocks of a span.
pub(crate) const BLOCKS: usize = SPAN / 4;

/// Random123's multipliers and Weyl constants.
const PHILOX_M4X32_0: u32 = 0xd251_1f53;
const PHILOX_M4X32_1: u32 = 0xcd9e_8d57;
const PHILOX_W32_0: u32 = 0x9e37_79b9;
const PHILOX_W32_1: u32 = 0xbb67_ae85;

/// The operations of an instruction set on sixteen 64-bit lanes that carry 32-bit words in their low halves.
///
/// # Safety
/// Every function may only be called where the instruction set is available. They are `inline(always)`, to inline into
/// an entry point that is marked with the target feature.
pub(crate) trait Lanes {
    /// Sixteen lanes.
    type Words: Copy;

    /// `word` in every lane.
    unsafe fn splat(word: u32) -> Self::Words;
    /// `first`, `first + 1`, ... in the low halves, wrapping.
    unsafe fn count_from(first: u32) -> Self::Words;
    /// The 64-bit products of the low halves.
    unsafe fn multiply(a: Self::Words, b: Self::Words) -> Self::Words;
    /// The high halves, moved to the low ones.
    unsafe fn high(a: Self::Words) -> Self::Words;
    /// Exclusive or of all three.
    unsafe fn xor3(a: Self::Words, b: Self::Words, c: Self::Words) -> Self::Words;
    /// Whether any low half is at most `limit`.
    unsafe fn any_at_most(words: &[Self::Words; 4], limit: u32) -> bool;
    /// Writes the words of a span in the order of its tokens, and returns a bit for each token, others may be among them,
    /// whose word is at most what could bring its logit to a score of `cut`; `limit` bounds that for all.
    #[inline(always)]
    unsafe fn reaching(
        words: &[Self::Words; 4],
        logits: &[f32; SPAN],
        cut: f32,
        limit: u32,
        ordered: &mut [u32; SPAN],
    ) -> u64 {
        let _ = (logits, cut);
        let [a, b, c, d] = *words;
        // SAFETY: by the caller's promise. Not `map`, which may stay a call without the instruction set.
        let arrays = unsafe { [Self::to_array(a), Self::to_array(b), Self::to_array(c), Self::to_array(d)] };
        let mut hits = 0;
        for (i, word) in ordered.iter_mut().enumerate() {
            *word = arrays[i % 4][i / 4];
            hits |= u64::from(*word <= limit) << i;
        }
        hits
    }
    /// The largest of a span; no entry is NaN.
    unsafe fn largest(logits: &[f32; SPAN]) -> f32;
    /// A bit for each logit that is at least `cut`, which is not NaN.
    unsafe fn at_least(logits: &[f32; SPAN], cut: f32) -> u64;
    /// Adds the masses of spans, of which `top` is the largest logit.
    #[inline(always)]
    unsafe fn weigh(spans: &[[f32; SPAN]], top: f32, mass: &mut MassHistogram) {
        let _ = top;
        mass.extend_from_slice(spans.as_flattened());
    }
    /// Adds the masses of logits that reach `floor`, the edge of a bin, to their bins, and sums `e^(l - floor)` of the
    /// others, with an error below 2^-16 of it and 2^-68. `tops` are the largest logits of each span. Those that reach the
    /// floor stay in `above`, if the row's are kept.
    #[inline(always)]
    unsafe fn weigh_above(
        spans: &[[f32; SPAN]],
        tops: &[f32],
        floor: f32,
        mass: &mut MassHistogram,
        (above, run): (&mut Above, &mut Run),
    ) -> f32 {
        let _ = tops;
        let mut sums = [0.0f32; 8];
        for block in spans.as_flattened().as_chunks::<8>().0 {
            for i in 0..8 {
                sums[i] += if block[i] < floor { exp_below(block[i] - floor) } else { 0.0 };
            }
            for &logit in block.iter().filter(|&&logit| logit >= floor) {
                mass.push(logit);
            }
        }
        above.extend(run, spans.as_flattened().iter().copied().filter(|&logit| logit >= floor));
        sums.iter().sum()
    }
    /// Adds the logits of a tile to a row's moments.
    #[inline(always)]
    unsafe fn sum_moments(spans: &[[f32; SPAN]], moments: &mut Moments) {
        spans.as_flattened().iter().for_each(|&logit| moments.push(logit));
    }
    /// The low halves.
    unsafe fn to_array(a: Self::Words) -> [u32; BLOCKS];
}

/// `2^f` is within 2^-18 of `1 + f p(f)` on [-1/2, 1/2]; lowest first (minimax, by Remez's exchange).
pub(crate) const EXP2: [f32; 4] = [0.693_113_6, 0.240_207_1, 0.055_976_88, 0.009_782_91];
/// Below this power of two a mass counts as it.
pub(crate) const LOWEST: f32 = -100.0;

/// `e^x` of `x` up to 0, within 2^-17 of it and 2^-100.
#[inline(always)]
fn exp_below(x: f32) -> f32 {
    let y = x * core::f32::consts::LOG2_E;
    let y = if y > LOWEST { y } else { LOWEST };
    // The magic number rounds, and its last bits are the integer's.
    let shifted = y + 12_582_912.0;
    let f = y - (shifted - 12_582_912.0);
    let p = 1.0 + f * (EXP2[0] + f * (EXP2[1] + f * (EXP2[2] + f * EXP2[3])));
    f32::from_bits(p.to_bits().wrapping_add(shifted.to_bits() << 23))
}

/// The token noise words of `first .. first + 64`, `first` a multiple of 4: word `j` of lane `i` is that of token
/// `first + 4 i + j`.
///
/// # Safety
/// The instruction set of `L` is available.
#[inline(always)]
pub(crate) unsafe fn token_words<L: Lanes>(noise: &Noise, draw: u32, first: u32) -> [L::Words; 4] {
    let [block, c1, c2, c3] = noise.counter(Domain::Token.code(), draw, first >> 2);
    let [mut k0, mut k1] = noise.key();
    // SAFETY: by this function's contract.
    unsafe {
        let (m0, m1) = (L::splat(PHILOX_M4X32_0), L::splat(PHILOX_M4X32_1));
        let mut c = [L::count_from(block), L::splat(c1), L::splat(c2), L::splat(c3)];
        for _ in 0..10 {
            let p0 = L::multiply(c[0], m0);
            let p1 = L::multiply(c[2], m1);
            c = [L::xor3(L::high(p1), c[1], L::splat(k0)), p1, L::xor3(L::high(p0), c[3], L::splat(k1)), p0];
            k0 = k0.wrapping_add(PHILOX_W32_0);
            k1 = k1.wrapping_add(PHILOX_W32_1);
        }
        c
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::isa::Isa;
    use crate::perturb::word_limit;

    /// # Safety
    /// The instruction set of `L` is available.
    unsafe fn check<L: Lanes>() {
        for (seed, position, draw, first) in [(0, 0, 0, 0), (!0, 1 << 40, 7, 4), (12345, 99, !0, u32::MAX - 63)] {
            let noise = Noise::new(seed, position).unwrap();
            // SAFETY: by this function's contract.
            let (words, arrays) = unsafe {
                let words = token_words::<L>(&noise, draw, first);
                (words, words.map(|w| L::to_array(w)))
            };
            let mut smallest = u32::MAX;
            for i in 0..SPAN as u32 {
                let want = noise.word(Domain::Token, draw, first.wrapping_add(i));
                assert_eq!(arrays[(i % 4) as usize][(i / 4) as usize], want);
                smallest = smallest.min(want);
            }
            // SAFETY: as above.
            unsafe {
                assert!(L::any_at_most(&words, smallest));
                assert!(!L::any_at_most(&words, smallest - 1));
            }
        }
    }

    /// # Safety
    /// The instruction set of `L` is available.
    unsafe fn check_spans<L: Lanes>() {
        let mut logits = [f32::NEG_INFINITY; SPAN];
        for (i, logit) in logits.iter_mut().enumerate().skip(1) {
            *logit = (i * 37 % 50) as f32 - 20.0;
        }
        for cut in [f32::MIN, -20.0, 3.0, 3.5, 29.0, 30.0] {
            let want = (0..SPAN).filter(|&i| logits[i] >= cut).fold(0u64, |hits, i| hits | 1 << i);
            // SAFETY: by this function's contract.
            assert_eq!(unsafe { L::at_least(&logits, cut) }, want, "{cut}");
        }
        // SAFETY: by this function's contract.
        assert_eq!(unsafe { L::largest(&logits) }, 29.0);
    }

    /// # Safety
    /// The instruction set of `L` is available.
    unsafe fn check_reaching<L: Lanes>() {
        let mut seen = 0;
        for draw in 0..200 {
            let noise = Noise::new(77, 3).unwrap();
            let mut logits = [f32::NEG_INFINITY; SPAN];
            for (i, logit) in logits.iter_mut().enumerate().skip(draw as usize % 7) {
                *logit = (i * 37 % 50) as f32 * 0.3 - 200.0 * (draw % 3) as f32;
            }
            let top = logits.iter().copied().fold(f32::NEG_INFINITY, f32::max);
            for cut in [f32::NEG_INFINITY, top - 3.0, top - 0.1, top, top + 0.5, top + 2.0, top + 9.0] {
                let mut ordered = [0; SPAN];
                let limit = word_limit(top, cut);
                // SAFETY: by this function's contract.
                let hits = unsafe {
                    let words = token_words::<L>(&noise, draw, 640);
                    L::reaching(&words, &logits, cut, limit, &mut ordered)
                };
                for (i, &word) in ordered.iter().enumerate() {
                    assert_eq!(word, noise.word(Domain::Token, draw, 640 + i as u32));
                    let reaches = logits[i] > f32::NEG_INFINITY && word <= word_limit(logits[i], cut);
                    assert!(!reaches || hits >> i & 1 == 1, "{draw} {cut} {i}");
                    seen += u32::from(reaches && cut > top);
                }
            }
        }
        assert!(seen > 100, "{seen}");
    }

    #[test]
    fn no_token_that_can_reach_the_cut_is_left_out() {
        // SAFETY: each instruction set is checked first.
        unsafe {
            check_reaching::<portable::Portable>();
            #[cfg(target_arch = "x86_64")]
            if Isa::Avx2.is_available() {
                check_reaching::<avx2::Avx2>();
            }
            #[cfg(target_arch = "x86_64")]
            if Isa::Avx512.is_available() {
                check_reaching::<avx512::Avx512>();
            }
        }
    }

    /// # Safety
    /// The instruction set of `L` is available.
    unsafe fn check_masses<L: Lanes>() {
        let (mut mass, mut want) = (MassHistogram::default(), MassHistogram::default());
        // Edges of bins, the floor of the window, and sizes where entries are not used.
        for (round, scale) in [1.0, 0.125, 7.3, 60.0, 9e3, 3e5, 1e30].into_iter().enumerate() {
            let mut spans = [[f32::NEG_INFINITY; SPAN]; 3];
            for (i, logit) in spans.as_flattened_mut().iter_mut().enumerate().skip(round) {
                *logit = ((i * 7919 + round) % 211) as f32 / 16.0 * scale - 5.0 * scale;
            }
            let top = spans.as_flattened().iter().copied().fold(f32::NEG_INFINITY, f32::max);
            // SAFETY: by this function's contract.
            unsafe { L::weigh(&spans, top, &mut mass) };
            spans.as_flattened().iter().for_each(|&logit| want.push(logit));
            assert_eq!(mass, want, "{scale}");
        }
    }

    /// # Safety
    /// The instruction set of `L` is available.
    unsafe fn check_masses_above<L: Lanes>() {
        let (mut mass, mut want) = (MassHistogram::default(), MassHistogram::default());
        let mut told = 0;
        for (round, scale) in [1.0, 0.125, 7.3, 60.0, 9e3, 3e5].into_iter().enumerate() {
            let mut spans = [[f32::NEG_INFINITY; SPAN]; 5];
            for (i, logit) in spans.as_flattened_mut().iter_mut().enumerate().skip(round) {
                *logit = ((i * 7919 + round) % 211) as f32 / 16.0 * scale - 5.0 * scale;
            }
            let tops = spans.map(|span| span.into_iter().fold(f32::NEG_INFINITY, f32::max));
            for floor in [-99.0, 0.0, 0.125, 6.5, 8.0, 1e4].map(|part| MassHistogram::edge(part * scale)) {
                let (mut kept, mut run) = (Above::default(), Run::default());
                kept.begin(1, 9472, 16);
                run.begin(true);
                // SAFETY: by this function's contract.
                let sum = unsafe { L::weigh_above(&spans, &tops, floor, &mut mass, (&mut kept, &mut run)) };
                let sum = f64::from(sum);
                let (above, below): (Vec<f32>, Vec<f32>) =
                    spans.as_flattened().iter().partition(|&&logit| logit >= floor);
                above.iter().for_each(|&logit| want.push(logit));
                let ordered = |logits: Vec<f32>| {
                    let mut bits: Vec<u32> = logits.into_iter().map(f32::to_bits).collect();
                    bits.sort_unstable();
                    bits
                };
                if run.is_complete() {
                    assert_eq!(ordered(kept.logits(run).collect()), ordered(above.clone()), "{scale} {floor}");
                    told += 1;
                }
                // A histogram may open its window for the largest logit of all.
                if !above.is_empty() {
                    assert_eq!(mass, want, "{scale} {floor}");
                }
                let exact: f64 = below.iter().map(|&logit| (f64::from(logit) - f64::from(floor)).exp()).sum();
                assert!((sum - exact).abs() <= exact / 65_536.0 + 1e-20, "{scale} {floor}: {sum} for {exact}");
            }
        }
        assert!(told > 15, "{told}");
    }

    #[test]
    fn the_masses_above_a_floor_are_the_scalar_ones() {
        // SAFETY: each instruction set is checked first.
        unsafe {
            check_masses_above::<portable::Portable>();
            #[cfg(target_arch = "x86_64")]
            if Isa::Avx2.is_available() {
                check_masses_above::<avx2::Avx2>();
            }
            #[cfg(target_arch = "x86_64")]
            if Isa::Avx512.is_available() {
                check_masses_above::<avx512::Avx512>();
            }
        }
    }

    #[test]
    fn the_masses_are_the_scalar_ones() {
        // SAFETY: each instruction set is checked first.
        unsafe {
            check_masses::<portable::Portable>();
            #[cfg(target_arch = "x86_64")]
            if Isa::Avx2.is_available() {
                check_masses::<avx2::Avx2>();
            }
            #[cfg(target_arch = "x86_64")]
            if Isa::Avx512.is_available() {
                check_masses::<avx512::Avx512>();
            }
        }
    }

    #[test]
    fn the_words_are_the_scalar_ones() {
        // SAFETY: each instruction set is checked first.
        unsafe {
            check::<portable::Portable>();
            check_spans::<portable::Portable>();
            #[cfg(target_arch = "x86_64")]
            if Isa::Avx2.is_available() {
                check::<avx2::Avx2>();
                check_spans::<avx2::Avx2>();
            }
            #[cfg(target_arch = "x86_64")]
            if Isa::Avx512.is_available() {
                check::<avx512::Avx512>();
                check_spans::<avx512::Avx512>();
            }
        }
    }
}
