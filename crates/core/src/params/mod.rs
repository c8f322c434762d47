//! All that differs from row to row.
//!
//! | module | what it holds |
//! | --- | --- |
//! | this one | [`RowParams`], the parameters of a row, and [`Row`], the same checked |
//! | [`sampling_params`] | [`SamplingParams`](sampling_params::SamplingParams): the parameters of a request, owned, with vLLM's names |
//! | [`knob`] | the knobs by name, and sets of them |
//! | [`transform`] | masks and temperature: logits to scores (Alg. 1, line 3) |
//! | [`filters`] | top-k, top-p and their kin |
//! | [`history`], [`repetitions`], [`adjustments`] | a sequence's tokens, and the penalties, bans and biases of a row |

use crate::params::filters::Order;
use crate::params::history::History;
pub use row::Row;
pub use row_buffer::RowBuffer;

pub mod adjustments;
mod digest;
pub mod filters;
pub mod history;
pub mod knob;
pub mod repetitions;
mod row;
mod row_buffer;
pub mod sampling_params;
pub mod transform;

/// Which law log-probabilities are of.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
#[cfg_attr(feature = "serde", derive(serde::Deserialize, serde::Serialize))]
#[non_exhaustive]
pub enum LogprobsMode {
    /// The law that is drawn from: after masks, biases, penalties and temperature, over the tokens that the filters keep
    /// (for a greedy row: of temperature 1, unfiltered). vLLM's `processed_logprobs`.
    #[default]
    #[cfg_attr(feature = "serde", serde(rename = "processed_logprobs"))]
    Processed,
    /// The model's own: the softmax of the head's logits before anything that belongs to the row, its mask
    /// included. vLLM's `raw_logprobs`, which there come after the bitmap of a grammar.
    #[cfg_attr(feature = "serde", serde(rename = "raw_logprobs"))]
    Raw,
}

