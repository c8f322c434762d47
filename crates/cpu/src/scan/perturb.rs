//! The draw inside a tile: finds candidates that can reach the score cutoff, and computes their exact scores.
//!
//! The plain version computes a Gumbel for every token and keeps the best score:
//! ```text
//! for each token i of the tile: best = merge(best, (logit[i] + gumbel(i), i))
//! ```
//! This version has the same result, bit for bit, because it skips only tokens with a score below the cutoff:
//! 1. **One word rules out sixteen tokens.** If a granule's word has the minimum bits `u`, no token of the granule has
//!    an exponential below `u 2^-32`, and no Gumbel is above `-ln(u 2^-32)`. So a token reaches a score cutoff `cut`
//!    only if the token's logit is at least the granule's threshold, `cut + ln(u 2^-32)`. In most spans of four
//!    granules, the largest logit is below all four thresholds.
//!    A span is *open* if its largest logit reaches at least one threshold. The scan first finds the open spans of a
//!    tile, without a branch per span, because a mispredicted branch would delay the computation of the next words.
//!    Then the scan finds the tokens of open spans that reach their thresholds.
//! 2. **A candidate passes two bounds.** A logit that reaches the threshold of its granule gets the token's own word.
//!    The logarithms follow only if the bound `E >= (u + word) 2^-32` allows a score of `cut`.
//! 3. **The first cutoff** is the score of the token with the largest logit of the first tile.
//! 4. **A frontier** keeps several tokens. The cutoff of a frontier is lower for larger logits ([`Keep::cut_in`]).

use crate::scan::granules::{BLOCKS, Granules, RoundKeys, Threshold, WordsAhead, slack};
use crate::simd::{SPAN, Vector};
use core::mem::MaybeUninit;
use core::ops::Range;
use flash_sampling_core::backend::{Candidate, TopList, Winner};
use flash_sampling_core::noise::granule;
use flash_sampling_core::noise::log::ln;
use flash_sampling_core::{Domain, Noise};

/// A collector of the candidates of a draw.
pub(crate) trait Keep {
    /// Returns the score cutoff for any logit; -inf if there is no cutoff yet.
    fn cut(&self) -> f32;

    /// Returns the score cutoff for tokens of these spans of the tile.
    #[inline(always)]
    fn cut_in(&self, _spans: Range<usize>) -> f32 {
        self.cut()
    }

    /// Adds a candidate. A scan may offer the same candidate twice.
    fn offer(&mut self, candidate: Candidate);

    /// Adds the first candidate of these spans, and returns the score cutoff for their tokens.
    #[inline(always)]
    fn offer_first(&mut self, candidate: Candidate, _spans: Range<usize>) -> f32 {
        self.offer(candidate);
        self.cut()
    }
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

/// The maximum number of spans of a tile. A 64-bit mask has one bit per span.
pub(crate) const MAX_SPANS: usize = u64::BITS as usize;

/// Returns the larger of two numbers that are not NaN.
#[inline(always)]
fn larger(a: f32, b: f32) -> f32 {
    if a > b { a } else { b }
}

/// One tile of one draw.
#[derive(Clone, Copy)]
pub(crate) struct Perturbed<'a> {
    pub(crate) noise: &'a Noise,
    /// The Philox round keys of `noise`.
    pub(crate) keys: &'a RoundKeys,
    pub(crate) draw: u32,
    /// The first token, a multiple of 64.
    pub(crate) first: u32,
    /// `spans[s][i]` is the transformed logit of token `first + 64 s + i`; -inf if the tile has no such token.
    pub(crate) spans: &'a [[f32; SPAN]],
    /// The largest logit of each span, padded with -inf to a multiple of [`BLOCKS`].
    pub(crate) tops: &'a [f32],
    /// The scan skips logits below `floor`.
    pub(crate) floor: f32,
}

