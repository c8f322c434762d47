//! Vector operations on a tile: granules, maxima and masses.
//!
//! AVX-512 has hand-written versions, because the compiler's code is slower. NEON has some, because the compiler's code
//! has several times the instructions. Every other instruction set compiles [`Plain`].

#[cfg(target_arch = "x86_64")]
pub(crate) mod avx512;
#[cfg(target_arch = "aarch64")]
pub(crate) mod neon;

use crate::scan::granules::{BLOCKS, Granules, RoundKeys, Threshold, granules};
use crate::scan::logit_cache::{CachedRow, GATHERED, LogitCache, VECTOR};
use core::mem::MaybeUninit;
use flash_sampling_core::backend::{MassHistogram, Moments};

/// Tokens per span: the four granules of one Philox block.
pub(crate) const SPAN: usize = 64;

/// The operations on spans of logits. The provided methods are plain Rust.
///
/// All methods are `inline(always)`, so that they inline into an entry point with the target feature.
///
/// # Safety
/// The caller of a method guarantees that the instruction set is available.
pub(crate) trait Vector {
    /// Computes `N` consecutive batches of granules. `counter` is the Philox counter of the first block.
    #[inline(always)]
    unsafe fn granules<const N: usize>([block, c1, c2, c3]: [u32; 4], keys: &RoundKeys) -> [Granules; N] {
        let mut batches = [Granules::default(); N];
        for (n, batch) in batches.iter_mut().enumerate() {
            *batch = granules([block.wrapping_add((n * BLOCKS) as u32), c1, c2, c3], keys);
        }
        batches
    }
    /// Returns one bit per span: 1 if the span's largest logit reaches the lowest threshold of its four granules.
    ///
    /// `tops` has the largest logit of each span, and `least` has the smallest minimum bits of each block. A threshold
    /// rises with the minimum bits, so the smallest minimum bits give the lowest threshold.
    #[inline(always)]
    unsafe fn open(least: &[u32; BLOCKS], threshold: Threshold, tops: &[f32; BLOCKS]) -> u32 {
        let mut open = 0;
        for b in 0..BLOCKS {
            open |= u32::from(tops[b] >= threshold.of_bits(least[b])) << b;
        }
        open
    }
    /// Writes the largest logit of each span to `tops`, and returns the largest logit of all spans.
    ///
    /// Returns `None` if any logit is NaN or +inf. Eight running maxima shorten the dependency chain.
    #[inline(always)]
    unsafe fn largest(spans: &[[f32; SPAN]], tops: &mut [f32]) -> Option<f32> {
        let larger = |a: f32, b: f32| if b > a { b } else { a };
        let (mut valid, mut all) = ([u32::MAX; 8], f32::NEG_INFINITY);
        for (top, span) in tops.iter_mut().zip(spans) {
            let mut most = [f32::NEG_INFINITY; 8];
            for logits in span.as_chunks::<8>().0 {
                for i in 0..8 {
                    most[i] = larger(most[i], logits[i]);
                    valid[i] &= if logits[i] < f32::INFINITY { u32::MAX } else { 0 };
                }
            }
            let [a, b, c, d, e, f, g, h] = most;
            let four = [larger(a, e), larger(b, f), larger(c, g), larger(d, h)];
            *top = larger(larger(four[0], four[2]), larger(four[1], four[3]));
            all = larger(all, *top);
        }
        (valid == [u32::MAX; 8]).then_some(all)
    }
    /// Returns one bit per logit: set if the logit reaches the cutoff of its group of sixteen. No cutoff is NaN.
    #[inline(always)]
    unsafe fn at_least(logits: &[f32; SPAN], cuts: [f32; 4]) -> u64 {
        logits.iter().enumerate().fold(0, |hits, (i, &logit)| hits | u64::from(logit >= cuts[i / 16]) << i)
    }
    /// Adds the masses of all logits of the spans; `top` is the largest logit.
    #[inline(always)]
    unsafe fn weigh(spans: &[[f32; SPAN]], top: f32, mass: &mut MassHistogram) {
        let _ = top;
        mass.extend_from_slice(spans.as_flattened());
    }
    /// Adds the masses of logits that reach `floor` to bins, and returns the sum of `e^(l - floor)` of the others.
    ///
    /// `floor` is the edge of a bin; `tops` has the largest logit of each span. The error of the sum is below 2^-16
    /// relative plus 2^-68 absolute. If the pass caches the row's logits, the logits that reach `floor` go to `above`.
    #[inline(always)]
    unsafe fn weigh_above(
        spans: &[[f32; SPAN]],
        tops: &[f32],
        floor: f32,
        mass: &mut MassHistogram,
        (above, run): (&mut LogitCache, &mut CachedRow),
    ) -> f32 {
        let top = tops.iter().copied().fold(f32::NEG_INFINITY, f32::max);
        let Some(lowest) = mass.make_room(top) else {
            // Logits of this size have no entries, so the loop adds them one by one.
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
        if lowest > floor {
            run.end();
        }
        let mut sum = 0.0;
        for (spans, tops) in spans.chunks(4).zip(tops.chunks(4)) {
            let mut own = [MaybeUninit::<f32>::uninit(); GATHERED + VECTOR];
            let (kept, keeps) = match above.room(run) {
                Some(room) => (room.as_mut_ptr().cast(), true),
                None => (own.as_mut_ptr().cast(), false),
            };
            // SAFETY: by this function's contract; both buffers hold four spans plus one vector.
            let (below, count) = unsafe { Self::sum_below(spans, tops, floor, lowest, kept, mass) };
            sum += below;
            if keeps {
                above.keep(run, count);
            }
        }
        sum
    }
    /// Sums `e^(l - floor)` over logits below `floor`, and adds the masses of the other logits to their bins.
    ///
    /// Takes at most four spans. Logits at or above `floor` but below `lowest` add no mass. Writes the logits for the bins
    /// to `kept` first, for vectors; returns the sum, and the number of these logits.
    ///
    /// # Safety
    /// `kept` is valid for writes of as many logits as the spans have, plus [`VECTOR`].
    #[inline(always)]
    unsafe fn sum_below(
        spans: &[[f32; SPAN]],
        tops: &[f32],
        floor: f32,
        lowest: f32,
        kept: *mut f32,
        mass: &mut MassHistogram,
    ) -> (f32, usize) {
        let (mut sums, mut count) = ([0.0f32; 16], 0);
        for block in spans.as_flattened().as_chunks::<16>().0 {
            for i in 0..16 {
                sums[i] += if block[i] < floor { exp_below(block[i] - floor) } else { 0.0 };
            }
        }
        // SAFETY: by this function's contract; `kept` gets each logit at most once.
        let kept = unsafe {
            for (span, _) in spans.iter().zip(tops).filter(|(_, top)| **top >= floor) {
                let mut hits = Self::at_least(span, [floor.max(lowest); 4]);
                while hits != 0 {
                    kept.add(count).write(span[hits.trailing_zeros() as usize]);
                    count += 1;
                    hits &= hits - 1;
                }
            }
            core::slice::from_raw_parts(kept, count)
        };
        mass.extend_from_slice(kept);
        (sums.iter().sum(), count)
    }
    /// Adds the logits of a tile to a row's moments.
    #[inline(always)]
    unsafe fn sum_moments(spans: &[[f32; SPAN]], moments: &mut Moments) {
        spans.as_flattened().iter().for_each(|&logit| moments.push(logit));
    }
}

/// The plain Rust version.
pub(crate) struct Plain;

impl Vector for Plain {}

/// The coefficients of a polynomial `p`, lowest first (minimax, by Remez exchange).
///
/// `1 + f p(f)` is within 2^-18 of `2^f` on [-1/2, 1/2].
pub(crate) const EXP2: [f32; 4] = [0.693_113_6, 0.240_207_1, 0.055_976_88, 0.009_782_91];
/// The lowest binary exponent of a mass; smaller masses count as `2^LOWEST`.
pub(crate) const LOWEST: f32 = -100.0;

/// Returns `e^x` for `x <= 0`, with an error of at most 2^-17 relative plus 2^-100 absolute.
#[inline(always)]
fn exp_below(x: f32) -> f32 {
    let y = x * core::f32::consts::LOG2_E;
    let y = if y > LOWEST { y } else { LOWEST };
    // Adding 1.5 * 2^23 rounds `y` to an integer, and the low bits of the sum hold this integer.
    let shifted = y + 12_582_912.0;
    let f = y - (shifted - 12_582_912.0);
    let p = 1.0 + f * (EXP2[0] + f * (EXP2[1] + f * (EXP2[2] + f * EXP2[3])));
    f32::from_bits(p.to_bits().wrapping_add(shifted.to_bits() << 23))
}

#[cfg(test)]
mod tests {
    use super::*;
    #[cfg(any(target_arch = "x86_64", target_arch = "aarch64"))]
    use crate::isa::Isa;

