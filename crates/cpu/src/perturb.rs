//! The draw inside a tile: which tokens can still win, and their exact scores.
//!
//! The plain version gives every token its Gumbel and keeps the best:
//! ```text
//! for each token i of the span: best = merge(best, (logit[i] + gumbel(word[i]), i))
//! ```
//! The two logarithms are the expensive part, so they are computed only where they could matter.
//!
//! **The bound.** A word `x` gives `v >= x 2^-32` and an exponential `E >= v`, so its Gumbel is at most
//! `-ln(x 2^-32)`. A token of the tile can reach a score `cut` only if `top + g >= cut`, where `top` is the largest
//! logit of the tile; that is, only if `x <= 2^32 e^(top - cut)`. One comparison of integers a token decides; where any
//! token of a span passes, the same with each token's own logit.
//!
//! **The slack.** Scores are float32: the computed Gumbel exceeds the true one by less than `1.3e-7 g + 3e-7` and the
//! sum is rounded once. With `|g| <= 46` both are below `2^-16 + 2^-22 (|top| + |cut|)`, which is added to `top`.
//!
//! **The exponential.** `2^y <= (1 + frac y) 2^floor(y)` because `2^f` is convex on [0, 1]; the right side is what the
//! float with bits `(y + 127) 2^23` is. So the limit below is never smaller than it must be, and at most 6.2% larger.
//!
//! Since only tokens that cannot reach `cut` are left out, the result is that of the plain version, bit for bit.

use crate::words::{Lanes, SPAN, token_words};
use flash_sampling_core::noise::GUMBEL_MAX;
use flash_sampling_core::{Candidate, Domain, Noise, Winner};

/// The largest word that could bring a logit of at most `top` to a score of `cut`.
#[inline(always)]
pub(crate) fn word_limit(top: f32, cut: f32) -> u32 {
    let slack = 1.53e-5 + 2.4e-7 * (top.abs() + cut.abs());
    let y = (top - cut + slack) * core::f32::consts::LOG2_E + 32.0;
    if y >= 32.0 {
        u32::MAX
    } else if y < -1.0 {
        0
    } else {
        // A little more for the rounding of `y` and of the conversion, which saturates just below 2^32.
        ((f32::from_bits(((y + 127.0) * 8_388_608.0) as u32) * 1.000_1) as u32).saturating_add(1)
    }
}

/// Offers every token of some spans that could reach the running cut.
///
/// `spans[s][i]` is the transformed logit of token `first + 64 s + i`, -inf where there is none; `first` is a multiple
/// of 4, and `top` is not below any logit. `cut` is what a score must reach now; `offer` takes a candidate and returns
/// the cut that follows. Spans that `dropped` names by number are left out.
///
/// # Safety
/// The instruction set of `L` is available.
#[inline(always)]
pub(crate) unsafe fn perturb<L: Lanes>(
    (noise, draw): (&Noise, u32),
    first: u32,
    spans: &[[f32; SPAN]],
    top: f32,
    mut cut: f32,
    dropped: impl Fn(usize) -> bool,
    mut offer: impl FnMut(Candidate) -> f32,
) {
    if top + GUMBEL_MAX + 1e-4 * (1.0 + top.abs()) < cut {
        return;
    }
    let (mut limit, mut ordered) = (word_limit(top, cut), [0; SPAN]);
    for (s, logits) in spans.iter().enumerate() {
        if dropped(s) {
            continue;
        }
        let first = first + (s * SPAN) as u32;
        // SAFETY: by this function's contract.
        let mut hits = unsafe {
            let words = token_words::<L>(noise, draw, first);
            if !L::any_at_most(&words, limit) {
                continue;
            }
            L::reaching(&words, logits, cut, limit, &mut ordered)
        };
        while hits != 0 {
            let i = hits.trailing_zeros();
            hits &= hits - 1;
            let (word, logit) = (ordered[i as usize], logits[i as usize]);
            // The cut rises while candidates come in, and the token's own limit is lower than that of the largest.
            if logit > f32::NEG_INFINITY && word <= word_limit(logit, cut) {
                let token = first + i;
                let score = logit + noise.gumbel_of_word(Domain::Token, draw, token, word);
                cut = offer(Candidate { winner: Winner::new(score, token), logit });
            }
        }
        limit = word_limit(top, cut);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::words::portable::Portable;
    use flash_sampling_core::noise::uniform::gumbel;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn words_above_the_limit_cannot_reach_the_cut(
            top in -300f32..300.0, gap in prop_oneof![4 => -5f32..47.0, 1 => -2e-4f32..2e-4], above in 0u32..1000, refinement: u32,
        ) {
            let cut = top + gap;
            if let Some(word) = word_limit(top, cut).checked_add(1 + above) {
                prop_assert!(top + gumbel(word, || refinement) < cut);
            }
        }

        #[test]
        fn the_limit_falls_as_the_cut_rises(top in -9f32..9.0, gap in -3e-4f32..3e-4, step in 0f32..1e-3) {
            prop_assert!(word_limit(top, top + gap) >= word_limit(top, top + gap + step));
        }

        #[test]
        fn the_limit_is_not_much_larger_than_it_must_be(top in -30f32..30.0, gap in 0.1f32..15.0) {
            let exact = (32.0 - f64::from(gap) / core::f64::consts::LN_2).exp2();
            prop_assert!(f64::from(word_limit(top, top + gap)) < 1.07 * exact + 2.0);
        }

        #[test]
        fn skipping_changes_nothing(
            seed: u64, spread in 0f32..30.0, shift in -100f32..100.0, blank in 0usize..64, spans in 1u32..12,
        ) {
            let noise = Noise::new(seed, 5).unwrap();
            let (mut fast, mut plain) = (Candidate::NONE, Candidate::NONE);
            for span in 0..spans {
                let first = span * SPAN as u32;
                let mut logits = [0f32; SPAN];
                for (i, l) in logits.iter_mut().enumerate() {
                    let hash = (first as usize + i).wrapping_mul(2_654_435_761) % 1000;
                    *l = if i < blank { f32::NEG_INFINITY } else { shift + spread * hash as f32 / 1000.0 };
                }
                let top = logits.iter().copied().fold(f32::NEG_INFINITY, f32::max);
                let cut = fast.winner.score;
                let offer = |c| {
                    fast = fast.merge(c);
                    fast.winner.score
                };
                // SAFETY: plain Rust is always available.
                unsafe { perturb::<Portable>((&noise, 3), first, &[logits], top, cut, |_| false, offer) };
                for (token, &logit) in (first..).zip(&logits) {
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
