//! Flags of `sample` and `generate` for the parameters of a request, which `--params` replaces.

use super::values::{self, choice, float, whole};
use crate::input::logit_bias;
use clap::Args;
use flash_sampling::{LogprobsMode, Order, SamplingParamsBuilder};
use std::collections::BTreeMap;

/// Parameters of every row or sequence.
#[derive(Clone, Debug, Args)]
#[command(next_help_heading = "Draws")]
pub struct ParamArgs {
    /// Divides the logits; 0 = draw the largest logit (default: 1 in `sample`, 0.8 in `generate`).
    #[arg(long, value_name = "T", value_parser = temperature, allow_negative_numbers = true)]
    pub temperature: Option<f32>,
    /// The only tokens that may be drawn.
    #[arg(long, value_name = "A,B,...", value_delimiter = ',', value_parser = token, allow_hyphen_values = true)]
    pub allowed_token_ids: Option<Vec<u32>>,
    /// Tokens that must not be drawn.
    #[arg(long, value_name = "A,B,...", value_delimiter = ',', value_parser = token, allow_hyphen_values = true)]
    pub banned_token_ids: Vec<u32>,
    /// Added to the logits of single tokens; -inf bans one.
    #[arg(long, value_name = "ID:VALUE,...", value_parser = logit_bias::parse, allow_hyphen_values = true)]
    pub logit_bias: Option<BTreeMap<u32, f32>>,
    /// Number of largest log-probabilities to list, -1 = all; tokens that cannot be drawn are not listed.
    #[arg(long, value_name = "N", value_parser = values::logprobs, allow_negative_numbers = true)]
    pub logprobs: Option<u32>,
    /// Log-probabilities of the distribution that is drawn from, or of the model's raw logits before masks, biases,
    /// penalties, temperature and filters.
    #[arg(long, value_parser = choice(LOGPROBS_MODES), default_value = "processed")]
    pub logprobs_mode: LogprobsMode,
    /// Tokens that end a sequence: `generate` stops before them, and --min-tokens forbids them.
    #[arg(long, value_name = "A,B,...", value_delimiter = ',', value_parser = token, allow_hyphen_values = true)]
    pub stop_token_ids: Vec<u32>,
    /// Filters.
    #[command(flatten)]
    pub filters: FilterArgs,
    /// Penalties.
    #[command(flatten)]
    pub penalties: PenaltyArgs,
}

/// Filters.
#[derive(Clone, Debug, Args)]
#[command(next_help_heading = "Filters")]
pub struct FilterArgs {
    /// Keep the K largest logits; 0 or -1 = all.
    #[arg(long, value_name = "K", default_value_t = 0, value_parser = whole(-1..=i32::MAX), allow_negative_numbers = true)]
    pub top_k: i32,
    /// Keep the most probable tokens until their total probability reaches P; 1 = all.
    #[arg(long, value_name = "P", default_value_t = 1.0, value_parser = float, allow_negative_numbers = true)]
    pub top_p: f32,
    /// Keep probabilities of at least P times the largest; 0 = all.
    #[arg(long, value_name = "P", default_value_t = 0.0, value_parser = float, allow_negative_numbers = true)]
    pub min_p: f32,
    /// Keep logits within N standard deviations of the largest; 0 = all.
    #[arg(long, value_name = "N", default_value_t = 0.0, value_parser = float, allow_negative_numbers = true)]
    pub top_n_sigma: f32,
    /// Keep probabilities of at least P; 0 = all.
    #[arg(long, value_name = "P", default_value_t = 0.0, value_parser = float, allow_negative_numbers = true)]
    pub epsilon_cutoff: f32,
    /// Keep the tokens with surprisal nearest to the entropy until their total probability reaches P; 1 = all.
    #[arg(long, value_name = "P", default_value_t = 1.0, value_parser = float, allow_negative_numbers = true)]
    pub typical_p: f32,
    /// XTC (exclude top choices): drop all tokens with at least this probability except the least probable one.
    #[arg(long, value_name = "P", default_value_t = 0.1, value_parser = float, allow_negative_numbers = true)]
    pub xtc_threshold: f32,
    /// Probability that XTC applies to a row; 0 = off.
    #[arg(long, value_name = "P", default_value_t = 0.0, value_parser = float, allow_negative_numbers = true)]
    pub xtc_probability: f32,
    /// Order of temperature and filters, as in this engine.
    #[arg(long, value_parser = choice(ORDERS), default_value = "vllm")]
    pub order: Order,
}

