//! The canonical option: near ties are decided by dot products that every machine computes alike.
//!
//! A pass keeps, beside the best candidate, all those within a slack of it. The slack is twice the largest difference
//! between a score of this pass and the canonical score of the same token, so the canonical winner is among them; each
//! is then evaluated again as the [reference](flash_sampling_core::reference) does.
//!
//! The difference is bounded by the rounding of the dot product ([`dot_error_bound`]), carried through the transforms
//! (bias, a soft-cap of slope at most 1 and its own error, scale, 1 / temperature), and a few roundings of each step.
//!
//! Tokens with a very negative bias, of the head or of the row, round more coarsely than the rest. They are left out of
//! the bound where they cannot win while any other token is alive (below a soft-cap: where its tangent is flat, and
//! every rounding the same); when the winner's score says that none was, the whole row is evaluated canonically.

use flash_sampling_core::canonical::{canonical_logit, dot_error_bound, largest_norm, norm};
use flash_sampling_core::params::Row;
use flash_sampling_core::{Candidate, Domain, Head, Matrix, TopList, Winner};

/// Unit of the roundings that are charged beside the dot product's: four half-ulps of float32.
const UNIT: f64 = 1.0 / 4_194_304.0;
/// Above any Gumbel's size.
const NOISE: f64 = 46.0;

/// A bound on the relative error of [`tanh`](flash_sampling_core::math::tanh).
const TANH: f64 = 4e-7;

/// What the canonical option needs of a head, found once.
#[derive(Debug)]
pub(crate) struct Canonical {
    largest_weight: f64,
    /// The largest bias of the head that is not negative.
    positive: f64,
    /// Sizes of its negative, finite biases, ascending.
    negative: Vec<f32>,
    hidden: Vec<f32>,
    weight_row: Vec<f32>,
    list: TopList,
}

/// Bounds for one row.
#[derive(Clone, Copy, Debug)]
struct Bounds {
    /// Of the difference of two scores of one token.
    error: f64,
    /// What a token without negative biases scores at least, whatever its noise. A winner above this shows that the
    /// tokens which were left out did not matter.
    alive: f64,
    /// Whether tokens were left out.
    coarse: bool,
}

/// The largest of ascending sizes that is at most `limit`, and whether any is above.
fn largest_below(sizes: &[f32], limit: f64) -> (f64, bool) {
    let within = sizes.partition_point(|&b| f64::from(b) <= limit);
    (within.checked_sub(1).map_or(0.0, |last| f64::from(sizes[last])), within < sizes.len())
}

impl Canonical {
    pub(crate) fn new(head: &Head<'_>) -> Self {
        let biases = head.bias().unwrap_or(&[]).iter().filter(|b| b.is_finite());
        let mut negative: Vec<f32> = biases.clone().filter(|b| **b < 0.0).map(|b| -b).collect();
        negative.sort_by(f32::total_cmp);
        Canonical {
            largest_weight: largest_norm(&head.weight()),
            positive: f64::from(biases.fold(0.0, |m: f32, b| m.max(*b))),
            negative,
            hidden: vec![0.0; head.hidden()],
            weight_row: vec![0.0; head.hidden()],
            list: TopList::default(),
        }
    }

    fn bounds(&self, head: &Head<'_>, row: &Row<'_>, hidden: f64) -> Bounds {
        let (scale, inv_t) = (f64::from(head.scale()), f64::from(row.transform.inv_temperature));
        let dot = hidden * self.largest_weight;
        // With a negative bias beyond this size a token scores below `alive`.
        let reach = 2.1 * (dot + NOISE / (scale * inv_t)) + head.soft_cap().map_or(0.0, |cap| 10.0 * f64::from(cap));
        let (negative, head_coarse) = largest_below(&self.negative, reach);
        let before = dot + self.positive.max(negative);
        let raw = scale * head.soft_cap().map_or(before, |cap| before.min(f64::from(cap)));
        let reach = 2.1 * (raw + NOISE / inv_t);
        let row_biases = row.transform.logit_bias.iter().map(|&(_, b)| f64::from(b)).filter(|b| b.is_finite());
        let row_bias = row_biases.clone().filter(|&b| b >= -reach).fold(0.0, |m: f64, b| m.max(b.abs()));
        let cap_error = if head.soft_cap().is_some() { 2.0 * TANH * raw } else { 0.0 };
        let transformed = (raw + row_bias) * inv_t;
        let rounding = UNIT * (2.0 * transformed + raw * inv_t + NOISE);
        let sum = dot_error_bound(head.hidden(), hidden, self.largest_weight) + UNIT * before;
        let error = (sum * scale + cap_error) * inv_t + rounding;
        Bounds {
            error,
            alive: -1.01 * (dot * scale * inv_t + error) - NOISE,
            coarse: head_coarse || row_biases.clone().any(|b| b < -reach),
        }
    }

    /// The slack of a row; its hidden state is row `r` of `input`.
    pub(crate) fn slack(&mut self, head: &Head<'_>, row: &Row<'_>, input: &Matrix<'_>, r: usize) -> f32 {
        input.row_to_f32(r, &mut self.hidden);
        let slack = 2.02 * self.bounds(head, row, norm(&self.hidden)).error;
        // Not finite: every token is a candidate.
        if slack < f64::from(f32::MAX) { (slack as f32).max(f32::MIN_POSITIVE) } else { f32::MAX }
    }

    /// Sets the hidden state that [`Canonical::resolve`] works with.
    pub(crate) fn load(&mut self, input: &Matrix<'_>, r: usize) {
        input.row_to_f32(r, &mut self.hidden);
    }

    fn candidate(&mut self, head: &Head<'_>, row: &Row<'_>, draw: Option<u32>, token: u32) -> Candidate {
        let mut logit = [canonical_logit(head, token, &self.hidden, &mut self.weight_row)];
        row.transform.apply(token, &mut logit);
        let noise = draw.map_or(0.0, |draw| row.noise.gumbel(Domain::Token, draw, token));
        Candidate { winner: Winner::new(logit[0] + noise, token), logit: logit[0] }
    }

    /// The `limit` canonically best of a pass's candidates, by score (`draw` is the noise's) or by logit (`None`).
    pub(crate) fn resolve(
        &mut self,
        head: &Head<'_>,
        row: &Row<'_>,
        draw: Option<u32>,
        limit: usize,
        candidates: &[Candidate],
    ) -> &[Candidate] {
        let mut list = core::mem::take(&mut self.list);
        list.reset(limit, 0.0);
        for c in candidates {
            let candidate = self.candidate(head, row, draw, c.winner.token);
            if candidate.logit > f32::NEG_INFINITY {
                list.push(candidate);
            }
        }
        let Bounds { alive, coarse, .. } = self.bounds(head, row, norm(&self.hidden));
        let last = list.as_slice().last().map_or(0.0, |c| f64::from(c.winner.score));
        if coarse && last < alive {
            list.reset(limit, 0.0);
            for token in head.tokens() {
                let candidate = self.candidate(head, row, draw, token);
                if candidate.logit > f32::NEG_INFINITY {
                    list.push(candidate);
                }
            }
        }
        self.list = list;
        self.list.as_slice()
    }
}
