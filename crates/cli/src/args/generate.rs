//! Flags of `generate`.

use super::rows::{LogitBias, Mode, logit_biases, temperature};
use super::sequence::{Tokens, ascending, tokens};
use super::{FilterArgs, Format, PenaltyArgs, SamplerArgs, values};
use crate::error::CommandError;
use crate::idle;
use clap::Args;
use flash_sampling::{History, RowParams};
use std::path::PathBuf;

/// The most sequences of a batch.
const MAX_SEQUENCES: u32 = 4096;

/// Flags of `generate`.
#[derive(Debug, Args)]
pub struct GenerateArgs {
    /// What is written, by which model.
    #[command(flatten)]
    pub text: TextArgs,
    /// How tokens are drawn.
    #[command(flatten)]
    pub draws: DrawArgs,
    /// Penalties.
    #[command(flatten)]
    pub penalties: PenaltyArgs,
    /// Filters.
    #[command(flatten)]
    pub filters: FilterArgs,
    /// Backend and variant of the head and the draw; the layers before it are always run on the CPU.
    #[command(flatten)]
    pub sampler: SamplerArgs,
    /// How results are written: a text for people as it comes, or one JSON object for each sequence.
    #[arg(long, value_enum, default_value_t = Format::Text)]
    pub format: Format,
    /// Tell at the end how fast it was, which share of the time went into head and draw, and how many draws took more than
    /// one pass.
    #[arg(long)]
    pub report: bool,
}

/// What is written, by which model.
#[derive(Clone, Debug, Args)]
#[command(next_help_heading = "Model and text (without any: a built-in model that writes short stories)")]
pub struct TextArgs {
    /// A Hugging Face checkpoint folder of the Llama or Qwen3 family: config.json, tokenizer.json, safetensors in one file
    /// or in shards.
    #[arg(long, value_name = "DIR")]
    pub model: Option<PathBuf>,
    /// The text to go on from, as it is: no chat template is applied.
    #[arg(long, value_name = "TEXT", default_value = "", allow_hyphen_values = true)]
    pub prompt: String,
    /// Tokens to write, at most.
    #[arg(long, value_name = "N", default_value_t = 256, value_parser = values::whole(1..=u32::MAX), allow_negative_numbers = true)]
    pub max_tokens: u32,
    /// A text that ends a sequence, and is not written; may be given several times. The model's own end always ends it.
    #[arg(long, value_name = "TEXT", allow_hyphen_values = true, value_parser = stop)]
    pub stop: Vec<String>,
    /// A small model with the same tokens, which draws ahead: where the model draws the same tokens with the same noise, they
    /// are had for one run of its layers. The text is the same as without.
    #[arg(long, value_name = "DIR")]
    pub draft: Option<PathBuf>,
    /// Tokens that it draws ahead (default 4); for --draft.
    #[arg(long, value_name = "N", requires = "draft", value_parser = values::whole(1..=64_u32), allow_negative_numbers = true)]
    pub draft_tokens: Option<u32>,
    /// Sequences, run as one batch; sequence i has seed SEED + i, and is what that seed gives alone.
    #[arg(long, value_name = "N", default_value_t = 1, value_parser = values::whole(1..=MAX_SEQUENCES), allow_negative_numbers = true)]
    pub num_sequences: u32,
}

