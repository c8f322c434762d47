//! The parameters of rows.
//!
//! | module | content |
//! | --- | --- |
//! | this module | [`RowParams`], the parameters of a row, and [`Row`], the checked parameters |
//! | [`sampling_params`] | [`SamplingParams`](sampling_params::SamplingParams): the parameters of a request, owned, with vLLM's names |
//! | [`knob`] | the names of knobs, and sets of knobs |
//! | [`transform`] | masks and temperature: logits to scores (Alg. 1, line 3) |
//! | [`filters`] | top-k, top-p and the other filters |
//! | [`history`], [`repetitions`], [`adjustments`] | a sequence's tokens, and the penalties, bans and biases of a row |

use crate::params::filters::Order;
use crate::params::history::History;
pub use row::Row;
pub use row_buffer::RowBuffer;

pub(crate) mod adjustments;
mod digest;
pub(crate) mod filters;
pub(crate) mod history;
pub(crate) mod knob;
mod repetitions;
mod row;
mod row_buffer;
pub(crate) mod sampling_params;
pub(crate) mod transform;

/// The law of log-probabilities.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
#[cfg_attr(feature = "serde", derive(serde::Deserialize, serde::Serialize))]
#[non_exhaustive]
pub enum LogprobsMode {
    /// The law of the draws: after masks, biases, penalties and temperature, over the tokens that the filters keep. A
    /// greedy row has temperature 1 and no filters here. vLLM's `processed_logprobs`.
    #[default]
    #[cfg_attr(feature = "serde", serde(rename = "processed_logprobs"))]
    Processed,
    /// The law of the model: the softmax of the head's logits, before all parameters of the row, including its mask.
    /// vLLM's `raw_logprobs`; vLLM computes these after a grammar's bitmap.
    #[cfg_attr(feature = "serde", serde(rename = "raw_logprobs"))]
    Raw,
}

