//! Speculative decoding: one pass of the target model judges several tokens of a draft.
//!
//! There are two methods. With both, the emitted tokens follow the target's law:
//!
//! * **Shared noise** ([`verify`]). Target and draft use the same noise at a position. The target draws at every
//!   position of the block, given the draft before it. The draft is accepted up to its first token that differs from
//!   the target's draw. The emitted tokens are the tokens that the target alone draws, for any draft: exact pathwise.
//!   A draft model with the same seed and positions has the highest acceptance. Every sampler supports this method.
//! * **Rejection** ([`judge`]; Leviathan et al. 2023, Chen et al. 2023). A token drawn from the draft's law `q` is
//!   accepted with probability `min(1, p / q)`. Otherwise a draw from the residual law, `max(p - q, 0)` normalised,
//!   replaces it. The method needs `q` and the target's law `p`: a dense row of logits, which the fused samplers do not
//!   write. Exact in distribution.
//!
//! The acceptance test and the residual draw have separate noise ([`Domain::Accept`], [`Domain::Residual`]). The noise
//! of the draft's draw is not independent of the drawn token, so its reuse would change the law.

use crate::error::{RowError, SampleError};
use crate::matrix::Matrix;
use crate::noise::Domain;
use crate::params::adjustments::Adjustments;
use crate::params::history::History;
use crate::params::knob::Knobs;
use crate::params::{Row, RowParams};
use crate::reference;
use crate::sampler::samples::Samples;
use crate::sampler::{Capabilities, Exactness, Input, PerturbedArgmax, Plan, Variant};

/// The result of verifying a block of draft tokens.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Verdict {
    /// Number of accepted draft tokens, from the first on.
    pub accepted: usize,
    /// The token emitted after the accepted tokens: at the first rejected position, or after the block.
    pub next: u32,
}

/// The reason why a block has no verdict.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum SpeculationError {
    /// The target's sampler failed.
    #[error(transparent)]
    Call(#[from] SampleError),
    /// A row that the verdict depends on has no draw.
    #[error("row {index} of the block: {error}")]
    Row {
        /// The index of the row in the block.
        index: usize,
        /// The row's error.
        error: RowError,
    },
    /// The draft's law gives its token probability 0, or has an invalid probability.
    #[error("the draft's probability of token {token} {reason}")]
    Draft {
        /// The token.
        token: u32,
        /// What is wrong.
        reason: &'static str,
    },
    /// The draft's law is not a probability law over the vocabulary.
    #[error("the draft's law {reason}")]
    Law {
        /// What is wrong.
        reason: &'static str,
    },
    /// The number of rows is not the number of draft tokens plus one.
    #[error("{rows} rows for {tokens} draft tokens; one more than tokens are needed")]
    Block {
        /// Rows of the input, or of the samples from the block's first row on.
        rows: usize,
        /// Tokens of the draft.
        tokens: usize,
    },
}

/// The rows that judge a block of draft tokens.
///
/// The history of each row ends with the draft tokens before its position. The last row draws after the block.
#[derive(Clone, Debug)]
pub struct Block<'a> {
    row: RowParams<'a>,
    /// One history per row; empty if `row` has no history.
    histories: Vec<History>,
    len: usize,
}

impl<'a> Block<'a> {
    /// The rows for `draft`, one more than its tokens, from `row` at the first position. Each copies its history.
    pub fn new(row: RowParams<'a>, draft: &[u32]) -> Self {
        let mut histories = Vec::new();
        if let Some(history) = row.history {
            histories.push(history.clone());
            for &token in draft {
                let mut next = histories[histories.len() - 1].clone();
                next.push(token);
                histories.push(next);
            }
        }
        Block { row, histories, len: draft.len() + 1 }
    }

    /// The rows, in order of position.
    pub fn rows(&self) -> Vec<RowParams<'_>> {
        let row = |index: usize| RowParams {
            position: self.row.position.saturating_add(index as u64),
            history: self.histories.get(index),
            ..self.row
        };
        (0..self.len).map(row).collect()
    }
}