    /// # Safety
    /// The instruction set of `V` is available.
    unsafe fn check_spans<V: Vector>() {
        let mut logits = [f32::NEG_INFINITY; SPAN];
        for (i, logit) in logits.iter_mut().enumerate().skip(1) {
            *logit = (i * 37 % 50) as f32 - 20.0;
        }
        for cut in [f32::MIN, -20.0, 3.0, 3.5, 29.0, 30.0] {
            let cuts = [cut, 0.5 - cut, cut, f32::INFINITY];
            let want = (0..SPAN).filter(|&i| logits[i] >= cuts[i / 16]).fold(0u64, |hits, i| hits | 1 << i);
            // SAFETY: by this function's contract.
            assert_eq!(unsafe { V::at_least(&logits, cuts) }, want, "{cut}");
        }
        let (mut tops, nothing) = ([0.0; 3], [f32::NEG_INFINITY; SPAN]);
        // SAFETY: by this function's contract.
        assert_eq!(unsafe { V::largest(&[nothing, logits, nothing], &mut tops) }, Some(29.0));
        assert_eq!(tops, [f32::NEG_INFINITY, 29.0, f32::NEG_INFINITY]);
        for (place, invalid) in [(37, f32::NAN), (0, -f32::NAN), (63, f32::INFINITY)] {
            let mut logits = logits;
            logits[place] = invalid;
            // SAFETY: by this function's contract.
            assert_eq!(unsafe { V::largest(&[nothing, logits], &mut tops) }, None);
        }
    }