/// Penalties by the sequence so far.
#[derive(Clone, Debug, Args)]
#[command(next_help_heading = "Penalties")]
pub struct PenaltyArgs {
    /// Divides positive logits and multiplies negative logits of tokens in prompt and output; 1 = off.
    #[arg(long, value_name = "X", default_value_t = 1.0, value_parser = float, allow_negative_numbers = true)]
    pub repetition_penalty: f32,
    /// Subtracted from a token's logit for each occurrence in the output; 0 = off.
    #[arg(long, value_name = "X", default_value_t = 0.0, value_parser = float, allow_negative_numbers = true)]
    pub frequency_penalty: f32,
    /// Subtracted from the logits of tokens in the output; 0 = off.
    #[arg(long, value_name = "X", default_value_t = 0.0, value_parser = float, allow_negative_numbers = true)]
    pub presence_penalty: f32,
    /// DRY: subtracted from the logit of a token that would extend a repetition of --dry-allowed-length tokens, times
    /// --dry-base for each further token; 0 = off.
    #[arg(long, value_name = "X", default_value_t = 0.0, value_parser = float, allow_negative_numbers = true)]
    pub dry_multiplier: f32,
    /// See --dry-multiplier.
    #[arg(long, value_name = "X", default_value_t = 1.75, value_parser = float, allow_negative_numbers = true)]
    pub dry_base: f32,
    /// See --dry-multiplier.
    #[arg(long, value_name = "N", default_value_t = 2, value_parser = whole(0..=u32::MAX), allow_negative_numbers = true)]
    pub dry_allowed_length: u32,
    /// Number of last tokens that DRY searches for repetitions; -1 = the whole sequence.
    #[arg(long, value_name = "N", default_value_t = -1, value_parser = whole(-1..=i32::MAX), allow_negative_numbers = true)]
    pub dry_penalty_last_n: i32,
    /// Tokens that interrupt a repetition, for --dry-multiplier.
    #[arg(long, value_name = "A,B,...", value_delimiter = ',', value_parser = token, allow_hyphen_values = true)]
    pub dry_sequence_breakers: Vec<u32>,
    /// Minimum of tokens before the sequence may end.
    #[arg(long, value_name = "N", default_value_t = 0, value_parser = whole(0..=u32::MAX), allow_negative_numbers = true)]
    pub min_tokens: u32,
}

const LOGPROBS_MODES: &[(&str, &str, LogprobsMode)] = &[
    ("processed", "the distribution that is drawn from", LogprobsMode::Processed),
    ("raw", "the model's raw logits", LogprobsMode::Raw),
];

const ORDERS: &[(&str, &str, Order)] = &[
    ("vllm", "temperature, top-n-sigma, min-p, top-k, top-p, typical-p, epsilon, XTC", Order::Vllm),
    ("hugging-face", "temperature, top-n-sigma, top-k, top-p, min-p, typical-p, epsilon, XTC", Order::HuggingFace),
    ("llama-cpp", "top-n-sigma, top-k, typical-p, top-p, min-p, epsilon, XTC, temperature", Order::LlamaCpp),
];

pub(super) fn token(id: &str) -> Result<u32, String> {
    id.trim().parse().map_err(|_| format!("{id:?} is not a token id"))
}

fn temperature(text: &str) -> Result<f32, String> {
    match float(text)? {
        t if t >= 0.0 && t.is_finite() => Ok(t),
        _ => Err("it must be finite and not negative".into()),
    }
}

impl ParamArgs {
    /// The fields of a request with the values of the flags. `temperature` is the default.
    pub(crate) fn fields(&self, temperature: f32) -> SamplingParamsBuilder {
        let ParamArgs { filters, penalties, .. } = self.clone();
        SamplingParamsBuilder {
            temperature: self.temperature.unwrap_or(temperature),
            allowed_token_ids: self.allowed_token_ids.clone(),
            banned_token_ids: self.banned_token_ids.clone(),
            logit_bias: self.logit_bias.clone().unwrap_or_default(),
            logprobs: self.logprobs,
            logprobs_mode: self.logprobs_mode,
            stop_token_ids: self.stop_token_ids.clone(),
            top_k: filters.top_k,
            top_p: filters.top_p,
            min_p: filters.min_p,
            top_n_sigma: filters.top_n_sigma,
            epsilon_cutoff: filters.epsilon_cutoff,
            typical_p: filters.typical_p,
            xtc_threshold: filters.xtc_threshold,
            xtc_probability: filters.xtc_probability,
            order: filters.order,
            repetition_penalty: penalties.repetition_penalty,
            frequency_penalty: penalties.frequency_penalty,
            presence_penalty: penalties.presence_penalty,
            dry_multiplier: penalties.dry_multiplier,
            dry_base: penalties.dry_base,
            dry_allowed_length: penalties.dry_allowed_length,
            dry_penalty_last_n: penalties.dry_penalty_last_n,
            dry_sequence_breakers: penalties.dry_sequence_breakers,
            min_tokens: penalties.min_tokens,
            ..SamplingParamsBuilder::default()
        }
    }
}
