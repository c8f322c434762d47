//! Rows and numbers of several tests.

use flash_sampling_core::Noise;
use flash_sampling_core::backend::{Row, RowTransform};

/// Returns number `i` of a normal distribution, from uniform words.
pub(crate) fn normal(word: impl Fn(u32) -> u32, i: u32) -> f32 {
    let unit = |i| (f64::from(word(i)) + 0.5) * 2f64.powi(-32);
    ((-2.0 * unit(2 * i).ln()).sqrt() * (core::f64::consts::TAU * unit(2 * i + 1)).cos()) as f32
}

/// A row with one draw and nothing else.
pub(crate) fn row(noise: Noise, greedy: bool, transform: RowTransform<'_>, draw: u32) -> Row<'_> {
    Row {
        noise,
        greedy,
        transform,
        first_draw: draw,
        draws: 1,
        without_replacement: false,
        logprobs: None,
        raw_logprobs: None,
        logprob_token_ids: &[],
        ranks: false,
        filters: None,
        kept: false,
    }
}
