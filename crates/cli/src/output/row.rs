//! What became of one row.

use flash_sampling::{Candidate, Draw, Kept, Matrix, RowError, log_prob};

/// All draws of one row.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Drawn {
    /// Tokens, in order.
    pub tokens: Vec<u32>,
    /// Their scores.
    pub scores: Vec<f32>,
    /// Their logits, of the kind that log-probabilities are of.
    pub logits: Vec<f32>,
    /// `ln sum e^l` over these logits, in nats.
    pub log_z: f64,
    /// The largest of these logits, largest first.
    pub top: Vec<Candidate>,
    /// What the filters kept, when asked for.
    pub kept: Option<KeptTokens>,
}

/// The tokens that the filters kept.
#[derive(Clone, Debug, PartialEq, serde::Serialize)]
pub struct KeptTokens {
    /// How many.
    pub count: u32,
    /// `ln sum e^l` over their logits, in nats.
    pub log_mass: f64,
    /// Which, ascending.
    pub tokens: Vec<u32>,
}

impl KeptTokens {
    /// Lists the tokens of a bitmap.
    pub fn of(kept: Kept<'_>) -> Self {
        let tokens = kept.tokens.iter().enumerate().flat_map(|(at, &word)| {
            (0..32).filter(move |bit| word >> bit & 1 == 1).map(move |bit| 32 * at as u32 + bit)
        });
        KeptTokens { count: kept.count, log_mass: kept.log_mass, tokens: tokens.collect() }
    }
}

impl Drawn {
    /// Appends draws; `raw_logits` are their raw logits where log-probabilities are of these, otherwise empty.
    pub fn extend(&mut self, draws: &[Draw], raw_logits: &[f32]) {
        self.tokens.extend(draws.iter().map(|d| d.token));
        self.scores.extend(draws.iter().map(|d| d.score));
        match raw_logits {
            [] => self.logits.extend(draws.iter().map(|d| d.logit)),
            raw => self.logits.extend_from_slice(raw),
        }
    }

    /// The log-probability of a logit, in nats.
    pub fn log_prob(&self, logit: f32) -> f64 {
        log_prob(logit, self.log_z)
    }
}

/// Why a row has no draw.
#[derive(Clone, Debug, PartialEq, thiserror::Error)]
pub enum RowFailure {
    /// The sampler's answer.
    #[error(transparent)]
    Row(#[from] RowError),
    /// A mask without a token.
    #[error("{0} (the mask allows none)")]
    Mask(RowError),
    /// The sampler's answer, and what explains it.
    #[error("hidden state {column} of the row is {value}: {error}")]
    Hidden {
        /// The first column whose value is not finite.
        column: usize,
        /// Its value.
        value: f32,
        /// The sampler's answer.
        error: RowError,
    },
}

impl RowFailure {
    /// Looks for the cause of bad logits in the row's mask and among its hidden states.
    pub fn of(error: RowError, hidden: Matrix<'_>, row: usize, mask: Option<&[u32]>) -> Self {
        let of_logits =
            matches!(error, RowError::NaN { .. } | RowError::PositiveInfinity { .. } | RowError::NoFiniteLogit);
        if !of_logits {
            return error.into();
        }
        let mut values = vec![0.0; hidden.cols()];
        hidden.row_to_f32(row, &mut values);
        match values.iter().position(|value| !value.is_finite()) {
            Some(column) => RowFailure::Hidden { column, value: values[column], error },
            None if error == RowError::NoFiniteLogit && mask.is_some_and(|mask| mask.iter().all(|&word| word == 0)) => {
                RowFailure::Mask(error)
            }
            None => error.into(),
        }
    }
}

/// What became of one row.
pub type RowOutcome = Result<Drawn, RowFailure>;
