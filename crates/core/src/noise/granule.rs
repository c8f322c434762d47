//! Granules: groups of sixteen consecutive global token ids. A granule draws its smallest exponential first.
//!
//! The minimum of sixteen independent Exp(1) variables is Exp(16). The index of the minimum is uniform and independent
//! of the minimum. The excesses of the other variables over the minimum are independent Exp(1), by memorylessness (the
//! top-down construction of Maddison et al. 2014). So the granule's word draws the minimum and its index, the leader.
//! Each other token's own word draws an excess:
//!
//! ```text
//! word x of the granule:  leader L = x & 15,  u = x >> 4 (28 bits),  v = (u + 1/2) 2^-28,  m = -ln(1 - v) / 16
//! E(token) = m                          where token & 15 = L
//!          = m + E'(word of the token)  otherwise
//! gumbel   = -ln E
//! ```
//! No token of the granule has a Gumbel above `-ln m`, so one word can rule out sixteen tokens.

use super::log::ln;
use super::uniform::{TAIL_WORDS, u01_open, u01_open_coarse};
use crate::summary::mass_histogram::weight_below;

/// Tokens per granule.
pub const TOKENS: u32 = 16;

/// Returns the index of a token's granule.
#[inline(always)]
pub const fn of(token: u32) -> u32 {
    token / TOKENS
}

/// The leader and the minimum of a granule, from the granule's word.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Granule {
    /// The index in the granule of the token with the smallest exponential, below [`TOKENS`].
    pub leader: u32,
    /// The smallest exponential, in `[2^-65, 1.26]`.
    pub minimum: f32,
}

impl Granule {
    /// Maps a word to a granule.
    ///
    /// One word in 2^20 calls `refinement`, which returns 32 more bits.
    #[inline(always)]
    pub fn of_word(word: u32, refinement: impl FnOnce() -> u32) -> Granule {
        let minimum = u01_open::<28>(minimum_bits(word), refinement).exponential() * (1.0 / TOKENS as f32);
        Granule { leader: word % TOKENS, minimum }
    }

    /// Returns the exponential of a token of the granule, in `[2^-65, 24.2]`.
    ///
    /// `word` returns the token's own word. The leader does not call `word`.
    #[inline(always)]
    pub fn exponential(&self, token: u32, word: impl FnOnce() -> u32) -> f32 {
        if token % TOKENS == self.leader {
            self.minimum
        } else {
            self.minimum + u01_open_coarse::<32>(word()).exponential()
        }
    }

    /// Returns the leader's Gumbel.
    ///
    /// Rounding of the logarithm makes the Gumbel of another token at most 1.2e-5 larger.
    #[inline(always)]
    pub fn largest_gumbel(&self) -> f32 {
        -ln(self.minimum)
    }
}

/// Returns the 28 bits of a granule's word that draw the minimum.
///
/// `minimum >= minimum_bits 2^-32`, because `-ln(1 - v) >= v`.
#[inline(always)]
pub const fn minimum_bits(word: u32) -> u32 {
    word / TOKENS
}

