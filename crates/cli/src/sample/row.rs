//! The draws of one row, or its error.

use flash_sampling::{Draw, Kept, Matrix, RowError, log_prob};

#[derive(Clone, Debug, Default, PartialEq)]
pub(super) struct Drawn {
    /// Tokens, in order.
    pub(super) tokens: Vec<u32>,
    /// Their scores.
    pub(super) scores: Vec<f32>,
    /// Their logits: transformed, or raw with `--logprobs-mode raw`.
    pub(super) logits: Vec<f32>,
    /// `ln sum e^l` over these logits, in nats.
    pub(super) log_z: f64,
    /// The largest of these logits, largest first.
    pub(super) top: Vec<(u32, f32)>,
    /// The ranks of the drawn tokens, with `ranks`.
    pub(super) ranks: Vec<u32>,
    /// The tokens of `logprob_token_ids` and their logits.
    pub(super) given: Vec<(u32, f32)>,
    /// The kept tokens, with `--kept`.
    pub(super) kept: Option<KeptTokens>,
}

/// The tokens that the filters kept.
#[derive(Clone, Debug, PartialEq, serde::Serialize)]
pub(super) struct KeptTokens {
    pub(super) count: u32,
    /// `ln sum e^l` over their logits, in nats.
    pub(super) log_mass: f64,
    /// The tokens, ascending.
    pub(super) tokens: Vec<u32>,
}

impl KeptTokens {
    /// Lists the tokens of a bitmap.
    pub(super) fn of(kept: Kept<'_>) -> Self {
        let tokens = kept.tokens.iter().enumerate().flat_map(|(at, &word)| {
            (0..32).filter(move |bit| word >> bit & 1 == 1).map(move |bit| 32 * at as u32 + bit)
        });
        KeptTokens { count: kept.count, log_mass: kept.log_mass, tokens: tokens.collect() }
    }
}

impl Drawn {
    /// Appends draws. `raw_logits` is empty unless log-probabilities are of the raw logits.
    pub(super) fn extend(&mut self, draws: &[Draw], raw_logits: &[f32]) {
        self.tokens.extend(draws.iter().map(|d| d.token));
        self.scores.extend(draws.iter().map(|d| d.score));
        match raw_logits {
            [] => self.logits.extend(draws.iter().map(|d| d.logit)),
            raw => self.logits.extend_from_slice(raw),
        }
    }

    /// The log-probability of a logit, in nats.
    pub(super) fn log_prob(&self, logit: f32) -> f64 {
        log_prob(logit, self.log_z)
    }
}

/// Explains an error about logits by the row's hidden states or its mask.
pub(super) fn explain(error: &RowError, hidden: Matrix<'_>, row: usize, mask: Option<&[u32]>) -> String {
    if matches!(error, RowError::NaN { .. } | RowError::PositiveInfinity { .. } | RowError::NoFiniteLogit) {
        let mut values = vec![0.0; hidden.cols()];
        hidden.row_to_f32(row, &mut values);
        if let Some((column, value)) = values.iter().enumerate().find(|(_, value)| !value.is_finite()) {
            return format!("hidden state {column} of the row is {value}: {error}");
        }
        if *error == RowError::NoFiniteLogit && mask.is_some_and(|mask| mask.iter().all(|&word| word == 0)) {
            return format!("{error} (the mask allows none)");
        }
    }
    error.to_string()
}

/// The draws of one row, or its error on one line.
pub(super) type RowOutcome = Result<Drawn, String>;
