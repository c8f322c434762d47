//! Flags that say what is drawn.

use crate::args::filters::FilterArgs;
use crate::args::penalties::PenaltyArgs;
use crate::args::sequence::{SequenceArgs, Tokens, tokens};
use crate::args::values;
use crate::error::CommandError;
use crate::idle;
use crate::load::logit_bias;
use clap::{Args, ValueEnum};
use flash_sampling::noise::POSITION_MAX;
use flash_sampling::{History, LogprobsMode, RowParams};
use std::path::PathBuf;

/// The most draws of a row.
pub(crate) const MAX_DRAWS: u32 = 10_000_000;

/// What is drawn.
#[derive(Clone, Debug, Args)]
#[command(next_help_heading = "Draws")]
pub struct RowArgs {
    /// Divides the logits; 0 takes the largest logit.
    #[arg(long, value_name = "T", default_value_t = 1.0, value_parser = temperature, allow_negative_numbers = true)]
    pub temperature: f32,
    /// The seed of all rows; -1 is none (default 0).
    #[arg(long, value_name = "SEED", value_parser = values::seed, allow_negative_numbers = true)]
    pub seed: Option<u64>,
    /// Row r draws at position P + r of the one seed; with --seeds every row draws at P.
    #[arg(long, value_name = "P", default_value_t = 0, value_parser = values::whole(0..=POSITION_MAX), allow_negative_numbers = true)]
    pub position: u64,
    /// A seed for each row.
    #[arg(long, value_name = "A,B,...", value_delimiter = ',', value_parser = values::whole(0..=u64::MAX), conflicts_with = "seed", allow_hyphen_values = true)]
    pub seeds: Option<Vec<u64>>,
    /// Draws of each row, up to 10000000.
    #[arg(long, value_name = "N", default_value_t = 1, value_parser = values::whole(1..=MAX_DRAWS), allow_negative_numbers = true)]
    pub draws: u32,
    /// Draw different tokens, best score first.
    #[arg(long)]
    pub without_replacement: bool,
    /// Decide near ties by a float64 sum in one fixed order, so that the tokens are equal on every machine.
    #[arg(long)]
    pub canonical: bool,
    /// Bitmaps of allowed tokens: a .npy file of uint32 words, one row of them or one for each row, lowest bit first.
    #[arg(long, value_name = "FILE")]
    pub mask: Option<PathBuf>,
    /// The only tokens that may be drawn, of every row.
    #[arg(long, value_name = "A,B,...", value_parser = tokens, allow_hyphen_values = true, conflicts_with = "mask")]
    pub allowed_token_ids: Option<Tokens>,
    /// Added to the logits of single tokens; -inf bans one.
    #[arg(long, value_name = "ID:VALUE,...", value_parser = logit_biases, allow_hyphen_values = true)]
    pub logit_bias: Option<LogitBias>,
    /// How many of the largest log-probabilities to list, -1 = all; tokens that cannot be drawn are not listed.
    #[arg(long, value_name = "N", default_value_t = 0, value_parser = values::logprobs, allow_negative_numbers = true)]
    pub logprobs: u32,
    /// Log-probabilities of which law: the one that is drawn from, or the model's own, before masks, biases, penalties,
    /// temperature and filters.
    #[arg(long, value_enum, default_value_t = Mode::Processed)]
    pub logprobs_mode: Mode,
    /// Tell which tokens the filters kept, how many, and the logarithm of their mass; not of greedy rows.
    #[arg(long)]
    pub kept: bool,
    /// All of this from a JSON file instead: one object for every row, or an array with one for each, with the fields of
    /// vLLM's SamplingParams, and prompt_token_ids and output_token_ids. Row r draws at position P + r whether the seed is its
    /// own or --seed.
    #[arg(long, value_name = "FILE", conflicts_with_all = OF_THE_FILE)]
    pub params: Option<PathBuf>,
    #[command(flatten)]
    #[allow(missing_docs)]
    pub filters: FilterArgs,
    #[command(flatten)]
    #[allow(missing_docs)]
    pub penalties: PenaltyArgs,
    #[command(flatten)]
    #[allow(missing_docs)]
    pub sequence: SequenceArgs,
}

impl RowArgs {
    /// Refuses values that mean nothing, alone or beside the others, as far as they are told without a head.
    ///
    /// # Errors
    /// [`CommandError::Usage`], naming the flag.
    pub fn check(&self) -> Result<(), CommandError> {
        let history = self.sequence.history();
        let row = self.row(history.as_ref(), None);
        values::check(&row)?;
        values::refuse(&[idle::knobs(&row), idle::lists(&row)].concat())
    }

    /// Warns of flags that change nothing beside the others, once nothing is refused.
    pub fn tell_idle(&self) {
        values::tell(&idle::knobs(&self.row(self.sequence.history().as_ref(), None)));
    }

    /// What the flags say of every row; seed and position are the caller's.
    pub fn row<'a>(&'a self, history: Option<&'a History>, mask: Option<&'a [u32]>) -> RowParams<'a> {
        let params = RowParams {
            temperature: self.temperature,
            without_replacement: self.without_replacement,
            logprobs: Some(self.logprobs),
            logprobs_mode: self.logprobs_mode.into(),
            kept: self.kept,
            mask,
            logit_bias: self.logit_bias.as_deref().unwrap_or_default(),
            ..RowParams::default()
        };
        self.sequence.apply(history, self.penalties.apply(self.filters.apply(params)))
    }
}

/// What `--params` stands in place of.
pub(crate) const OF_THE_FILE: [&str; 31] = [
    "temperature",
    "draws",
    "without_replacement",
    "mask",
    "allowed_token_ids",
    "logit_bias",
    "logprobs",
    "logprobs_mode",
    "kept",
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
    "prompt_tokens",
    "output_tokens",
    "stop_token_ids",
    "banned_token_ids",
    "dry_sequence_breakers",
];

/// Which law log-probabilities are of.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum Mode {
    /// The law that is drawn from.
    Processed,
    /// The model's own.
    Raw,
}

impl From<Mode> for LogprobsMode {
    fn from(mode: Mode) -> Self {
        match mode {
            Mode::Processed => LogprobsMode::Processed,
            Mode::Raw => LogprobsMode::Raw,
        }
    }
}

/// Biases by token, ascending.
pub type LogitBias = std::sync::Arc<[(u32, f32)]>;

pub(super) fn logit_biases(text: &str) -> Result<LogitBias, String> {
    logit_bias::parse(text).map(LogitBias::from)
}

pub(super) fn temperature(text: &str) -> Result<f32, String> {
    match values::float(text)? {
        t if t >= 0.0 && t.is_finite() => Ok(t),
        _ => Err("it must be finite and not negative".into()),
    }
}