/// Returns whether a token of the granule may have a Gumbel of at least `least`.
///
/// `false` is certain; `true` is not. The test takes no logarithm: a table in steps of 1/8 nat bounds `e^-least` from
/// above.
#[inline(always)]
pub fn may_reach(word: u32, least: f64) -> bool {
    // The factor is a margin for the error of a computed Gumbel, which is below 2^-16 nats.
    minimum_bits(word) < TAIL_WORDS
        || least.is_nan()
        || least <= 0.0
        || f64::from(minimum_bits(word)) * (1.0 - 1.0 / 65_536.0) <= 4_294_967_296.0 * weight_below(least)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn unused() -> u32 {
        panic!("this word is unused")
    }

    /// Returns the smallest exponential in float64, from the exact `v`.
    fn exact_minimum(word: u32, refinement: u32) -> f64 {
        let u = f64::from(word >> 4);
        let v = if u < 256.0 { u + (f64::from(refinement) + 0.5) * 2f64.powi(-32) } else { u + 0.5 };
        if u < 2f64.powi(27) {
            -(-v * 2f64.powi(-28)).ln_1p() / 16.0
        } else {
            -((2f64.powi(28) - v) * 2f64.powi(-28)).ln() / 16.0
        }
    }

    fn check(word: u32, refinement: u32, token_word: u32) {
        let granule = Granule::of_word(word, || refinement);
        let exact = exact_minimum(word, refinement);
        assert!((f64::from(granule.minimum) / exact - 1.0).abs() < 2.6e-7, "word {word}: {}", granule.minimum);
        assert_eq!(granule.exponential(16 * 7 + granule.leader, unused), granule.minimum);
        let other = granule.leader ^ 5;
        let e = granule.exponential(other, || token_word);
        let excess = -(-(f64::from(token_word) + 0.5) * 2f64.powi(-32)).ln_1p();
        assert!((f64::from(e) / (exact + excess) - 1.0).abs() < 3.2e-7, "words {word}, {token_word}: {e}");
        let (g, exact_g) = (f64::from(-ln(e)), -(exact + excess).ln());
        assert!((g - exact_g).abs() < 1.3e-7 * exact_g.abs() + 3.7e-7, "words {word}, {token_word}: {g}");
        assert!(g <= f64::from(granule.largest_gumbel()) + 1e-5);
    }

    #[test]
    fn the_map_is_accurate_on_a_stride() {
        let ends = (0..9000u32).chain(u32::MAX - 9000..=u32::MAX);
        for word in (0..=u32::MAX).step_by(9973).chain(ends) {
            let mixed = word.wrapping_mul(0x9e37_79b9);
            check(word, mixed, mixed.rotate_left(16) >> (word % 32));
        }
    }

    #[test]
    #[ignore = "exhaustive: all 2^32 words, minutes; the stride above runs in CI"]
    fn the_map_is_accurate_on_every_word() {
        for word in 0..=u32::MAX {
            check(word, word.wrapping_mul(0x9e37_79b9), word.wrapping_mul(0x85eb_ca6b));
        }
    }

    #[test]
    fn the_ends_are_open() {
        let smallest = Granule::of_word(3, || 0);
        assert_eq!((smallest.leader, smallest.minimum), (3, 2f32.powi(-65)));
        assert!((smallest.largest_gumbel() - crate::noise::uniform::GUMBEL_MAX).abs() < 1e-5);
        let largest = Granule::of_word(!0, unused);
        assert!(largest.minimum < 1.257 && -ln(largest.exponential(0, || !0)) > -3.2);
        // The map is continuous from the refined tail to the body, and from the lower to the upper half.
        let at = |u: u32| f64::from(Granule::of_word(u << 4, || !0).minimum);
        assert!(at(255) < at(256) && at(256) - at(255) < 2f64.powi(-32));
        assert!(at((1 << 27) - 1) <= at(1 << 27) && at(1 << 27) - at((1 << 27) - 1) < 2f64.powi(-24));
    }

    #[test]
    fn a_granule_that_may_not_reach_a_gumbel_has_no_token_that_does() {
        let mut spared = 0;
        for word in (0..=u32::MAX).step_by(9973).chain(0..20_000) {
            let g = f64::from(Granule::of_word(word, || !word).largest_gumbel());
            // Cutoffs at the largest Gumbel, just below, and far below.
            assert!(may_reach(word, g) && may_reach(word, g - 1e-6) && may_reach(word, g - 5.0), "word {word}");
            spared += usize::from(!may_reach(word, g + 1.0));
        }
        // The bound is tight enough to skip granules: its gap is 1/8 nat, plus the gap between `v` and `-ln(1 - v)`.
        assert!(spared > 200_000, "{spared}");
        assert!(may_reach(!0, f64::NAN) && may_reach(!0, -1.0) && !may_reach(!0, 100.0));
    }
}
