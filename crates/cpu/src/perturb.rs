//! The draw inside a tile: which tokens can still win, and their exact scores.
//!
//! The plain version gives every token its Gumbel and keeps the best:
//! ```text
//! for each token i of the tile: best = merge(best, (logit[i] + gumbel(i), i))
//! ```
//! 1. **One word rules out sixteen tokens.** A granule whose word gives the minimum bits `u` has no exponential below
//!    `u 2^-32`, so no Gumbel above `-ln(u 2^-32)`. A token reaches a score `cut` only if its logit is at least
//!    `cut + ln(u 2^-32)`, the granule's threshold. Most spans of four granules fail by their largest logit alone.
//! 2. **Spans open one token at a time.** The logits that reach the thresholds of their granules get their words, and
//!    logarithms only where the words' bound, `E >= (u + word) 2^-32`, allows a score of `cut`.
//! 3. **The first cut** is the score of the tile's largest logit.
//! 4. **A frontier** keeps more than one token: its cut is lower where logits are larger ([`Keep::cut_in`]).
//!
//! Tokens that are left out score below `cut`, so the result is that of the plain version, bit for bit.

use crate::granules::{BLOCKS, RoundKeys, Threshold, slack};
use crate::simd::{SPAN, Vector};
use core::ops::Range;
use flash_sampling_core::noise::granule;
use flash_sampling_core::noise::log::ln;
use flash_sampling_core::{Candidate, Domain, Noise, TopList, Winner};

/// What keeps candidates of a draw.
pub(crate) trait Keep {
    /// The score that a token must reach whatever its logit; -inf while every token counts.
    fn cut(&self) -> f32;

    /// The score that a token of these spans of the tile must reach.
    #[inline(always)]
    fn cut_in(&self, _spans: Range<usize>) -> f32 {
        self.cut()
    }

    /// Takes a candidate. The same one may come twice.
    fn offer(&mut self, candidate: Candidate);
}

impl Keep for Candidate {
    #[inline(always)]
    fn cut(&self) -> f32 {
        self.winner.score
    }

    #[inline(always)]
    fn offer(&mut self, candidate: Candidate) {
        *self = self.merge(candidate);
    }
}

impl Keep for TopList {
    #[inline(always)]
    fn cut(&self) -> f32 {
        self.threshold()
    }

    #[inline(always)]
    fn offer(&mut self, candidate: Candidate) {
        self.push(candidate);
    }
}

/// A tile of one draw.
#[derive(Clone, Copy)]
pub(crate) struct Perturbed<'a> {
    pub(crate) noise: &'a Noise,
    /// Those of the noise.
    pub(crate) keys: &'a RoundKeys,
    pub(crate) draw: u32,
    /// The first token, a multiple of 64.
    pub(crate) first: u32,
    /// `spans[s][i]` is the transformed logit of token `first + 64 s + i`; -inf where there is none.
    pub(crate) spans: &'a [[f32; SPAN]],
    /// The largest logit of each span, and -inf up to a multiple of [`BLOCKS`].
    pub(crate) tops: &'a [f32],
    /// Logits below this are left out.
    pub(crate) floor: f32,
}