/// The parameters of one row (one sequence of the batch). [`RowParams::default`] has every knob disabled: one draw at
/// temperature 1 with seed 0 at position 0. A disabled knob leaves the result bit-identical.
///
/// The order of operations is vLLM's (v1): raw logits of the head, `mask`, `logit_bias`, `banned` and `min_tokens`,
/// penalties, greedy or `temperature`, filters, draw; [`Order`] has the order of the filters, and others. A greedy row
/// (`temperature` 0) takes the largest logit, which filters keep; those that may drop it (`typical_p`, XTC) are refused
/// there.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct RowParams<'a> {
    /// The key of the row's noise. Rows of one seed and one position draw with the same noise, in one call and in any
    /// other: sequences that are to be independent need seeds of their own.
    pub seed: u64,
    /// The token's place in its sequence, up to [`POSITION_MAX`](crate::noise::POSITION_MAX). Never a batch index.
    pub position: u64,
    /// Divides the logits; 0 = greedy. Finite and not negative.
    pub temperature: f32,
    /// Number of draws; at least 1, and at most [`Plan::max_draws`](crate::Plan::max_draws).
    pub draws: u32,
    /// The number of the first draw: draws `first_draw .. first_draw + draws` of the row are made. With replacement
    /// the draw number selects the noise; without, it selects the noise of the whole list.
    pub first_draw: u32,
    /// Draw a list of different tokens (Gumbel-top-k, Kool et al. 2019), best score first. The first of them is the
    /// token that a draw with replacement gives.
    pub without_replacement: bool,
    /// `Some(n)`: log Z, the log-probability of each drawn token, and the `n` largest log-probabilities, in nats, of the
    /// law that `logprobs_mode` names. Needs [`Plan::max_logprobs`](crate::Plan::max_logprobs).
    pub logprobs: Option<u32>,
    /// Which law's log-probabilities `logprobs` asks for.
    pub logprobs_mode: LogprobsMode,
    /// Tokens whose log-probabilities are requested, in the law that `logprobs_mode` names: in any order, also more than
    /// once. Needs `logprobs`. vLLM's `logprob_token_ids`.
    pub logprob_token_ids: &'a [u32],
    /// Return the [rank](crate::RowSample::ranks) of each drawn token in the law that `logprobs_mode` names. Needs
    /// `logprobs`. A drawn token that is not among the `logprobs` largest takes a further pass over the logits.
    pub ranks: bool,
    /// Return which tokens the filters kept ([`Kept`](crate::sampler::samples::Kept)); refused on a greedy row, which has no law.
    pub kept: bool,
    /// Bitmap over global token ids, 1 = allowed: token `t` is bit `t % 32` of word `t / 32`, the least significant bit
    /// first. Tokens beyond its end are forbidden.
    pub mask: Option<&'a [u32]>,
    /// Added to the logits of single tokens, tokens strictly ascending; `-inf` bans a token.
    pub logit_bias: &'a [(u32, f32)],
    /// Tokens that are not drawn, in any order.
    pub banned: &'a [u32],
    /// The sequence so far, for the penalties and `min_tokens`; `None` = nothing was generated, and no prompt.
    pub history: Option<&'a History>,
    /// While `history` has fewer generated tokens than this, `stop_token_ids` are not drawn.
    pub min_tokens: u32,
    /// The tokens that end a sequence.
    pub stop_token_ids: &'a [u32],
    /// Divides positive and multiplies other logits of the tokens in `history`, prompt included; 1 = off.
    pub repetition_penalty: f32,
    /// Subtracted from a token's logit for each time it was generated; 0 = off.
    pub frequency_penalty: f32,
    /// Subtracted from a token's logit if it was generated; 0 = off.
    pub presence_penalty: f32,
    /// Don't repeat yourself (DRY): a token that would continue a repetition of length `n >= dry_allowed_length` (the
    /// longest run of last tokens that stood in `history` before, right before this token) loses
    /// `dry_multiplier * dry_base^(n - dry_allowed_length)` of its logit; 0 = off.
    pub dry_multiplier: f32,
    /// See `dry_multiplier`; at least 1.
    pub dry_base: f32,
    /// See `dry_multiplier`; 0 counts as 1.
    pub dry_allowed_length: u32,
    /// How many of the last tokens of `history` are looked at for repetitions.
    pub dry_penalty_last_n: u32,
    /// Tokens that no repetition contains, ascending.
    pub dry_sequence_breakers: &'a [u32],
    /// Keep the `top_k` largest logits, of equal ones the lower token; 0, or as many as the vocabulary has, = off. What
    /// samplers keep of a pass is for small ones: on a processor 1025 and more always take a second pass.
    pub top_k: u32,
    /// Keep the smallest set of largest probabilities that reaches `top_p`, the token that reaches it included; 1 = off.
    pub top_p: f32,
    /// Keep probabilities of at least `min_p` times the largest; 0 = off.
    pub min_p: f32,
    /// Keep logits of at least the largest less this many standard deviations of the row's logits; 0 = off.
    /// The deviation is off by at most 2^-32 nat before the temperature; logits beyond 2^28 in size may count as that there.
    pub top_n_sigma: f32,
    /// Keep probabilities of at least this; 0 = off.
    pub epsilon_cutoff: f32,
    /// Keep the tokens whose surprisal is nearest to the entropy until their probability reaches this; 1 = off. Of
    /// equal logits at the entropy or below it the lower tokens come first, of others the higher.
    pub typical_p: f32,
    /// Exclude top choices: of the tokens with at least this probability drop all but the least probable one; see
    /// `xtc_probability`.
    pub xtc_threshold: f32,
    /// How probable it is that `xtc_threshold` applies; one coin for all draws of the row. 0 = off.
    pub xtc_probability: f32,
    /// The order of the filters.
    pub order: Order,
}

impl Default for RowParams<'_> {
    fn default() -> Self {
        RowParams {
            seed: 0,
            position: 0,
            temperature: 1.0,
            draws: 1,
            first_draw: 0,
            without_replacement: false,
            logprobs: None,
            logprobs_mode: LogprobsMode::Processed,
            logprob_token_ids: &[],
            ranks: false,
            kept: false,
            mask: None,
            logit_bias: &[],
            banned: &[],
            history: None,
            min_tokens: 0,
            stop_token_ids: &[],
            repetition_penalty: 1.0,
            frequency_penalty: 0.0,
            presence_penalty: 0.0,
            dry_multiplier: 0.0,
            dry_base: 1.75,
            dry_allowed_length: 2,
            dry_penalty_last_n: u32::MAX,
            dry_sequence_breakers: &[],
            top_k: 0,
            top_p: 1.0,
            min_p: 0.0,
            top_n_sigma: 0.0,
            epsilon_cutoff: 0.0,
            typical_p: 1.0,
            xtc_threshold: 0.1,
            xtc_probability: 0.0,
            order: Order::default(),
        }
    }
}

/// The largest size of a frequency or presence penalty, 2^64: times any count it is finite.
pub(crate) const LARGEST_PENALTY: f32 = 18_446_744_073_709_551_616.0;
