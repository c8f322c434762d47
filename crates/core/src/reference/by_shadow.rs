//! The plain definition of a draw with a shadow (`docs/shadow.md`).
//!
//! A token whose upper bound cannot win needs no logit.

use super::candidates;
use crate::backend::canonical::{canonical_dot, canonical_logit, norm};
use crate::head::Head;
use crate::noise::Domain;
use crate::params::Row;
use crate::params::transform::any_invalid;
use crate::shadow::{Shadow, ShadowBound, code_stride};
use crate::summary::winner::TopList;

/// An upper bound of the error of a float32 soft-cap's tanh, as a share of the cap.
const TANH_RISE: f32 = 2e-6;

/// Returns the raw logits of the tokens that can win a draw of the row; -inf for the other tokens.
///
/// `None` if every logit is needed, because the head has no shadow or a bound is not finite.
pub(super) fn possible_winners(head: &Head<'_>, row: &Row<'_>, hidden: &[f32]) -> Option<Vec<f32>> {
    let (first, upper) = (head.tokens().start, upper_bounds(head, row, hidden)?);
    let mut raw = vec![f32::NEG_INFINITY; upper.len()];
    // A list without replacement is one draw with several winners.
    let (draws, winners) = if row.without_replacement { (1, row.draws) } else { (row.draws, 1) };
    for draw in row.first_draw..row.first_draw + draws {
        let score = |token: u32| {
            let mut logit = [raw_logit(head, token, hidden)];
            row.transform.apply(token, &mut logit);
            logit[0] + if row.greedy { 0.0 } else { row.noise.gumbel(Domain::Token, draw, token) }
        };
        // The least score of any `winners` tokens is a lower bound of the winners' scores. The tokens with the best
        // upper bounds give a high lower bound.
        let mut best = TopList::new(winners as usize, 0.0);
        candidates(row, draw, &upper, first).for_each(|bound| best.push(bound));
        let has_enough = best.as_slice().len() == winners as usize;
        let scores = best.as_slice().iter().map(|bound| score(bound.winner.token));
        let lower = if has_enough { scores.fold(f32::INFINITY, f32::min) } else { f32::NEG_INFINITY };
        for bound in candidates(row, draw, &upper, first).filter(|bound| bound.winner.score >= lower) {
            raw[(bound.winner.token - first) as usize] = raw_logit(head, bound.winner.token, hidden);
        }
    }
    Some(raw)
}

/// Returns upper bounds of the row's transformed logits. `None` if the head has no shadow, or a bound is not finite.
fn upper_bounds(head: &Head<'_>, row: &Row<'_>, hidden: &[f32]) -> Option<Vec<f32>> {
    let (shadow, tokens) = (head.shadow()?, head.tokens());
    let largest = shadow.errors().iter().zip(shadow.norms()).map(|(error, norm)| f64::from(error + norm));
    // Here, hidden states are not split into digits, so digits add no error.
    let bound = ShadowBound::new(shadow.cols(), norm(hidden), 0.0, largest.fold(0.0, f64::max))?;
    let upper = |token| {
        let v = head.weight_row(token);
        let bound = f64::from(bound.of(shadow.errors()[v], shadow.norms()[v]));
        ((copy_dot(&shadow, v, hidden) + bound) as f32).next_up()
    };
    let mut upper: Vec<f32> = tokens.clone().map(upper).collect();
    head.transform(tokens.start, &mut upper);
    let rise = head.soft_cap().map_or(0.0, |cap| TANH_RISE * cap * head.scale());
    upper.iter_mut().for_each(|bound| *bound += rise);
    if any_invalid(&upper) {
        // A logit may be invalid. This is an error of the row, even if a mask forbids the token.
        return None;
    }
    // Mask, biases, penalties and temperature never map a larger logit to a smaller result.
    row.transform.apply(tokens.start, &mut upper);
    (!any_invalid(&upper)).then_some(upper)
}

fn raw_logit(head: &Head<'_>, token: u32, hidden: &[f32]) -> f32 {
    canonical_logit(head, token, hidden, &mut vec![0.0; hidden.len()])
}

/// The dot product of row `v` of the copy and the hidden state.
fn copy_dot(shadow: &Shadow<'_>, v: usize, hidden: &[f32]) -> f64 {
    let codes = &shadow.codes()[v * code_stride(shadow.cols())..][..shadow.cols()];
    f64::from(shadow.scales()[v]) * canonical_dot(codes, hidden)
}

#[cfg(test)]
mod tests;