/// The verdict by shared noise, from the target's draws.
///
/// `out` has the draws of [`Block::rows`] from row `first_row` on. One call may have the blocks of several sequences.
///
/// # Errors
/// * [`SpeculationError::Row`] for a row that the verdict depends on. Rows after a rejected token may fail.
/// * [`SpeculationError::Block`] if `out` has fewer rows than the block.
pub fn accept(out: &Samples, first_row: usize, draft: &[u32]) -> Result<Verdict, SpeculationError> {
    let rows = out.len().saturating_sub(first_row);
    if rows <= draft.len() {
        return Err(SpeculationError::Block { rows, tokens: draft.len() });
    }
    let draw = |index: usize| match out.row(first_row + index) {
        Ok(row) => Ok(row.token()),
        Err(error) => Err(SpeculationError::Row { index, error }),
    };
    for (index, &token) in draft.iter().enumerate() {
        let next = draw(index)?;
        if next != token {
            return Ok(Verdict { accepted: index, next });
        }
    }
    Ok(Verdict { accepted: draft.len(), next: draw(draft.len())? })
}

/// Verifies a block by shared noise, with one call of the target's sampler.
///
/// `input` has one row more than the draft has tokens: the target's hidden states (or logits) from `row.position` on,
/// each given the draft before it.
///
/// # Errors
/// [`SpeculationError::Block`], [`SpeculationError::Call`], [`SpeculationError::Row`].
pub fn verify(
    sampler: &mut dyn PerturbedArgmax,
    input: Matrix<'_>,
    row: RowParams<'_>,
    draft: &[u32],
    out: &mut Samples,
) -> Result<Verdict, SpeculationError> {
    if input.rows() != draft.len() + 1 {
        return Err(SpeculationError::Block { rows: input.rows(), tokens: draft.len() });
    }
    sampler.sample(input, &Block::new(row, draft).rows(), out)?;
    accept(out, 0, draft)
}

/// The law of a draft token: probabilities that sum to 1.
#[derive(Clone, Copy, Debug)]
pub enum DraftLaw<'a> {
    /// One probability per token of the vocabulary.
    Dense(&'a [f32]),
    /// The tokens with a probability, strictly ascending.
    Sparse(&'a [(u32, f32)]),
}

impl DraftLaw<'_> {
    fn of(&self, token: u32) -> f64 {
        f64::from(match self {
            DraftLaw::Dense(law) => law.get(token as usize).copied().unwrap_or(0.0),
            DraftLaw::Sparse(law) => law.binary_search_by_key(&token, |&(t, _)| t).map_or(0.0, |at| law[at].1),
        })
    }

    /// Checks that tokens are of the vocabulary and ascending, and that probabilities sum to 1 to within 1/1000.
    fn check(&self, vocab_size: usize) -> Result<(), SpeculationError> {
        let of_vocabulary = match self {
            DraftLaw::Dense(law) => law.len() == vocab_size,
            DraftLaw::Sparse(law) => law.last().is_none_or(|&(last, _)| (last as usize) < vocab_size),
        };
        if !of_vocabulary {
            return Err(SpeculationError::Law { reason: "must be over the vocabulary of the logits" });
        }
        let mut sum = 0.0;
        let mut add = |token: u32, q: f32| {
            sum += f64::from(q);
            let valid = (0.0..=1.0).contains(&q);
            let reason = "must be between 0 and 1";
            if valid { Ok(()) } else { Err(SpeculationError::Draft { token, reason }) }
        };
        match self {
            DraftLaw::Dense(law) => (0..).zip(*law).try_for_each(|(token, &q)| add(token, q))?,
            DraftLaw::Sparse(law) => {
                if !law.is_sorted_by(|a, b| a.0 < b.0) {
                    return Err(SpeculationError::Law { reason: "must have its tokens strictly ascending" });
                }
                law.iter().try_for_each(|&(token, q)| add(token, q))?;
            }
        }
        if (sum - 1.0).abs() > 1e-3 {
            return Err(SpeculationError::Law { reason: "must sum to 1" });
        }
        Ok(())
    }
}

