//! The map from a word to a uniform, an exponential and a Gumbel.
//!
//! The winner of an argmax has a *small* exponential, so the map has its finest resolution there. For a word `x` of
//! `BITS` bits: `v = (x + 1/2) 2^-BITS`, `E = -ln(1 - v)`, `g = -ln E`, with two guards.
//!
//! 1. `v` must stay below 1, but near `x = 2^BITS` a float32 rounds up to 1. So the upper half uses the integer
//!    complement: `1 - v = (!x + 1/2) 2^-BITS`, with the resolution of the lower half.
//! 2. A word below [`TAIL_WORDS`] gets 32 more bits, so that the law is accurate far below `2^-BITS`.

use super::log::{ln, neg_ln_1m};

/// Words below this value get a refinement word.
pub const TAIL_WORDS: u32 = 256;

/// The largest Gumbel. Both a group's word 0 and a granule's word 0 give the exponential 2^-65 with refinement 0:
/// g = 65 ln 2 = 45.05.
pub const GUMBEL_MAX: f32 = 45.054_57;

const fn scale<const BITS: u32>() -> f32 {
    1.0 / (1u64 << BITS) as f32
}

/// A uniform in the open interval (0, 1), stored as its distance from the nearer end.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum U01 {
    /// `v` in `(0, 1/2]`.
    Low(f32),
    /// `1 - v` in `(0, 1/2]`.
    High(f32),
}

impl U01 {
    /// The uniform as a float64.
    pub fn value(self) -> f64 {
        match self {
            U01::Low(v) => f64::from(v),
            U01::High(w) => 1.0 - f64::from(w),
        }
    }

    /// The standard exponential `-ln(1 - v)`.
    #[inline(always)]
    pub fn exponential(self) -> f32 {
        match self {
            U01::Low(v) => neg_ln_1m(v),
            U01::High(w) => -ln(w),
        }
    }
}

/// The open uniform of a word below `2^BITS`. Words below [`TAIL_WORDS`] call `refinement`, which returns 32 more bits.
#[inline(always)]
pub fn u01_open<const BITS: u32>(word: u32, refinement: impl FnOnce() -> u32) -> U01 {
    if word < TAIL_WORDS {
        let fraction = refinement() as f32 + 0.5;
        U01::Low(fraction.mul_add(scale::<32>(), word as f32) * scale::<BITS>())
    } else {
        u01_open_coarse::<BITS>(word)
    }
}

/// The open uniform of a word below `2^BITS` without refinement.
#[inline(always)]
pub fn u01_open_coarse<const BITS: u32>(word: u32) -> U01 {
    let complement = word ^ (u32::MAX >> (32 - BITS));
    if word < complement {
        U01::Low((word as f32 + 0.5) * scale::<BITS>())
    } else {
        U01::High((complement as f32 + 0.5) * scale::<BITS>())
    }
}

/// The standard exponential of a 32-bit word, in `[2^-65, 22.9]`.
#[inline(always)]
pub fn exponential(word: u32, refinement: impl FnOnce() -> u32) -> f32 {
    u01_open::<32>(word, refinement).exponential()
}

/// The standard Gumbel of a 32-bit word, in `[-3.2, 45.1]`, for groups and shards. Tokens use the map of
/// [`granule`](super::granule).
#[inline(always)]
pub fn gumbel(word: u32, refinement: impl FnOnce() -> u32) -> f32 {
    -ln(exponential(word, refinement))
}

/// A uniform in (0, 1) with 64 bits, for comparisons with a probability. The error of `P(coin < p) = p` is at most the
/// larger of 2^-64 absolute and 2^-53 relative.
pub fn coin_open(words: [u32; 2]) -> f64 {
    let bits = u64::from(words[0]) << 32 | u64::from(words[1]);
    // From 2^53 up, rounding drops the half, and the largest words round to 1: the limit keeps the coin below 1.
    ((bits as f64 + 0.5) * 2f64.powi(-64)).min(1.0 - f64::EPSILON / 2.0)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn unused() -> u32 {
        panic!("this word needs no refinement")
    }

    /// The map in float64, from the exact `v`.
    fn exact_exponential(word: u32, refinement: u32) -> f64 {
        if word < TAIL_WORDS {
            -(-((f64::from(refinement) + 0.5) * 2f64.powi(-32) + f64::from(word)) * 2f64.powi(-32)).ln_1p()
        } else if word < 1 << 31 {
            -(-(f64::from(word) + 0.5) * 2f64.powi(-32)).ln_1p()
        } else {
            -((f64::from(!word) + 0.5) * 2f64.powi(-32)).ln()
        }
    }

    fn check(word: u32, refinement: u32) {
        let exact = exact_exponential(word, refinement);
        let e = exponential(word, || refinement);
        let g = gumbel(word, || refinement);
        assert!(e > 0.0 && e.is_finite() && g.is_finite(), "word {word}");
        assert!((f64::from(e) / exact - 1.0).abs() < 2.6e-7, "word {word}: E {e} against {exact}");
        let exact_g = -exact.ln();
        assert!(
            (f64::from(g) - exact_g).abs() < 1.3e-7 * exact_g.abs() + 3.0e-7,
            "word {word}: g {g} against {exact_g}"
        );
    }

    #[test]
    fn the_ends_are_open() {
        assert_eq!(u01_open::<32>(0, || 0), U01::Low(2f32.powi(-65)));
        assert_eq!(u01_open::<32>(!0, unused), U01::High(2f32.powi(-33)));
        assert_eq!(u01_open::<32>((1 << 31) - 1, unused), U01::Low(0.5));
        assert_eq!(u01_open::<32>(1 << 31, unused), U01::High(0.5));
        assert!((gumbel(0, || 0) - GUMBEL_MAX).abs() < 1e-5);
        assert!(gumbel(!0, unused) > -3.2);
        assert!(coin_open([0, 0]) > 0.0 && coin_open([!0, !0]) < 1.0);
    }

    #[test]
    fn the_refined_tail_meets_the_body() {
        // The last refined word with the last refinement is just below the first plain word.
        let last = u01_open::<32>(TAIL_WORDS - 1, || !0).value();
        let first = u01_open::<32>(TAIL_WORDS, unused).value();
        assert!(last < first && first - last < 2f64.powi(-32));
    }

    #[test]
    fn the_map_is_accurate_on_a_stride() {
        for word in (0..=u32::MAX).step_by(9973).chain(0..2000).chain(u32::MAX - 2000..=u32::MAX) {
            check(word, word.wrapping_mul(0x9e37_79b9));
        }
    }

    #[test]
    fn the_map_is_monotone_on_a_stride() {
        let mut last = f32::INFINITY;
        for word in (TAIL_WORDS..=u32::MAX).step_by(4099) {
            let g = gumbel(word, unused);
            assert!(g <= last, "word {word}");
            last = g;
        }
    }

    #[test]
    #[ignore = "exhaustive: all 2^32 words, minutes; the stride above runs in CI"]
    fn the_map_is_accurate_on_every_word() {
        for word in 0..=u32::MAX {
            check(word, word.wrapping_mul(0x9e37_79b9));
        }
    }
}
