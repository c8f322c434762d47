//! Flags of the draws of `sample`.

use crate::args::filters::FilterArgs;
use crate::args::ineffective_flags;
use crate::args::penalties::PenaltyArgs;
use crate::args::sequence::{SequenceArgs, Tokens, tokens};
use crate::args::values::choice;
use crate::args::{flags_of, values};
use crate::error::CommandError;
use crate::input::logit_bias;
use clap::{Args, Id};
use flash_sampling::noise::POSITION_MAX;
use flash_sampling::{History, LogprobsMode, RowParams};
use std::path::PathBuf;

/// Maximum of draws of a row.
pub(crate) const MAX_DRAWS: u32 = 10_000_000;

/// The draws of every row.
#[derive(Clone, Debug, Args)]
#[command(next_help_heading = "Draws")]
pub struct RowArgs {
    /// Divides the logits; 0 = draw the largest logit.
    #[arg(long, value_name = "T", default_value_t = 1.0, value_parser = temperature, allow_negative_numbers = true)]
    pub temperature: f32,
    /// The seed of all rows; -1 is none (default 0).
    #[arg(long, value_name = "SEED", value_parser = values::seed, allow_negative_numbers = true)]
    pub seed: Option<u64>,
    /// Position of the noise: row r draws at position P + r of the seed; with --seeds every row draws at P.
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
    /// Decide near ties by float64 sums in a fixed order, so that every machine draws the same tokens.
    #[arg(long)]
    pub canonical: bool,
    /// Bitmaps of allowed tokens: a .npy file of uint32 words, lowest bit first, with one row or one per hidden state.
    #[arg(long, value_name = "FILE")]
    pub mask: Option<PathBuf>,
    /// The only tokens that every row may draw.
    #[arg(long, value_name = "A,B,...", value_parser = tokens, allow_hyphen_values = true, conflicts_with = "mask")]
    pub allowed_token_ids: Option<Tokens>,
    /// Added to the logits of single tokens; -inf bans one.
    #[arg(long, value_name = "ID:VALUE,...", value_parser = logit_biases, allow_hyphen_values = true)]
    pub logit_bias: Option<LogitBias>,
    /// Number of largest log-probabilities to list, -1 = all; tokens that cannot be drawn are not listed.
    #[arg(long, value_name = "N", default_value_t = 0, value_parser = values::logprobs, allow_negative_numbers = true)]
    pub logprobs: u32,
    /// Log-probabilities of the distribution that is drawn from, or of the model's raw logits before masks, biases,
    /// penalties, temperature and filters.
    #[arg(long, value_parser = choice(LOGPROBS_MODES), default_value = "processed")]
    pub logprobs_mode: LogprobsMode,
    /// List the tokens that the filters kept, with their number and log-mass; not for greedy rows.
    #[arg(long)]
    pub kept: bool,
    /// Read these parameters from a JSON file: one object for every row, or an array with one object per row. The fields
    /// are those of vLLM's SamplingParams, prompt_token_ids and output_token_ids. Row r draws at position P + r, with its
    /// own seed or with --seed.
    #[arg(long, value_name = "FILE", conflicts_with_all = excluded_by_params())]
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
    /// Refuses values out of range and flags without effect, before a head is read.
    ///
    /// # Errors
    /// [`CommandError::Usage`], which names the flag.
    pub fn check(&self) -> Result<(), CommandError> {
        let history = self.sequence.history();
        let row = self.row(history.as_ref(), None);
        values::check(&row)?;
        ineffective_flags::refuse(&[ineffective_flags::knobs(&row), ineffective_flags::lists(&row)].concat())
    }

    /// The flags as parameters of a row; the caller sets seed and position.
    pub fn row<'a>(&'a self, history: Option<&'a History>, mask: Option<&'a [u32]>) -> RowParams<'a> {
        let params = RowParams {
            temperature: self.temperature,
            without_replacement: self.without_replacement,
            logprobs: Some(self.logprobs),
            logprobs_mode: self.logprobs_mode,
            kept: self.kept,
            mask,
            logit_bias: self.logit_bias.as_deref().unwrap_or_default(),
            ..RowParams::default()
        };
        self.sequence.apply(history, self.penalties.apply(self.filters.apply(params)))
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
        "draws",
        "without_replacement",
        "mask",
        "kept",
    ];
    [own.map(Id::from).to_vec(), flags_of::<FilterArgs>(), flags_of::<PenaltyArgs>(), flags_of::<SequenceArgs>()]
        .concat()
}

pub(super) const LOGPROBS_MODES: &[(&str, &str, LogprobsMode)] = &[
    ("processed", "the distribution that is drawn from", LogprobsMode::Processed),
    ("raw", "the model's raw logits", LogprobsMode::Raw),
];

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
