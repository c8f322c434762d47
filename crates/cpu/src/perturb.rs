//! The draw inside a tile: which tokens can still win, and their exact scores.
//!
//! The plain version gives every token its Gumbel and keeps the best:
//! ```text
//! for each token i of the tile: best = merge(best, (logit[i] + gumbel(i), i))
//! ```
//! 1. **One word rules out sixteen tokens.** A granule whose word gives the minimum bits `u` has no exponential below
//!    `u 2^-32`, so no Gumbel above `-ln(u 2^-32)`. A token reaches a score `cut` only if its logit is at least
//!    `cut + ln(u 2^-32)`, the granule's threshold. Most spans of four granules fail by their largest logit alone.
//! 2. **Granules open exactly.** In an open granule the token words and their logarithms are made for the logits that
//!    reach `cut` with the granule's largest Gumbel.
//! 3. **The first cut** is the score of the tile's largest logit.
//!
//! Tokens that are left out score below `cut`, so the result is that of the plain version, bit for bit.

use crate::granules::{BLOCKS, Threshold, slack};
use crate::simd::{SPAN, Vector};
use flash_sampling_core::noise::{GUMBEL_MAX, granule};
use flash_sampling_core::{Candidate, Domain, Noise, Winner};

const GRANULE: usize = granule::TOKENS as usize;

/// Offers every token of a tile that could reach the running cut.
///
/// `spans[s][i]` is the transformed logit of token `first + 64 s + i`, -inf where there is none; `first` is a multiple of
/// 64, `top` is the largest logit, and `tops` are those of each span. `cut` is what a score must reach now; `offer` takes a
/// candidate and returns the cut that follows. A candidate may come twice. Logits below `floor` may be left out.
///
/// # Safety
/// The instruction set of `V` is available.
#[inline(always)]
pub(crate) unsafe fn perturb<V: Vector>(
    (noise, draw): (&Noise, u32),
    first: u32,
    spans: &[[f32; SPAN]],
    (top, tops): (f32, &[f32]),
    mut cut: f32,
    floor: f32,
    mut offer: impl FnMut(Candidate) -> f32,
) {
    if top == f32::NEG_INFINITY || top + GUMBEL_MAX + 1e-4 * (1.0 + top.abs()) < cut {
        return;
    }
    if cut == f32::NEG_INFINITY {
        let place = spans.as_flattened().iter().position(|&logit| logit == top).unwrap_or(0);
        let token = first + place as u32;
        let score = top + noise.gumbel(Domain::Token, draw, token);
        cut = offer(Candidate { winner: Winner::new(score, token), logit: top });
    }
    // A span is a Philox block of granules.
    let firsts = (first..).step_by(BLOCKS * SPAN);
    for ((spans, tops), first) in spans.chunks(BLOCKS).zip(tops.chunks(BLOCKS)).zip(firsts) {
        // SAFETY: by this function's contract.
        let batch = unsafe { V::granules(noise, draw, first / SPAN as u32, Threshold::of(cut, floor)) };
        for (b, (span, &top)) in spans.iter().zip(tops).enumerate() {
            if top < batch.least[b] {
                continue;
            }
            for (j, logits) in span.as_chunks::<GRANULE>().0.iter().enumerate() {
                let threshold = batch.thresholds[j][b];
                if logits.iter().fold(false, |any, &logit| any | (logit >= threshold)) {
                    let token = first + (b * SPAN + j * GRANULE) as u32;
                    open((noise, draw), token, batch.words[j][b], logits, &mut cut, &mut offer);
                }
            }
        }
    }
}

/// Offers the tokens of a granule, `first` its first one, that could reach the running cut.
#[inline(always)]
fn open(
    (noise, draw): (&Noise, u32),
    first: u32,
    word: u32,
    logits: &[f32; GRANULE],
    cut: &mut f32,
    offer: &mut impl FnMut(Candidate) -> f32,
) {
    let granule = noise.granule(Domain::Token, draw, first, word);
    let most = granule.largest_gumbel();
    for (token, &logit) in (first..).zip(logits) {
        if logit > f32::NEG_INFINITY && logit + most >= *cut - slack(*cut) {
            let score = logit + noise.gumbel_in(&granule, Domain::Token, draw, token);
            *cut = offer(Candidate { winner: Winner::new(score, token), logit });
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::simd::Plain;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn skipping_changes_nothing(
            seed: u64, spread in 0f32..30.0, shift in -100f32..100.0, blank in 0usize..70, spans in 1usize..20,
        ) {
            let noise = Noise::new(seed, 5).unwrap();
            let (mut fast, mut plain) = (Candidate::NONE, Candidate::NONE);
            for tile in 0..3 {
                let first = tile * (32 * SPAN) as u32;
                let mut logits = vec![[0f32; SPAN]; spans];
                for (i, l) in logits.as_flattened_mut().iter_mut().enumerate() {
                    let hash = (first as usize + i).wrapping_mul(2_654_435_761) % 1000;
                    *l = if i < blank { f32::NEG_INFINITY } else { shift + spread * hash as f32 / 1000.0 };
                }
                let largest = |logits: &[f32]| logits.iter().copied().fold(f32::NEG_INFINITY, f32::max);
                let tops: Vec<f32> = logits.iter().map(|span| largest(span)).collect();
                let cut = fast.winner.score;
                let offer = |c| {
                    fast = fast.merge(c);
                    fast.winner.score
                };
                let tops = (largest(&tops), &tops[..]);
                // SAFETY: plain Rust is always available.
                unsafe { perturb::<Plain>((&noise, 3), first, &logits, tops, cut, f32::NEG_INFINITY, offer) };
                for (token, &logit) in (first..).zip(logits.as_flattened()) {
                    if logit > f32::NEG_INFINITY {
                        let score = logit + noise.gumbel(Domain::Token, 3, token);
                        plain = plain.merge(Candidate { winner: Winner::new(score, token), logit });
                    }
                }
            }
            prop_assert_eq!(fast, plain);
        }
    }
}
