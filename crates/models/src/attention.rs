//! Attention of one query head over the tokens of a sequence, with a fixed order of all sums.

use crate::cache::KeyValues;

/// The number of partial sums of a dot product. The number is the same on every processor, and so is the order of
/// additions. The partial sums fit into vector registers.
const LANES: usize = 16;

/// The place of a head's keys and values in the cache, for one query.
#[derive(Clone, Copy, Debug)]
pub(crate) struct View {
    /// The number of elements from one token to the next.
    pub(crate) width: usize,
    /// The first element of the head, within a token.
    pub(crate) at: usize,
    /// The first token that the query attends to.
    pub(crate) first: usize,
    /// The token of the query, which is the last token that the query attends to.
    pub(crate) last: usize,
}

/// The map from dot products to scores.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Scores {
    /// The factor of the dot products.
    pub(crate) scale: f32,
    /// The cap of the scores, which become `cap * tanh(score / cap)`; `None` for no cap.
    pub(crate) cap: Option<f32>,
}

impl Scores {
    fn of(self, dot: f32) -> f32 {
        let score = self.scale * dot;
        self.cap.map_or(score, |cap| cap * (score / cap).tanh())
    }
}

fn dot(a: &[f32], b: &[f32]) -> f32 {
    let mut sums = [0.0f32; LANES];
    let (a_blocks, a_rest) = a.as_chunks::<LANES>();
    let (b_blocks, b_rest) = b.as_chunks::<LANES>();
    for (a, b) in a_blocks.iter().zip(b_blocks) {
        for ((sum, a), b) in sums.iter_mut().zip(a).zip(b) {
            *sum += a * b;
        }
    }
    for ((sum, a), b) in sums.iter_mut().zip(a_rest).zip(b_rest) {
        *sum += a * b;
    }
    sums.iter().sum()
}

/// Writes the sum of the values, weighted by the softmax of the scores, to `out [head_dim]`. `scratch` is memory for
/// the scores.
pub(crate) fn attend(
    query: &[f32],
    cache: &KeyValues,
    view: View,
    scores: Scores,
    scratch: &mut Vec<f32>,
    out: &mut [f32],
) {
    let head = |data: &'_ [f32], token: usize| -> core::ops::Range<usize> {
        let from = token * view.width + view.at;
        debug_assert!(from + query.len() <= data.len());
        from..from + query.len()
    };
    let tokens = view.first..=view.last;
    scratch.clear();
    scratch.extend(tokens.clone().map(|token| scores.of(dot(query, &cache.keys[head(&cache.keys, token)]))));
    let largest = scratch.iter().copied().fold(f32::NEG_INFINITY, f32::max);
    let mut total = 0.0;
    out.fill(0.0);
    for (token, score) in tokens.zip(scratch.iter()) {
        let weight = (score - largest).exp();
        total += weight;
        for (out, value) in out.iter_mut().zip(&cache.values[head(&cache.values, token)]) {
            *out += weight * value;
        }
    }
    out.iter_mut().for_each(|out| *out /= total);
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn it_is_the_softmax_of_the_scores_over_the_values() {
        // Two heads of width 18, and four tokens. The query attends to the second and the third token.
        let (width, at, dim) = (36, 18, 18);
        let value = |i: usize| ((i * 37 + 11) % 101) as f32 / 50.0 - 1.0;
        let cache = KeyValues {
            keys: (0..4 * width).map(value).collect(),
            values: (0..4 * width).map(|i| value(i + 1000)).collect(),
        };
        let query: Vec<f32> = (0..dim).map(|i| value(i + 77)).collect();
        let view = View { width, at, first: 1, last: 2 };
        let mut shares = Vec::new();
        for cap in [None, Some(0.25)] {
            let (mut out, mut scratch) = (vec![f32::NAN; dim], Vec::new());
            attend(&query, &cache, view, Scores { scale: 0.5, cap }, &mut scratch, &mut out);
            let score = |token: usize| -> f64 {
                let key = &cache.keys[token * width + at..][..dim];
                let score = query.iter().zip(key).map(|(a, b)| f64::from(*a) * f64::from(*b)).sum::<f64>() * 0.5;
                cap.map(f64::from).map_or(score, |cap| cap * (score / cap).tanh())
            };
            let share = 1.0 / (1.0 + (score(2) - score(1)).exp());
            for (i, found) in out.iter().enumerate() {
                let [a, b] = [1, 2].map(|token| f64::from(cache.values[token * width + at + i]));
                let expected = share * a + (1.0 - share) * b;
                assert!((f64::from(*found) - expected).abs() < 1e-5, "{i}");
            }
            shares.push(share);
        }
        assert!((shares[0] - shares[1]).abs() > 0.05, "the cap has an effect: {shares:?}");
    }
}
