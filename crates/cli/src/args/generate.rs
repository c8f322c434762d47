//! Flags of `generate`.

use super::rows::{LOGPROBS_MODES, LogitBias, logit_biases, temperature};
use super::sequence::{Tokens, ascending, tokens};
use super::{FilterArgs, Format, PenaltyArgs, SamplerArgs, flags_of, ineffective_flags, values};
use crate::error::CommandError;
use clap::{Args, Id};
use flash_sampling::{History, LogprobsMode, RowParams};
use std::path::PathBuf;

/// Maximum of sequences in a batch.
const MAX_SEQUENCES: u32 = 4096;

/// Flags of `generate`.
#[derive(Debug, Args)]
pub struct GenerateArgs {
    /// Model and text.
    #[command(flatten)]
    pub text: TextArgs,
    /// Draws.
    #[command(flatten)]
    pub draws: DrawArgs,
    /// Penalties.
    #[command(flatten)]
    pub penalties: PenaltyArgs,
    /// Filters.
    #[command(flatten)]
    pub filters: FilterArgs,
    /// Backend and variant of head and draw; the layers always run on the CPU.
    #[command(flatten)]
    pub sampler: SamplerArgs,
    /// Output format: text as it is drawn, or one JSON object per sequence.
    #[arg(long, value_enum, default_value_t = Format::Text, help_heading = "Output")]
    pub format: Format,
    /// Print at the end the speed, the share of head and draw in the time, and the number of draws with more than one pass.
    #[arg(long, help_heading = "Output")]
    pub report: bool,
}

/// Model and text.
#[derive(Clone, Debug, Args)]
#[command(next_help_heading = "Model and text (without any: a built-in model that writes short stories)")]
pub struct TextArgs {
    /// Checkpoint folder in Hugging Face layout, of the Llama or Qwen3 family: config.json, tokenizer.json, and safetensors
    /// in one file or in shards.
    #[arg(long, value_name = "DIR")]
    pub model: Option<PathBuf>,
    /// The beginning of the text, verbatim: no chat template is applied.
    #[arg(long, value_name = "TEXT", default_value = "", allow_hyphen_values = true)]
    pub prompt: String,
    /// Maximum of tokens to generate per sequence.
    #[arg(long, value_name = "N", default_value_t = 256, value_parser = values::whole(1..=u32::MAX), allow_negative_numbers = true)]
    pub max_tokens: u32,
    /// A text that ends a sequence and is not written; may be given several times. The model's end-of-sequence token always
    /// ends a sequence.
    #[arg(long, value_name = "TEXT", allow_hyphen_values = true, value_parser = stop)]
    pub stop: Vec<String>,
    /// Checkpoint folder of a draft model with the same tokenizer, for speculative decoding. The model verifies several draft
    /// tokens in one run of its layers. The text does not change.
    #[arg(long, value_name = "DIR")]
    pub draft: Option<PathBuf>,
    /// Draft tokens per step (default 4); for --draft.
    #[arg(long, value_name = "N", requires = "draft", value_parser = values::whole(1..=64_u32), allow_negative_numbers = true)]
    pub draft_tokens: Option<u32>,
    /// Number of sequences in the batch. Sequence i has seed SEED + i, and is the same as in a run of its own.
    #[arg(long, short = 'n', alias = "n", value_name = "N", default_value_t = 1, value_parser = values::whole(1..=MAX_SEQUENCES), allow_negative_numbers = true)]
    pub num_sequences: u32,
}

