//! The canonical option: near ties are decided by dot products that every machine computes alike.
//!
//! A pass keeps, beside the best candidate, all those within a slack of it. The slack is twice the largest difference
//! between a score of this pass and the canonical score of the same token, so the canonical winner is among them; each
//! is then evaluated again as the [reference](flash_sampling_core::reference) does.
//!
//! The difference is bounded by the rounding of the dot product ([`dot_error_bound`]), carried through the transforms
//! (bias, a soft-cap of slope at most 1, scale, 1 / temperature), and a few roundings of each step on the way. Tokens
//! with a very negative logit bias round more coarsely, but cannot win while any other token is alive; when the winner's
//! score says that none was, the whole row is evaluated canonically.

use flash_sampling_core::canonical::{canonical_logit, dot_error_bound, largest_norm, norm};
use flash_sampling_core::params::Row;
use flash_sampling_core::{Candidate, Domain, Head, Matrix, TopList, Winner};

/// Unit of the roundings that are charged beside the dot product's: four half-ulps of float32.
const UNIT: f64 = 1.0 / 4_194_304.0;
/// Above any Gumbel's size.
const NOISE: f64 = 46.0;

/// What the canonical option needs of a head, found once.
#[derive(Debug)]
pub(crate) struct Canonical {
    largest_weight: f64,
    largest_bias: f64,
    hidden: Vec<f32>,
    weight_row: Vec<f32>,
    list: TopList,
}

/// Bounds for one row.
#[derive(Clone, Copy, Debug)]
struct Bounds {
    /// Of the size of a raw logit.
    raw: f64,
    /// Of the size of a transformed logit without its logit bias.
    logit: f64,
    /// Of the difference of two scores of one token.
    error: f64,
}

impl Canonical {
    pub(crate) fn new(head: &Head<'_>) -> Self {
        let bias = head.bias().unwrap_or(&[]).iter().filter(|b| b.is_finite());
        Canonical {
            largest_weight: largest_norm(&head.weight()),
            largest_bias: bias.fold(0.0, |m, b| m.max(f64::from(b.abs()))),
            hidden: vec![0.0; head.hidden()],
            weight_row: vec![0.0; head.hidden()],
            list: TopList::default(),
        }
    }

    fn bounds(&self, head: &Head<'_>, row: &Row<'_>, hidden: f64) -> Bounds {
        let (scale, inv_t) = (f64::from(head.scale()), f64::from(row.transform.inv_temperature));
        let before = hidden * self.largest_weight + self.largest_bias;
        let raw = scale * head.soft_cap().map_or(before, |cap| before.min(f64::from(cap)));
        // A logit bias below this cannot win against a token without one.
        let hopeless = -(2.1 * raw + 2.1 * NOISE / inv_t);
        let biases = row.transform.logit_bias.iter().map(|&(_, b)| f64::from(b));
        let bias = biases.filter(|&b| b >= hopeless).fold(0.0, |m: f64, b| m.max(b.abs()));
        let dot = dot_error_bound(head.hidden(), hidden, self.largest_weight);
        let transformed = (raw + bias) * inv_t;
        let error = (dot + UNIT * before) * scale * inv_t + UNIT * (2.0 * transformed + raw * inv_t + NOISE);
        Bounds { raw, logit: raw * inv_t, error }
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
        let bounds = self.bounds(head, row, norm(&self.hidden));
        let alive = -1.01 * (bounds.logit + bounds.error) - NOISE;
        let coarse = |&(_, b): &(u32, f32)| b.is_finite() && f64::from(b) < -2.0 * bounds.raw;
        let last = list.as_slice().last().map_or(0.0, |c| f64::from(c.winner.score));
        if last < alive && row.transform.logit_bias.iter().any(coarse) {
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
