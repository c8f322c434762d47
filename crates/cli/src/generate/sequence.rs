//! One sequence of a batch.

use super::text_stream::TextStream;
use flash_sampling::{History, RowError, RowSample};
use flash_sampling_models::Cache;

#[derive(Clone, Debug, PartialEq)]
pub(super) enum End {
    /// A stop token, or a text of `--stop`.
    Stop,
    /// `--max-tokens`, or the model's position limit.
    Length,
    /// No token could be drawn.
    Failed(RowError),
}

/// The log-probability of a drawn token and the largest log-probabilities, in nats.
#[derive(Clone, Debug)]
pub(super) struct Logprobs {
    pub(super) drawn: f64,
    pub(super) top: Vec<(u32, f64)>,
}

/// A sequence: seed, tokens, cache of the layers, and text.
#[derive(Debug)]
pub(super) struct Sequence<'s> {
    pub(super) seed: u64,
    pub(super) history: History,
    pub(super) cache: Cache,
    pub(super) stream: TextStream<'s>,
    pub(super) logprobs: Vec<Logprobs>,
    pub(super) end: Option<End>,
}

impl Sequence<'_> {
    /// Tokens so far, prompt included; also the position of the next token.
    pub(super) fn len(&self) -> usize {
        self.history.tokens().len()
    }

    /// Whether the model's position limit ended the sequence before `max_tokens`.
    pub(super) fn is_cut(&self, max_tokens: u32, positions: usize) -> bool {
        let is_short = self.history.output().len() < max_tokens as usize;
        self.end == Some(End::Length) && is_short && self.len() >= positions
    }

    /// Adds a draw and its log-probabilities.
    pub(super) fn push(&mut self, row: &RowSample<'_>) {
        self.history.push(row.token());
        if let Some(drawn) = row.draw_log_prob(0) {
            self.logprobs.push(Logprobs { drawn, top: row.top_log_probs().collect() });
        }
    }
}