impl Perturbed<'_> {
    /// Offers every token that can reach the cutoff.
    ///
    /// `ahead` is a cache of words of this draw. Tiles of at most [`BLOCKS`] spans, such as tiles of a head, use it.
    ///
    /// # Safety
    /// The instruction set of `V` is available.
    #[inline(always)]
    pub(crate) unsafe fn offer_to<V: Vector, K: Keep>(&self, ahead: Option<&mut WordsAhead>, keep: &mut K) {
        let place_of = |logits: &[f32], top| logits.iter().position(|&logit| logit == top).unwrap_or(0);
        let mut first_cut = keep.cut_in(0..self.spans.len());
        if first_cut == f32::NEG_INFINITY {
            let top = self.tops.iter().copied().fold(f32::NEG_INFINITY, f32::max);
            if top == f32::NEG_INFINITY || top < self.floor {
                return;
            }
            let s = place_of(self.tops, top);
            let token = self.first + (s * SPAN + place_of(&self.spans[s], top)) as u32;
            let score = top + self.noise.gumbel(Domain::Token, self.draw, token);
            first_cut =
                keep.offer_first(Candidate { winner: Winner::new(score, token), logit: top }, 0..self.spans.len());
        }
        // With this floor, a span without finite logits is never open.
        let floor = larger(self.floor, f32::MIN);
        let tops = self.tops.as_chunks::<BLOCKS>().0;
        let threshold_of = |keep: &K, from| {
            let cut = keep.cut_in(from..self.spans.len().min(from + BLOCKS));
            Threshold::of(larger(cut, first_cut), floor)
        };
        // One Philox block has the words of the four granules of a span.
        let first_block = self.first / SPAN as u32;
        let counter_of = |block| self.noise.counter(Domain::Granule.code(), self.draw, block);
        let mut batches = [const { MaybeUninit::<Granules>::uninit() }; MAX_SPANS / BLOCKS];
        let mut words_ahead: &[[u32; 4]] = &[];
        let mut open = 0u64;
        if let (Some(ahead), [tops]) = (ahead, tops) {
            let counter = counter_of(first_block);
            // SAFETY: by this function's contract.
            let (least, words) = unsafe { ahead.at::<V>(first_block, self.spans.len(), self.keys, counter) };
            // SAFETY: by this function's contract.
            open = u64::from(unsafe { V::open(least, threshold_of(keep, 0), tops) });
            words_ahead = words;
        } else {
            // Computing two batches at once hides the latency of the multiplications.
            for (k, pair) in tops.chunks(2).enumerate() {
                let counter = counter_of(first_block + (2 * k * BLOCKS) as u32);
                // SAFETY: by this function's contract.
                let two: [Granules; 2] = unsafe {
                    if let [_, _] = pair {
                        V::granules(counter, self.keys)
                    } else {
                        let [one] = V::granules(counter, self.keys);
                        [one, one]
                    }
                };
                for ((granules, tops), n) in two.into_iter().zip(pair).zip(2 * k..) {
                    let threshold = threshold_of(keep, n * BLOCKS);
                    // SAFETY: by this function's contract.
                    open |= u64::from(unsafe { V::open(&granules.least, threshold, tops) }) << (n * BLOCKS);
                    batches[n].write(granules);
                }
            }
        }
        if open == 0 {
            return;
        }
        let words_of = |s: usize| match words_ahead {
            // SAFETY: if `words_ahead` is empty, the loop above has written the batch of every span.
            [] => unsafe { batches[s / BLOCKS].assume_init_ref() }.words[s % BLOCKS],
            words => words[s],
        };
        // Each candidate may raise the cutoff, and the cutoff of a span may exceed the cutoff of its batch. So the
        // thresholds of a span are computed from its own cutoff. A threshold shifted from a lower cutoff would keep
        // the rounding error of that cutoff: several nats for a cutoff of -1e7.
        let cut_of = |keep: &K, s| larger(keep.cut_in(s..s + 1), first_cut);
        let mut hits = [0; MAX_SPANS];
        // Comparing several spans before their candidates are scored avoids mispredicted branches. Without a cutoff,
        // every token is a candidate, so the scores of one span should give a cutoff for the next span.
        let at_once = if first_cut == f32::NEG_INFINITY { 1 } else { BLOCKS };
        while open != 0 {
            let mut hit = 0u64;
            for _ in 0..at_once {
                let s = open.trailing_zeros() as usize;
                open &= open - 1;
                let threshold = Threshold::of(cut_of(keep, s), floor);
                let thresholds = words_of(s).map(|word| threshold.of_word(word));
                // SAFETY: by this function's contract.
                hits[s] = unsafe { V::at_least(&self.spans[s], thresholds) };
                hit |= u64::from(hits[s] != 0) << s;
                if open == 0 {
                    break;
                }
            }
            while hit != 0 {
                let s = hit.trailing_zeros() as usize;
                hit &= hit - 1;
                let words = words_of(s);
                while hits[s] != 0 {
                    let i = hits[s].trailing_zeros();
                    hits[s] &= hits[s] - 1;
                    let token = self.first + (s * SPAN) as u32 + i;
                    let word = words[(i / granule::TOKENS) as usize];
                    self.score(token, self.spans[s][i as usize], word, cut_of(keep, s), keep);
                }
            }
        }
    }

    /// Offers a token if it can reach `cut`. `word` is the word of the token's granule.
    #[inline(always)]
    fn score(&self, token: u32, logit: f32, word: u32, cut: f32, keep: &mut impl Keep) {
        // The minimum and the excess are each at least their bits times 2^-32.
        let (minimum, limit) = (granule::minimum_bits(word) as f32, exponential_limit(logit, cut));
        if minimum > limit {
            return;
        }
        let is_leader = token % granule::TOKENS == word % granule::TOKENS;
        let token_word = if is_leader { 0 } else { self.noise.word(Domain::Token, self.draw, token) };
        if minimum + token_word as f32 <= limit {
            let granule = self.noise.granule(Domain::Token, self.draw, token, word);
            let score = logit - ln(granule.exponential(token, || token_word));
            if score >= cut {
                keep.offer(Candidate { winner: Winner::new(score, token), logit });
            }
        }
    }
}

