//! Wrong maps from words to exponentials: maps of other programs, and mistakes with granules.

use flash_sampling_conformance::noise_map::{NoiseMap, Part, measure_granules, measure_words};
use flash_sampling_core::noise::granule::{self, Granule, TOKENS};
use flash_sampling_core::noise::uniform::{exponential, u01_open_coarse};
use flash_sampling_core::{Domain, Noise};

/// A wrong map.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum WrongMap {
    /// Triton's `tl.rand` in the paper's kernel: 31 bits times 2^-31 in float32, then `-ln(-ln u)`. Winners have u
    /// close to 1, where float32 values are 2^-24 apart.
    TritonRand,
    /// `(x + 1) / (2^32 + 1)` in float32, which rounds to u = 1 for the 128 largest words and gives infinite noise.
    RoundsToOne,
    /// Uniforms clipped to `[1e-7, 0.999)`.
    Clipped,
    /// The right uniforms, but an inner logarithm with an absolute error of 2^-22 of log2, like fast approximations
    /// near 1.
    FastInnerLog,
    /// Granules without refinement of the smallest words.
    NoRefinement,
    /// Granules with refinement of the 16 smallest minima instead of 256.
    SixteenRefined,
    /// The uniform of the minimum contains the bits of the leader.
    LeaderInMinimum,
    /// The minimum of one token instead of sixteen.
    MinimumOfOne,
    /// One excess for all tokens except the leader.
    OneExcess,
    /// The leader of a token depends on the token's own word.
    OwnLeader,
}

fn exponential_of(u: f32) -> f32 {
    -u.ln()
}

impl WrongMap {
    /// Returns the exponential of a word for maps without granules, whose larger words have smaller exponentials.
    fn plain(self, word: u32) -> Option<f32> {
        Some(match self {
            WrongMap::TritonRand => exponential_of((word >> 1) as f32 * 4.656_612_7e-10),
            WrongMap::RoundsToOne => exponential_of((word as f32 + 1.0) / 4_294_967_297.0),
            WrongMap::Clipped => exponential_of(1e-7 + (word >> 8) as f32 / 16_777_216.0 * 0.999),
            WrongMap::FastInnerLog => {
                let u = 1.0 - (f64::from(!word) + 0.5) * 2f64.powi(-32);
                let log2 = (u.log2() * 2f64.powi(22)).round() * 2f64.powi(-22);
                (-log2 * core::f64::consts::LN_2).max(2f64.powi(-30)) as f32
            }
            _ => return None,
        })
    }

    fn granule(self, word: u32, refinement: u32) -> Granule {
        let right = Granule::of_word(word, || refinement);
        let minimum = match self {
            WrongMap::NoRefinement => Granule::of_word(word, || 1 << 31).minimum,
            WrongMap::SixteenRefined if word / TOKENS >= 16 => Granule::of_word(word, || 1 << 31).minimum,
            WrongMap::LeaderInMinimum => exponential(word, || refinement) / TOKENS as f32,
            WrongMap::MinimumOfOne => right.minimum * TOKENS as f32,
            _ => right.minimum,
        };
        Granule { minimum, ..right }
    }
}

impl NoiseMap for WrongMap {
    fn name(&self) -> String {
        format!("{self:?}")
    }

    fn exponential(&self, noise: &Noise, draw: u32, token: u32) -> f32 {
        let own = noise.word(Domain::Token, draw, token);
        let (index, first) = (granule::of(token), token / TOKENS * TOKENS);
        self.plain(own).unwrap_or_else(|| {
            let refinement = noise.refinement(Domain::Granule, draw, index);
            let granule = self.granule(noise.word(Domain::Granule, draw, index), refinement);
            match self {
                WrongMap::OneExcess => granule.exponential(token, || noise.word(Domain::Token, draw, first)),
                WrongMap::OwnLeader => Granule { leader: own % TOKENS, ..granule }.exponential(token, || own),
                _ => granule.exponential(token, || own),
            }
        })
    }

    fn any_below(&self, noise: &Noise, draw: u32, block: u32, limit: f32) -> bool {
        // Only words near the end can have an exponential below the limit.
        let near = |word: u32| !word as f32 <= limit * 4_294_967_296.0 * 1.01 + 8192.0;
        (16 * block..16 * block + 16).any(|block| {
            let words = noise.words(Domain::Token, draw, block);
            words.into_iter().any(|word| near(word) && self.plain(word).is_some_and(|e| e < limit))
        })
    }

    fn measure(&self, r: f64) -> Vec<Part> {
        match self.plain(0) {
            Some(_) => measure_words(r, |word, _| self.plain(!word).unwrap_or(0.0)),
            None => measure_granules(
                r,
                |word, refinement| self.granule(word, refinement),
                |word| u01_open_coarse::<32>(word).exponential(),
            ),
        }
    }
}
