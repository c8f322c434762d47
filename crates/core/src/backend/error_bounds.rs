//! Bounds on the difference between the scores of two passes, which select the tokens of a canonical re-evaluation.
//!
//! A pass in float32 collects the best candidate, and all candidates within a slack of it. The slack is twice the
//! largest difference between a score of the pass and the [canonical](crate::backend::canonical) score of the same
//! token. So the collected candidates include the canonical winner.
//!
//! The difference is bounded by the rounding of the dot product ([`dot_error_bound`]), carried through the transforms
//! (bias, a soft-cap of slope at most 1 and its own error, scale, 1 / temperature), and a few roundings of each step.
//!
//! Tokens with a very negative bias, of the head or of the row, have larger roundings than the others. The bound
//! excludes such a token if it cannot win while any token without a negative bias can be drawn. (With a soft-cap: if
//! the cap is flat there, so that all roundings are equal.) If the winner's score shows that no such token can be
//! drawn, the whole row is evaluated canonically.

use crate::backend::canonical::{dot_error_bound, extra_terms, largest_norm};
use crate::head::Head;
use crate::params::Row;
use crate::params::adjustments::Adjustment;

/// Unit of the roundings other than the dot product's: four half-ulps of float32.
const UNIT: f64 = 1.0 / 4_194_304.0;
/// An upper bound on the absolute value of Gumbel noise.
const NOISE: f64 = 46.0;
/// A bound on the relative error of [`tanh`](crate::backend::math::tanh).
const TANH: f64 = 4e-7;

/// The parts of a head that the bounds need, computed once.
#[derive(Clone, Debug)]
pub struct ScoreBound {
    largest_weight: f64,
    /// The largest bias of the head, at least 0.
    positive: f64,
    /// Absolute values of the head's negative, finite biases, ascending.
    negative: Vec<f32>,
}

/// Bounds for one row.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct RowScoreBound {
    /// The bound of the difference between two scores of one token.
    error: f64,
    /// The lowest score of a token without negative biases, for any noise. Every excluded token scores lower.
    alive: f64,
    /// Whether the bound excludes tokens.
    coarse: bool,
}

/// The largest of the ascending `sizes` that is at most `limit`, and whether any size exceeds the limit.
fn largest_below(sizes: &[f32], limit: f64) -> (f64, bool) {
    let within = sizes.partition_point(|&b| f64::from(b) <= limit);
    (within.checked_sub(1).map_or(0.0, |last| f64::from(sizes[last])), within < sizes.len())
}

impl ScoreBound {
    /// Reads the head's weight once, for its norms.
    pub fn new(head: &Head<'_>) -> Self {
        let biases = head.bias().unwrap_or(&[]).iter().filter(|b| b.is_finite());
        let mut negative: Vec<f32> = biases.clone().filter(|b| **b < 0.0).map(|b| -b).collect();
        negative.sort_by(f32::total_cmp);
        ScoreBound {
            largest_weight: largest_norm(&head.weight()),
            positive: f64::from(biases.fold(0.0, |m: f32, b| m.max(*b))),
            negative,
        }
    }

    /// The bounds of a row with the Euclidean norm `hidden`; `head` is the head of [`ScoreBound::new`].
    pub fn row(&self, head: &Head<'_>, row: &Row<'_>, hidden: f64) -> RowScoreBound {
        let (scale, inv_t) = (f64::from(head.scale()), f64::from(row.transform.inv_temperature));
        let dot = hidden * self.largest_weight;
        // A token with a negative bias of a larger absolute value scores below `alive`.
        let reach = 2.1 * (dot + NOISE / (scale * inv_t)) + head.soft_cap().map_or(0.0, |cap| 10.0 * f64::from(cap));
        let (negative, head_coarse) = largest_below(&self.negative, reach);
        let before = dot + self.positive.max(negative);
        let raw = scale * head.soft_cap().map_or(before, |cap| before.min(f64::from(cap)));
        let reach = 2.1 * (raw + NOISE / inv_t);
        let mut list = AdjustmentBounds::default();
        row.transform.adjustments.iter().for_each(|a| list.add(a, reach));
        let cap_error = if head.soft_cap().is_some() { 2.0 * TANH * raw } else { 0.0 };
        let transformed = ((raw + list.shift) * list.factor + list.shift) * inv_t;
        let rounding = UNIT * (4.0 * transformed + raw * inv_t + NOISE);
        let terms = head.hidden() + extra_terms(head.weight().dtype());
        let sum = dot_error_bound(terms, hidden, self.largest_weight) + UNIT * before;
        let error = (sum * scale + cap_error) * list.factor * inv_t + rounding;
        RowScoreBound {
            error,
            alive: -1.01 * (dot * scale * inv_t + error) - NOISE,
            coarse: head_coarse || list.coarse,
        }
    }
}

/// Bounds on the adjustments of a row.
struct AdjustmentBounds {
    /// The largest absolute value of a bias or subtrahend.
    shift: f64,
    /// The largest factor of a repetition penalty; at least 1.
    factor: f64,
    /// Whether the bounds exclude tokens that never beat a token without adjustment.
    coarse: bool,
}

impl Default for AdjustmentBounds {
    fn default() -> Self {
        AdjustmentBounds { shift: 0.0, factor: 1.0, coarse: false }
    }
}

impl AdjustmentBounds {
    /// Adds an adjustment. `reach` bounds the distance of raw logits to the scores that can win.
    fn add(&mut self, adjustment: &Adjustment, reach: f64) {
        let (bias, subtract) = (f64::from(adjustment.bias), f64::from(adjustment.subtract));
        if bias == f64::NEG_INFINITY {
            return;
        }
        let factor = f64::from(adjustment.repetition.max(1.0 / adjustment.repetition));
        let most = if bias < 0.0 { bias / factor } else { bias * factor } - subtract;
        if most < -reach * factor {
            self.coarse = true;
        } else {
            self.shift = self.shift.max(bias.abs()).max(subtract.abs());
            self.factor = self.factor.max(factor);
        }
    }
}

impl RowScoreBound {
    /// The largest distance of a candidate to the last kept score, in nats; `f32::MAX`: every token is a candidate.
    pub fn slack(&self) -> f32 {
        let slack = 2.02 * self.error;
        if slack < f64::from(f32::MAX) { (slack as f32).max(f32::MIN_POSITIVE) } else { f32::MAX }
    }

    /// Whether an excluded token may beat the last kept canonical score (0 if none). Then every token is evaluated.
    pub fn needs_full_evaluation(&self, last: f32) -> bool {
        self.coarse && f64::from(last) < self.alive
    }
}
