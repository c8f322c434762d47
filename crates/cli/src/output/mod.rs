//! Rows of results, as text and as JSON.

mod json;
mod text;

pub use json::write_json;
pub use text::write_text;

use flash_sampling::{Candidate, Draw, RowError};

/// All draws of one row.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Drawn {
    /// Tokens, in order.
    pub tokens: Vec<u32>,
    /// Their scores.
    pub scores: Vec<f32>,
    /// Their transformed logits.
    pub logits: Vec<f32>,
    /// `ln sum e^l`, in nats.
    pub log_z: f64,
    /// The largest transformed logits, largest first.
    pub top: Vec<Candidate>,
}

impl Drawn {
    /// Appends draws.
    pub fn extend(&mut self, draws: &[Draw]) {
        self.tokens.extend(draws.iter().map(|d| d.token));
        self.scores.extend(draws.iter().map(|d| d.score));
        self.logits.extend(draws.iter().map(|d| d.logit));
    }

    /// The log-probability of a transformed logit, in nats.
    pub fn log_prob(&self, logit: f32) -> f64 {
        f64::from(logit) - self.log_z
    }
}

/// What became of one row.
pub type RowOutcome = Result<Drawn, RowError>;
