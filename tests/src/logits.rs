//! Rows of logits with simple and difficult shapes.

use crate::data::{normal, u01_open};
use flash_sampling_core::reference::log_mass;

/// The shape of a row of logits.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum LogitShape {
    /// Equal logits.
    Flat,
    /// Standard normal logits.
    Gaussian,
    /// One token has nearly all the mass.
    Peaked,
    /// A few logits far above a Gaussian bulk.
    LlmLike,
    /// A power law: half of the mass is in rare tokens.
    TailHeavy,
}

impl LogitShape {
    /// All shapes.
    pub const ALL: [LogitShape; 5] =
        [LogitShape::Flat, LogitShape::Gaussian, LogitShape::Peaked, LogitShape::LlmLike, LogitShape::TailHeavy];

    /// Returns `vocab` logits in nats. The likely tokens are spread over the vocabulary, both ends included.
    pub fn logits(self, vocab: usize, seed: u64) -> Vec<f32> {
        let rank = |i: usize| {
            // Rank 0 at the end, rank 1 at the start, the others by a hash.
            let u = u01_open(seed ^ 0x5bd1, i as u64);
            if i + 1 == vocab {
                0.0
            } else if i == 0 {
                1.0
            } else {
                2.0 + u * vocab as f64
            }
        };
        let logit = |i: usize| match self {
            LogitShape::Flat => 0.25,
            LogitShape::Gaussian => normal(seed, i as u64),
            LogitShape::Peaked => normal(seed, i as u64) + if i == vocab / 2 { 6.0 + (vocab as f64).ln() } else { 0.0 },
            LogitShape::LlmLike => match rank(i) {
                r if r < 2.0 + 12.0 => 0.7 * (vocab as f64).ln() + 3.0 - r / 3.0,
                _ => 2.0 * normal(seed, i as u64),
            },
            LogitShape::TailHeavy => -(1.0 + rank(i)).ln(),
        };
        (0..vocab).map(|i| logit(i) as f32).collect()
    }
}

/// The distance of tokens in [`spread`]. Twelve tokens cover two groups of 512, and several tiles.
pub const TOKEN_STRIDE: u32 = 53;

/// Gives the logits to every [`TOKEN_STRIDE`]-th token, and -inf to all tokens between them.
pub fn spread(logits: &[f32]) -> Vec<f32> {
    let mut out = vec![f32::NEG_INFINITY; logits.len() * TOKEN_STRIDE as usize];
    out.iter_mut().step_by(TOKEN_STRIDE as usize).zip(logits).for_each(|(to, &logit)| *to = logit);
    out
}

/// Returns the index of a token's logit in the argument of [`spread`], or `usize::MAX` for a token between them.
pub fn spread_index(token: u32) -> usize {
    if token.is_multiple_of(TOKEN_STRIDE) { (token / TOKEN_STRIDE) as usize } else { usize::MAX }
}

/// Returns `ln P(token)` of the softmax, in float64.
pub fn log_softmax(logits: &[f32]) -> Vec<f64> {
    let log_z = log_mass(logits);
    logits.iter().map(|&l| f64::from(l) - log_z).collect()
}

/// Returns `P(token)` of the softmax, in float64.
pub fn softmax(logits: &[f32]) -> Vec<f64> {
    log_softmax(logits).into_iter().map(f64::exp).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_shapes_are_what_they_say() {
        let law = |shape: LogitShape| {
            let mut p = softmax(&shape.logits(151_936, 1));
            p.sort_by(|a, b| b.total_cmp(a));
            p
        };
        assert!(law(LogitShape::Peaked)[0] > 0.99);
        let llm = law(LogitShape::LlmLike);
        assert!(llm[..14].iter().sum::<f64>() > 0.2 && llm[151_935] < 1e-8);
        let heavy = law(LogitShape::TailHeavy);
        assert!(heavy[1000..].iter().sum::<f64>() > 0.25 && heavy[0] > 0.02);
    }
}