/// The parameters of one row (one sequence of the batch). [`RowParams::default`] has every knob disabled: one draw at
/// temperature 1 with seed 0 at position 0. A disabled knob leaves the result bit-identical.
///
/// The order of operations is vLLM's (v1): raw logits of the head, `mask`, `logit_bias`, `banned` and `min_tokens`,
/// penalties, greedy or `temperature`, filters, draw. [`Order`] has the order of the filters, and other orders. A
/// greedy row (`temperature` 0) draws the largest logit, which most filters keep. `typical_p` and XTC may drop the
/// largest logit, so samplers refuse a greedy row with either.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct RowParams<'a> {
    /// The key of the row's noise. Rows with the same seed and position have the same noise, in every call. Independent
    /// sequences need different seeds.
    pub seed: u64,
    /// The token's index in its sequence, up to [`POSITION_MAX`](crate::noise::POSITION_MAX). Never a batch index.
    pub position: u64,
    /// Divides the logits; 0 = greedy. Finite and not negative.
    pub temperature: f32,
    /// Number of draws; at least 1, and at most [`Plan::max_draws`](crate::Plan::max_draws).
    pub draws: u32,
    /// The number of the first draw. The row has the draws `first_draw .. first_draw + draws`. With replacement, the
    /// number of a draw selects its noise. Without replacement, `first_draw` selects the noise of the whole list.
    pub first_draw: u32,
    /// Draw a list of different tokens (Gumbel-top-k, Kool et al. 2019), best score first. The first token is the draw
    /// with replacement.
    pub without_replacement: bool,
    /// `Some(n)`: log Z, the log-probability of each drawn token, and the `n` largest log-probabilities, in nats, of
    /// the law that `logprobs_mode` names. Needs [`Plan::max_logprobs`](crate::Plan::max_logprobs).
    pub logprobs: Option<u32>,
    /// The law of the log-probabilities that `logprobs` requests.
    pub logprobs_mode: LogprobsMode,
    /// Tokens with requested log-probabilities, in the law that `logprobs_mode` names. Any order and duplicates are
    /// allowed. Needs `logprobs`. vLLM's `logprob_token_ids`.
    pub logprob_token_ids: &'a [u32],
    /// Return the [rank](crate::RowSample::ranks) of each drawn token in the law that `logprobs_mode` names. Needs
    /// `logprobs`. A drawn token outside the `logprobs` largest takes a further pass over the logits.
    pub ranks: bool,
    /// Return the tokens that the filters keep ([`Kept`](crate::sampler::samples::Kept)). Refused for a greedy row.
    pub kept: bool,
    /// Bitmap over global token ids, 1 = allowed: token `t` is bit `t % 32` of word `t / 32`, the least significant bit
    /// first. Tokens beyond its end are forbidden.
    pub mask: Option<&'a [u32]>,
    /// Biases of single tokens, added to their logits; tokens strictly ascending. `-inf` bans a token.
    pub logit_bias: &'a [(u32, f32)],
    /// Tokens that the row never draws, in any order.
    pub banned: &'a [u32],
    /// The sequence so far, for the penalties and `min_tokens`; `None` = neither prompt nor generated tokens.
    pub history: Option<&'a History>,
    /// The row draws no token of `stop_token_ids` while `history` has fewer generated tokens than this number.
    pub min_tokens: u32,
    /// The tokens that end a sequence.
    pub stop_token_ids: &'a [u32],
    /// Divides positive and multiplies other logits of the tokens in `history`, prompt included; 1 = off.
    pub repetition_penalty: f32,
    /// Subtracted from a token's logit for each time it was generated; 0 = off.
    pub frequency_penalty: f32,
    /// Subtracted from a token's logit if it was generated; 0 = off.
    pub presence_penalty: f32,
    /// Don't repeat yourself (DRY): penalizes a token that would continue a repetition; 0 = off.
    ///
    /// The length `n` of the repetition is that of the longest suffix of `history` with an earlier occurrence right
    /// before the token. If `n >= dry_allowed_length`, the logit decreases by
    /// `dry_multiplier * dry_base^(n - dry_allowed_length)`.
    pub dry_multiplier: f32,
    /// See `dry_multiplier`; at least 1.
    pub dry_base: f32,
    /// See `dry_multiplier`; 0 counts as 1.
    pub dry_allowed_length: u32,
    /// The number of last tokens of `history` that DRY searches for repetitions.
    pub dry_penalty_last_n: u32,
    /// Tokens that no repetition contains, ascending.
    pub dry_sequence_breakers: &'a [u32],
    /// Keep the `top_k` largest logits, of equal logits the lower token first. The value 0, or at least the
    /// vocabulary's size, disables the filter. Samplers are fast for small values: on a CPU, 1025 and more always take
    /// a second pass.
    pub top_k: u32,
    /// Keep the smallest set of largest probabilities whose sum reaches `top_p`, including the last token; 1 = off.
    pub top_p: f32,
    /// Keep probabilities of at least `min_p` times the largest; 0 = off.
    pub min_p: f32,
    /// Keep logits of at least the largest minus this many standard deviations of the row's logits; 0 = off. The error
    /// of the deviation is at most 2^-32 nat before the temperature. A logit beyond +-2^28 may count as +-2^28.
    pub top_n_sigma: f32,
    /// Keep probabilities of at least this value; 0 = off.
    pub epsilon_cutoff: f32,
    /// Keep the tokens with surprisals nearest to the entropy until their total probability reaches this value;
    /// 1 = off. Of equal logits with a surprisal of at least the entropy, lower tokens come first; of others, higher
    /// tokens.
    pub typical_p: f32,
    /// Exclude top choices (XTC): of the tokens with at least this probability, keep only the least probable token; see
    /// `xtc_probability`.
    pub xtc_threshold: f32,
    /// The probability that `xtc_threshold` applies, by one coin for all draws of the row; 0 = off.
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

/// The largest absolute value of a frequency or presence penalty, 2^64. Its product with any count is finite.
pub(crate) const LARGEST_PENALTY: f32 = 18_446_744_073_709_551_616.0;
