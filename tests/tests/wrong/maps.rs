//! Maps from words to Gumbels that are in use elsewhere, and wrong in the tail.

use flash_sampling_conformance::noise_map::NoiseMap;

/// A wrong map.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum WrongMap {
    /// Triton's `tl.rand`, as the paper's kernel uses it: 31 bits times 2^-31 in float32, then `-ln(-ln u)`. Close to
    /// u = 1, where the winners are, float32 steps by 2^-24.
    TritonRand,
    /// The right uniform, but an inner logarithm with an absolute error of 2^-22 of log2, as fast approximations have
    /// near 1.
    FastInnerLog,
    /// `(x + 1) / (2^32 + 1)` in float32: rounds to u = 1 for the 128 largest words, and to infinite noise.
    RoundsToOne,
    /// Uniforms clipped to `[1e-7, 0.999)`.
    Clipped,
    /// The right map without refinement of the smallest words.
    NoRefinement,
}

fn gumbel_of(u: f32) -> f32 {
    -(-u.ln()).ln()
}

impl NoiseMap for WrongMap {
    fn name(&self) -> String {
        format!("{self:?}")
    }

    fn gumbel(&self, word: u32, _: u32) -> f32 {
        match self {
            WrongMap::TritonRand => gumbel_of((word >> 1) as f32 * 4.656_612_7e-10),
            WrongMap::FastInnerLog => {
                let u = 1.0 - (f64::from(word) + 0.5) * 2f64.powi(-32);
                let log2 = (u.log2() * 2f64.powi(22)).round() * 2f64.powi(-22);
                -((-log2 * core::f64::consts::LN_2).max(2f64.powi(-30)).ln()) as f32
            }
            WrongMap::RoundsToOne => gumbel_of((word as f32 + 1.0) / 4_294_967_297.0),
            WrongMap::Clipped => gumbel_of(1e-7 + (word >> 8) as f32 / 16_777_216.0 * 0.999),
            WrongMap::NoRefinement => flash_sampling_core::noise::uniform::gumbel(word, || 0x8000_0000),
        }
    }

    fn rises(&self) -> bool {
        !matches!(self, WrongMap::FastInnerLog | WrongMap::NoRefinement)
    }
}