impl Perturbed<'_> {
    /// Offers every token that could reach the cut.
    ///
    /// # Safety
    /// The instruction set of `V` is available.
    #[inline(always)]
    pub(crate) unsafe fn offer_to<V: Vector>(&self, keep: &mut impl Keep) {
        // A span is a Philox block of granules.
        let batches = self.spans.chunks(BLOCKS).zip(self.tops.as_chunks::<BLOCKS>().0);
        for ((spans, tops), from) in batches.zip((0..).step_by(BLOCKS)) {
            let of_batch = from..from + spans.len();
            let mut cut = keep.cut_in(of_batch.clone());
            if cut == f32::NEG_INFINITY {
                // The best of what is left for a draw without any candidate; the best of the batch for a frontier.
                let of_first = if keep.cut() == cut { from..self.spans.len() } else { of_batch.clone() };
                let top = self.tops[of_first.clone()].iter().copied().fold(f32::NEG_INFINITY, f32::max);
                if top == f32::NEG_INFINITY || top < self.floor {
                    continue;
                }
                self.offer_first(self.first + (from * SPAN) as u32, self.spans[of_first].as_flattened(), top, keep);
                cut = keep.cut_in(of_batch);
            }
            let block = self.first / SPAN as u32 + from as u32;
            let counter = self.noise.counter(Domain::Granule.code(), self.draw, block);
            // SAFETY: by this function's contract.
            let granules = unsafe { V::granules(counter, self.keys, Threshold::of(cut, self.floor), tops) };
            let mut open = granules.open & (u32::MAX >> (32 - spans.len()));
            while open != 0 {
                let b = open.trailing_zeros() as usize;
                open &= open - 1;
                // Candidates raise the cut, and that of a span may be higher than that of its batch.
                let of_span = from + b..from + b + 1;
                let higher = if cut > f32::NEG_INFINITY { keep.cut_in(of_span.clone()) - cut } else { 0.0 };
                let mut thresholds = [f32::MIN; 4];
                for (threshold, of) in thresholds.iter_mut().zip(&granules.thresholds) {
                    // A floor stays where it is.
                    *threshold = if of[b] > self.floor { of[b] + higher } else { self.floor }.max(f32::MIN);
                }
                // SAFETY: by this function's contract.
                let mut hits = unsafe { V::at_least(&spans[b], thresholds) };
                while hits != 0 {
                    let i = hits.trailing_zeros();
                    hits &= hits - 1;
                    let token = self.first + (of_span.start * SPAN) as u32 + i;
                    let word = granules.words[(i / granule::TOKENS) as usize][b];
                    self.score(of_span.clone(), token, spans[b][i as usize], word, keep);
                }
            }
        }
    }

    /// Offers the first token with the logit `top`, which gives the first cut.
    #[inline(always)]
    fn offer_first(&self, first: u32, logits: &[f32], top: f32, keep: &mut impl Keep) {
        let place = logits.iter().position(|&logit| logit == top).unwrap_or(0);
        let token = first + place as u32;
        let score = top + self.noise.gumbel(Domain::Token, self.draw, token);
        keep.offer(Candidate { winner: Winner::new(score, token), logit: top });
    }

    /// Offers a token of `span` with the word of its granule, if it can reach the cut.
    #[inline(always)]
    fn score(&self, span: Range<usize>, token: u32, logit: f32, word: u32, keep: &mut impl Keep) {
        let is_leader = token % granule::TOKENS == word % granule::TOKENS;
        let token_word = if is_leader { 0 } else { self.noise.word(Domain::Token, self.draw, token) };
        // Neither part of the exponential is below that many steps of 2^-32.
        let least = granule::minimum_bits(word) as f32 + token_word as f32;
        if least <= exponential_limit(logit, keep.cut_in(span)) {
            let granule = self.noise.granule(Domain::Token, self.draw, token, word);
            let score = logit - ln(granule.exponential(token, || token_word));
            keep.offer(Candidate { winner: Winner::new(score, token), logit });
        }
    }
}

/// The largest exponential, in steps of 2^-32, that lifts `logit` to a score of `cut`: at most 6.2% too large.
///
/// `2^y <= (1 + frac y) 2^floor(y)`, because `2^f` is convex on [0, 1]. The right side is the float with the bits
/// `(y + 127) 2^23`.
#[inline(always)]
fn exponential_limit(logit: f32, cut: f32) -> f32 {
    let y = (logit - cut + slack(cut)) * core::f32::consts::LOG2_E + 32.0;
    if y < 64.0 { f32::from_bits(((y.max(-1.0) + 127.0) * 8_388_608.0) as u32) * 1.000_1 } else { f32::INFINITY }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::granules::round_keys;
    use crate::simd::Plain;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn exponentials_above_the_limit_do_not_reach_the_cut(
            logit in -300f32..300.0, gap in prop_oneof![4 => -5f32..47.0, 1 => -2e-4f32..2e-4], above in 1f32..9.0,
        ) {
            let cut = logit + gap;
            let e = exponential_limit(logit, cut).next_up() * above * 2f32.powi(-32);
            prop_assert!(e == f32::INFINITY || logit - ln(e) < cut);
        }

        #[test]
        fn skipping_changes_nothing(
            seed: u64, spread in 0f32..30.0, shift in -100f32..100.0, blank in 0usize..70, spans in 1usize..20,
            floor in prop_oneof![Just(f32::NEG_INFINITY), 0f32..30.0],
        ) {
            let (noise, floor) = (Noise::new(seed, 5).unwrap(), shift + floor);
            let (mut fast, mut plain) = (Candidate::NONE, Candidate::NONE);
            for tile in 0..3 {
                let first = tile * (32 * SPAN) as u32;
                let mut logits = vec![[0f32; SPAN]; spans];
                for (i, l) in logits.as_flattened_mut().iter_mut().enumerate() {
                    let hash = (first as usize + i).wrapping_mul(2_654_435_761) % 1000;
                    *l = if i < blank { f32::NEG_INFINITY } else { shift + spread * hash as f32 / 1000.0 };
                }
                let largest = |logits: &[f32]| logits.iter().copied().fold(f32::NEG_INFINITY, f32::max);
                let mut tops: Vec<f32> = logits.iter().map(|span| largest(span)).collect();
                tops.resize(spans.next_multiple_of(BLOCKS), f32::NEG_INFINITY);
                let keys = &round_keys(&noise);
                let tile = Perturbed { noise: &noise, keys, draw: 3, first, spans: &logits, tops: &tops, floor };
                // SAFETY: plain Rust is always available.
                unsafe { tile.offer_to::<Plain>(&mut fast) };
                for (token, &logit) in (first..).zip(logits.as_flattened()) {
                    if logit > f32::NEG_INFINITY && logit >= floor {
                        let score = logit + noise.gumbel(Domain::Token, 3, token);
                        plain = plain.merge(Candidate { winner: Winner::new(score, token), logit });
                    }
                }
            }
            prop_assert_eq!(fast, plain);
        }
    }
}