/// The result of rejection at one position.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Judgement {
    /// The draft's token is emitted.
    Accepted,
    /// This token is emitted instead, and the rest of the block is discarded.
    Replaced(u32),
}

/// Judges one draft token by rejection.
///
/// `logits` are the target's raw logits of the whole vocabulary at the token's position; `row` has their transforms and
/// filters. The draft must draw `token` from `law` without the accept and residual noise of (seed, position); samplers
/// never use this noise.
///
/// Judge a block from its first token on, until one is replaced. If all tokens are accepted, draw the token after the
/// block with a sampler. The law of a greedy row is its argmax. The row's requests for log-probabilities and kept
/// tokens have no effect.
///
/// # Errors
/// * [`SpeculationError::Row`] (index 0): the parameters are invalid, the row has several draws, or no finite logit.
/// * [`SpeculationError::Draft`]: `law` gives `token` probability 0, or has a probability outside 0 to 1.
/// * [`SpeculationError::Law`]: `law` is not over the vocabulary of the logits, has its tokens out of order, or does
///   not sum to 1 (to within 1/1000).
pub fn judge(
    logits: &[f32],
    row: &RowParams<'_>,
    token: u32,
    law: DraftLaw<'_>,
) -> Result<Judgement, SpeculationError> {
    let row = &RowParams { logprobs: None, kept: false, ..*row };
    let mut adjustments = Adjustments::default();
    adjustments.collect([row]);
    let failed = |error| SpeculationError::Row { index: 0, error };
    let checked = row.check(adjustments.row(0), &CAPABILITIES, &PLAN, logits.len() as u32).map_err(failed)?;
    let target = target_law(&checked, logits).map_err(failed)?;
    law.check(logits.len())?;
    let q = law.of(token);
    if q == 0.0 {
        return Err(SpeculationError::Draft { token, reason: "must be above 0: it was drawn" });
    }
    let p = target.get(token as usize).copied().unwrap_or(0.0);
    if checked.noise.coin_of(Domain::Accept, checked.first_draw, 0) < p / q {
        return Ok(Judgement::Accepted);
    }
    let mut best = (f64::NEG_INFINITY, token);
    for (token, &p) in (0..).zip(&target) {
        let q = law.of(token);
        if p > q {
            let score = (p - q).ln() + f64::from(checked.noise.gumbel(Domain::Residual, checked.first_draw, token));
            if score > best.0 {
                best = (score, token);
            }
        }
    }
    // If both laws are equal up to rounding, no token has residual mass, and the token counts as accepted.
    Ok(if best.0 == f64::NEG_INFINITY { Judgement::Accepted } else { Judgement::Replaced(best.1) })
}

/// The probabilities of a row's draw, in float64.
fn target_law(row: &Row<'_>, raw: &[f32]) -> Result<Vec<f64>, RowError> {
    let mut logits = reference::transformed(row, raw, 0)?;
    if let Some(filters) = &row.filters {
        reference::filter(filters, 0, &mut logits)?;
    }
    if row.greedy {
        let best = reference::tiled(row, 0, &logits, 0).winner.token;
        return Ok((0..logits.len() as u32).map(|token| f64::from(u8::from(token == best))).collect());
    }
    let log_z = reference::log_mass(&logits);
    Ok(logits.iter().map(|&l| (f64::from(l) - log_z).exp()).collect())
}

/// The capabilities of [`judge`].
const CAPABILITIES: Capabilities = Capabilities {
    backend: "speculation",
    variant: Variant::Standalone,
    exactness: Exactness::InDistribution,
    input: Input::Logits,
    without_replacement: false,
    knobs: Knobs::ADJUSTMENTS.union(Knobs::FILTERS),
    canonical: false,
    shadow: false,
};
const PLAN: Plan = Plan { max_rows: 1, max_draws: 1, max_logprobs: None, canonical: false };