    /// # Safety
    /// The instruction set of `V` is available.
    unsafe fn check_masses<V: Vector>() {
        let (mut mass, mut want) = (MassHistogram::default(), MassHistogram::default());
        // The scales cover bin edges, the lower end of the window, and sizes too large for entries.
        for (round, scale) in [1.0, 0.125, 7.3, 60.0, 9e3, 3e5, 1e30].into_iter().enumerate() {
            let mut spans = [[f32::NEG_INFINITY; SPAN]; 3];
            for (i, logit) in spans.as_flattened_mut().iter_mut().enumerate().skip(round) {
                *logit = ((i * 7919 + round) % 211) as f32 / 16.0 * scale - 5.0 * scale;
            }
            let top = spans.as_flattened().iter().copied().fold(f32::NEG_INFINITY, f32::max);
            // SAFETY: by this function's contract.
            unsafe { V::weigh(&spans, top, &mut mass) };
            spans.as_flattened().iter().for_each(|&logit| want.push(logit));
            assert_eq!(mass, want, "{scale}");
        }
    }

    /// # Safety
    /// The instruction set of `V` is available.
    unsafe fn check_masses_above<V: Vector>() {
        let (mut mass, mut want) = (MassHistogram::default(), MassHistogram::default());
        let mut told = 0;
        for (round, scale) in [1.0, 0.125, 7.3, 60.0, 9e3, 3e5].into_iter().enumerate() {
            let mut spans = [[f32::NEG_INFINITY; SPAN]; 5];
            for (i, logit) in spans.as_flattened_mut().iter_mut().enumerate().skip(round) {
                *logit = ((i * 7919 + round) % 211) as f32 / 16.0 * scale - 5.0 * scale;
            }
            let tops = spans.map(|span| span.into_iter().fold(f32::NEG_INFINITY, f32::max));
            for floor in [-99.0, 0.0, 0.125, 6.5, 8.0, 1e4].map(|part| MassHistogram::edge(part * scale)) {
                let (mut kept, mut run) = (LogitCache::default(), CachedRow::default());
                kept.begin(1, 9472, 16);
                run.begin(true);
                // SAFETY: by this function's contract.
                let sum = unsafe { V::weigh_above(&spans, &tops, floor, &mut mass, (&mut kept, &mut run)) };
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
                // If no logit reaches `floor`, a histogram may still open its window for the largest logit.
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
    fn every_instruction_set_gives_the_plain_results() {
        // SAFETY: each instruction set is checked first.
        unsafe {
            check_spans::<Plain>();
            check_masses::<Plain>();
            check_masses_above::<Plain>();
            #[cfg(target_arch = "x86_64")]
            if Isa::Avx512.is_available() {
                check_spans::<avx512::Avx512>();
                check_masses::<avx512::Avx512>();
                check_masses_above::<avx512::Avx512>();
            }
            #[cfg(target_arch = "aarch64")]
            if Isa::Neon.is_available() {
                check_spans::<neon::Neon>();
                check_masses::<neon::Neon>();
                check_masses_above::<neon::Neon>();
            }
        }
    }
}