/// How tokens are drawn.
#[derive(Clone, Debug, Args)]
#[command(next_help_heading = "Draws")]
pub struct DrawArgs {
    /// Divides the logits; 0 takes the largest logit.
    #[arg(long, value_name = "T", default_value_t = 0.8, value_parser = temperature, allow_negative_numbers = true)]
    pub temperature: f32,
    /// The seed of the first sequence; -1 is none (default 0).
    #[arg(long, value_name = "SEED", value_parser = values::seed, allow_negative_numbers = true)]
    pub seed: Option<u64>,
    /// Decide near ties by a float64 sum in one fixed order.
    #[arg(long)]
    pub canonical: bool,
    /// Added to the logits of single tokens; -inf bans one.
    #[arg(long, value_name = "ID:VALUE,...", value_parser = logit_biases, allow_hyphen_values = true)]
    pub logit_bias: Option<LogitBias>,
    /// Tell the log-probability of each token that was drawn, and the N largest beside it; -1 = all.
    #[arg(long, value_name = "N", value_parser = values::logprobs, allow_negative_numbers = true)]
    pub logprobs: Option<u32>,
    /// Log-probabilities of which law: the one that is drawn from, or the model's own, before biases, penalties, temperature
    /// and filters.
    #[arg(long, value_enum, default_value_t = Mode::Processed, requires = "logprobs")]
    pub logprobs_mode: Mode,
    /// Tokens that end a sequence, beside the model's own end, and are not written.
    #[arg(long, value_name = "A,B,...", value_parser = tokens, allow_hyphen_values = true)]
    pub stop_token_ids: Option<Tokens>,
    /// The only tokens that may be drawn.
    #[arg(long, value_name = "A,B,...", value_parser = tokens, allow_hyphen_values = true)]
    pub allowed_token_ids: Option<Tokens>,
    /// Tokens that are not drawn.
    #[arg(long, value_name = "A,B,...", value_parser = tokens, allow_hyphen_values = true)]
    pub banned_token_ids: Option<Tokens>,
    /// Tokens that no repetition contains, for --dry-multiplier.
    #[arg(long, value_name = "A,B,...", value_parser = ascending, allow_hyphen_values = true)]
    pub dry_sequence_breakers: Option<Tokens>,
    /// How tokens are drawn from a JSON file instead: one object for every sequence, or an array with one for each, with the
    /// fields of vLLM's SamplingParams and their defaults (temperature 1). A seed in it is taken as it is.
    #[arg(long, value_name = "FILE", conflicts_with_all = OF_THE_FILE)]
    pub params: Option<PathBuf>,
}

impl GenerateArgs {
    /// Refuses values that mean nothing, alone or beside the others, as far as they are told without a model.
    ///
    /// # Errors
    /// [`CommandError::Usage`], naming the flag.
    pub fn check(&self) -> Result<(), CommandError> {
        // What ends a sequence is the model's to say.
        let row = self.row(idle::written(), &[0], None);
        values::check(&row)?;
        let (least, most) = (self.penalties.min_tokens, self.text.max_tokens);
        if least > most {
            return Err(CommandError::usage(format!("--min-tokens is {least}, but --max-tokens is {most}")));
        }
        values::refuse(&idle::knobs(&row))
    }

    /// Warns of flags that change nothing beside the others, once nothing is refused.
    pub fn tell_idle(&self) {
        values::tell(&idle::knobs(&self.row(idle::written(), &[0], None)));
    }

    /// Refuses flags that change nothing where `stops` end a sequence.
    ///
    /// # Errors
    /// [`CommandError::Usage`], naming the flag.
    pub fn check_stops(&self, stops: &[u32]) -> Result<(), CommandError> {
        values::refuse(&idle::knobs(&self.row(idle::written(), stops, None)))
    }

    /// What the flags say of the token after `history`; seed and position are the caller's.
    pub fn row<'a>(&'a self, history: &'a History, stops: &'a [u32], mask: Option<&'a [u32]>) -> RowParams<'a> {
        let draws = &self.draws;
        let row = RowParams {
            temperature: draws.temperature,
            logprobs: draws.logprobs,
            logprobs_mode: draws.logprobs_mode.into(),
            logit_bias: draws.logit_bias.as_deref().unwrap_or_default(),
            history: Some(history),
            stop_token_ids: stops,
            mask,
            banned: draws.banned_token_ids.as_deref().unwrap_or_default(),
            dry_sequence_breakers: draws.dry_sequence_breakers.as_deref().unwrap_or_default(),
            ..RowParams::default()
        };
        self.penalties.apply(self.filters.apply(row))
    }
}

/// What `--params` stands in place of.
pub(crate) const OF_THE_FILE: [&str; 25] = [
    "temperature",
    "logit_bias",
    "logprobs",
    "logprobs_mode",
    "stop_token_ids",
    "allowed_token_ids",
    "banned_token_ids",
    "dry_sequence_breakers",
    "top_k",
    "top_p",
    "min_p",
    "top_n_sigma",
    "epsilon_cutoff",
    "typical_p",
    "xtc_threshold",
    "xtc_probability",
    "order",
    "repetition_penalty",
    "frequency_penalty",
    "presence_penalty",
    "dry_multiplier",
    "dry_base",
    "dry_allowed_length",
    "dry_penalty_last_n",
    "min_tokens",
];

fn stop(text: &str) -> Result<String, String> {
    if text.is_empty() { Err("an empty text would stop before anything".into()) } else { Ok(text.into()) }
}