/// Draws.
#[derive(Clone, Debug, Args)]
#[command(next_help_heading = "Draws")]
pub struct DrawArgs {
    /// Divides the logits; 0 = draw the largest logit.
    #[arg(long, value_name = "T", default_value_t = 0.8, value_parser = temperature, allow_negative_numbers = true)]
    pub temperature: f32,
    /// The seed of the first sequence; -1 is none (default 0).
    #[arg(long, value_name = "SEED", value_parser = values::seed, allow_negative_numbers = true)]
    pub seed: Option<u64>,
    /// Decide near ties by float64 sums in a fixed order.
    #[arg(long)]
    pub canonical: bool,
    /// Added to the logits of single tokens; -inf bans one.
    #[arg(long, value_name = "ID:VALUE,...", value_parser = logit_biases, allow_hyphen_values = true)]
    pub logit_bias: Option<LogitBias>,
    /// Print the log-probability of each drawn token and the N largest log-probabilities; -1 = all.
    #[arg(long, value_name = "N", value_parser = values::logprobs, allow_negative_numbers = true)]
    pub logprobs: Option<u32>,
    /// Log-probabilities of the distribution that is drawn from, or of the model's raw logits before biases, penalties,
    /// temperature and filters.
    #[arg(long, value_parser = values::choice(LOGPROBS_MODES), default_value = "processed", requires = "logprobs")]
    pub logprobs_mode: LogprobsMode,
    /// Further tokens that end a sequence and are not written.
    #[arg(long, value_name = "A,B,...", value_parser = tokens, allow_hyphen_values = true)]
    pub stop_token_ids: Option<Tokens>,
    /// The only tokens that may be drawn.
    #[arg(long, value_name = "A,B,...", value_parser = tokens, allow_hyphen_values = true)]
    pub allowed_token_ids: Option<Tokens>,
    /// Tokens that must not be drawn.
    #[arg(long, value_name = "A,B,...", value_parser = tokens, allow_hyphen_values = true)]
    pub banned_token_ids: Option<Tokens>,
    /// Tokens that interrupt a repetition, for --dry-multiplier.
    #[arg(long, value_name = "A,B,...", value_parser = ascending, allow_hyphen_values = true)]
    pub dry_sequence_breakers: Option<Tokens>,
    /// Read these parameters from a JSON file: one object for every sequence, or an array with one object per sequence. Fields
    /// and defaults are those of vLLM's SamplingParams (temperature 1). A seed in the file is used as it is.
    #[arg(long, value_name = "FILE", conflicts_with_all = excluded_by_params())]
    pub params: Option<PathBuf>,
}

impl GenerateArgs {
    /// Refuses values out of range and flags without effect, before a model is read.
    ///
    /// # Errors
    /// [`CommandError::Usage`], which names the flag.
    pub fn check(&self) -> Result<(), CommandError> {
        // The model has tokens that end a sequence.
        let row = self.row(ineffective_flags::placeholder_history(), &[0], None);
        values::check(&row)?;
        let (least, most) = (self.penalties.min_tokens, self.text.max_tokens);
        if least > most {
            return Err(CommandError::usage(format!("--min-tokens is {least}, but --max-tokens is {most}")));
        }
        ineffective_flags::refuse(&ineffective_flags::knobs(&row))
    }

    /// Refuses flags without effect if the tokens `stops` end a sequence, and warns of filters of greedy draws.
    ///
    /// # Errors
    /// [`CommandError::Usage`], which names the flag.
    pub fn check_stops(&self, stops: &[u32]) -> Result<(), CommandError> {
        let row = self.row(ineffective_flags::placeholder_history(), stops, None);
        let ineffective = ineffective_flags::knobs(&row);
        ineffective_flags::refuse(&ineffective)?;
        ineffective_flags::warn(&ineffective);
        Ok(())
    }

    /// The flags as parameters of the token after `history`; the caller sets seed and position.
    pub fn row<'a>(&'a self, history: &'a History, stops: &'a [u32], mask: Option<&'a [u32]>) -> RowParams<'a> {
        let draws = &self.draws;
        let row = RowParams {
            temperature: draws.temperature,
            logprobs: draws.logprobs,
            logprobs_mode: draws.logprobs_mode,
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

/// Flags that `--params` excludes.
fn excluded_by_params() -> Vec<Id> {
    let own = [
        "temperature",
        "allowed_token_ids",
        "logit_bias",
        "logprobs",
        "logprobs_mode",
        "stop_token_ids",
        "banned_token_ids",
        "dry_sequence_breakers",
    ];
    [own.map(Id::from).to_vec(), flags_of::<FilterArgs>(), flags_of::<PenaltyArgs>()].concat()
}

fn stop(text: &str) -> Result<String, String> {
    if text.is_empty() { Err("an empty text would end every sequence at once".into()) } else { Ok(text.into()) }
}
