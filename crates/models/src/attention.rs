//! Attention of one query head over its sequence, in one order of summation.

use crate::cache::KeyValues;

/// The number of partial sums of a dot product. Their order does not depend on the processor, and they fit vector
/// registers.
const LANES: usize = 16;

/// The keys and values of a query.
#[derive(Clone, Copy, Debug)]
pub(crate) struct View {
    /// Elements from one token to the next.
    pub(crate) width: usize,
    /// First element of the head.
    pub(crate) at: usize,
    /// The number of visible tokens: all before the query, and its own.
    pub(crate) tokens: usize,
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

/// Writes `out [head_dim]`: the values, weighted by the softmax of `query . key / sqrt(head_dim)`. `scores` is scratch.
pub(crate) fn attend(query: &[f32], cache: &KeyValues, view: View, scores: &mut Vec<f32>, out: &mut [f32]) {
    let head = |data: &'_ [f32], token: usize| -> core::ops::Range<usize> {
        let from = token * view.width + view.at;
        debug_assert!(from + query.len() <= data.len());
        from..from + query.len()
    };
    let scale = 1.0 / (query.len() as f32).sqrt();
    scores.clear();
    scores.extend((0..view.tokens).map(|token| scale * dot(query, &cache.keys[head(&cache.keys, token)])));
    let largest = scores.iter().copied().fold(f32::NEG_INFINITY, f32::max);
    let mut total = 0.0;
    out.fill(0.0);
    for (token, score) in scores.iter().enumerate() {
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
        // Two heads of width 18; three tokens, of which the query sees two.
        let (width, at, dim) = (36, 18, 18);
        let value = |i: usize| ((i * 37 + 11) % 101) as f32 / 50.0 - 1.0;
        let cache = KeyValues {
            keys: (0..3 * width).map(value).collect(),
            values: (0..3 * width).map(|i| value(i + 1000)).collect(),
        };
        let query: Vec<f32> = (0..dim).map(|i| value(i + 77)).collect();
        let (mut out, mut scores) = (vec![f32::NAN; dim], Vec::new());
        attend(&query, &cache, View { width, at, tokens: 2 }, &mut scores, &mut out);
        let score = |token: usize| -> f64 {
            let key = &cache.keys[token * width + at..][..dim];
            query.iter().zip(key).map(|(a, b)| f64::from(*a) * f64::from(*b)).sum::<f64>() / (dim as f64).sqrt()
        };
        let share = 1.0 / (1.0 + (score(1) - score(0)).exp());
        for (i, found) in out.iter().enumerate() {
            let [a, b] = [0, 1].map(|token| f64::from(cache.values[token * width + at + i]));
            let expected = share * a + (1.0 - share) * b;
            assert!((f64::from(*found) - expected).abs() < 1e-5, "{i}");
        }
    }
}