/// Returns the largest exponential, in steps of 2^-32, at which `logit` scores `cut`.
///
/// The result is never too small, and at most 6.2% too large.
///
/// `2^y <= (1 + frac y) 2^floor(y)`, because `2^f` is convex on [0, 1]. The bit pattern of the right side as a float is
/// `(y + 127) 2^23`.
#[inline(always)]
fn exponential_limit(logit: f32, cut: f32) -> f32 {
    let y = (logit - cut + slack(cut)) * core::f32::consts::LOG2_E + 32.0;
    if y < 64.0 { f32::from_bits(((y.max(-1.0) + 127.0) * 8_388_608.0) as u32) * 1.000_1 } else { f32::INFINITY }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::scan::granules::round_keys;
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
            seed: u64, spread in 0f32..30.0, shift in -100f32..100.0, spans in prop_oneof![1..=BLOCKS, 1..=MAX_SPANS],
            blank in prop_oneof![0usize..70, 500usize..900],
            low in prop::sample::select(&[f32::NEG_INFINITY, f32::MIN, -1e9, -1e7, -65504.0, -1e4][..]),
            floor in prop_oneof![Just(f32::NEG_INFINITY), 0f32..30.0],
        ) {
            let (noise, floor) = (Noise::new(seed, 5).unwrap(), shift + floor);
            let (mut fast, mut plain, mut ahead) = (Candidate::NONE, Candidate::NONE, WordsAhead::NONE);
            let [mut fast_list, mut plain_list] = [TopList::new(3, 0.0), TopList::new(3, 0.0)];
            for tile in 0..5 {
                let first = (tile * spans * SPAN) as u32;
                let mut logits = vec![[0f32; SPAN]; spans];
                for (i, l) in logits.as_flattened_mut().iter_mut().enumerate() {
                    let hash = (first as usize + i).wrapping_mul(2_654_435_761) % 1000;
                    *l = if i < blank { low } else { shift + spread * hash as f32 / 1000.0 };
                }
                let largest = |logits: &[f32]| logits.iter().copied().fold(f32::NEG_INFINITY, f32::max);
                let mut tops: Vec<f32> = logits.iter().map(|span| largest(span)).collect();
                tops.resize(spans.next_multiple_of(BLOCKS), f32::NEG_INFINITY);
                let keys = &round_keys(&noise);
                let tile = Perturbed { noise: &noise, keys, draw: 3, first, spans: &logits, tops: &tops, floor };
                // SAFETY: plain Rust is always available.
                unsafe {
                    tile.offer_to::<Plain, _>(Some(&mut ahead), &mut fast);
                    tile.offer_to::<Plain, _>(None, &mut fast_list);
                }
                for (token, &logit) in (first..).zip(logits.as_flattened()) {
                    if logit > f32::NEG_INFINITY && logit >= floor {
                        let score = logit + noise.gumbel(Domain::Token, 3, token);
                        let candidate = Candidate { winner: Winner::new(score, token), logit };
                        plain = plain.merge(candidate);
                        plain_list.push(candidate);
                    }
                }
            }
            prop_assert_eq!(fast, plain);
            prop_assert_eq!(fast_list.as_slice(), plain_list.as_slice());
        }
    }
}
