//! The logits of the rows: as language models have them, all equal, and all the best in one tile.

use crate::error::CommandError;
use crate::load::Tensor;
use crate::synthetic::{self, Logits, mix};
use flash_sampling::{DType, Matrix};
use std::io;

/// The kinds of rows.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    /// A few tokens far above a Gaussian bulk, which has 6 to 80 percent of the mass, by row.
    LlmLike,
    /// All logits equal: nothing can be left out.
    Flat,
    /// The 128 best tokens one after another, with 99 percent of the mass.
    OneTile,
}

/// Tokens that stand together.
const TOGETHER: usize = 128;

/// The logit of the best of them, and the step to the next.
const HEIGHT: (f32, f32) = (14.0, 0.01);

impl Kind {
    /// All kinds.
    pub const ALL: [Kind; 3] = [Kind::LlmLike, Kind::Flat, Kind::OneTile];

    /// The name that tables and records show.
    pub fn name(self) -> &'static str {
        match self {
            Kind::LlmLike => "LLM-like",
            Kind::Flat => "flat",
            Kind::OneTile => "best in one tile",
        }
    }

    /// Hidden states `[rows, hidden]` for a weight made by [`synthetic::weight`].
    ///
    /// # Errors
    /// When there is not that much memory.
    pub fn states(self, weight: Matrix<'_>, rows: usize, dtype: DType) -> Result<Tensor, CommandError> {
        let failed = |error: io::Error| CommandError::usage(format!("cannot make hidden states: {error}"));
        match self {
            Kind::LlmLike => synthetic::hidden(weight, rows, dtype, Logits::Peaked).map_err(failed),
            Kind::Flat => synthetic::states(weight.cols(), rows, dtype, |_, out| out.fill(0.0)).map_err(failed),
            Kind::OneTile => {
                let mut token = vec![0.0; weight.cols()];
                let lift = |r: usize, out: &mut [f32]| {
                    synthetic::bulk(r, out);
                    for i in 0..TOGETHER.min(weight.rows()) {
                        weight.row_to_f32(first(weight.rows()) + i, &mut token);
                        let height = HEIGHT.0 - HEIGHT.1 * i as f32;
                        out.iter_mut().zip(&token).for_each(|(h, w)| *h += height * w);
                    }
                };
                synthetic::states(weight.cols(), rows, dtype, lift).map_err(failed)
            }
        }
    }

    /// Logits `[vocab]` of row `r`, without a head.
    pub fn logits(self, vocab: usize, r: usize) -> Vec<f32> {
        if self == Kind::Flat {
            return vec![0.0; vocab];
        }
        let mut logits: Vec<f32> = (0..vocab).map(|i| synthetic::normal(mix(r as u64) ^ i as u64) * 2.0).collect();
        if self == Kind::OneTile {
            let first = first(vocab);
            for (i, logit) in logits[first..].iter_mut().take(TOGETHER).enumerate() {
                *logit = HEIGHT.0 - HEIGHT.1 * i as f32;
            }
        } else {
            for (i, height) in (0u64..).zip(synthetic::heights(r)) {
                logits[(mix(mix(r as u64) ^ mix(i)) % vocab as u64) as usize] = height;
            }
        }
        logits
    }
}

/// Where the tokens that stand together begin: with a tile of any size up to 256.
fn first(vocab: usize) -> usize {
    (vocab / 2 / 256 * 256).min(vocab.saturating_sub(TOGETHER))
}
