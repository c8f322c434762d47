//! Flags of the draws of `sample`.

use super::params::{ParamArgs, token};
use super::values::{self, whole};
use super::{SamplerArgs, flags_of, ineffective_flags};
use crate::error::CommandError;
use crate::input::requests::Request;
use crate::sampler::Support;
use clap::{Args, Id};
use flash_sampling::noise::POSITION_MAX;
use flash_sampling::{History, SamplingParamsBuilder};
use std::path::PathBuf;

/// Maximum of draws of a row.
pub(crate) const MAX_DRAWS: u32 = 10_000_000;

/// The draws of every row.
#[derive(Clone, Debug, Args)]
#[command(next_help_heading = "Draws")]
pub struct RowArgs {
    /// The seed of all rows. It is 0 by default, and also for -1, vLLM's value for no seed.
    #[arg(long, value_name = "SEED", value_parser = values::seed, allow_negative_numbers = true)]
    pub seed: Option<u64>,
    /// Position of the noise: row r draws at position P + r of the seed; with --seeds every row draws at P.
    #[arg(long, value_name = "P", default_value_t = 0, value_parser = whole(0..=POSITION_MAX), allow_negative_numbers = true)]
    pub position: u64,
    /// A seed for each row.
    #[arg(long, value_name = "A,B,...", value_delimiter = ',', value_parser = whole(0..=u64::MAX), conflicts_with = "seed", allow_hyphen_values = true)]
    pub seeds: Option<Vec<u64>>,
    /// Draws of each row, up to 10000000.
    #[arg(long, value_name = "N", default_value_t = 1, value_parser = whole(1..=MAX_DRAWS), allow_negative_numbers = true)]
    pub draws: u32,
    /// Draw different tokens, best score first.
    #[arg(long)]
    pub without_replacement: bool,
    /// Decide near ties by float64 sums in a fixed order, so that every machine draws the same tokens.
    #[arg(long)]
    pub canonical: bool,
    /// Bitmaps of allowed tokens: a .npy file of uint32 words, lowest bit first, with one row or one per hidden state.
    #[arg(long, value_name = "FILE", conflicts_with = "allowed_token_ids")]
    pub mask: Option<PathBuf>,
    /// List the tokens that the filters kept, with their number and log-mass; not for greedy rows.
    #[arg(long)]
    pub kept: bool,
    /// Prompt of every row, for penalties.
    #[arg(long, value_name = "A,B,...", value_delimiter = ',', value_parser = token, allow_hyphen_values = true)]
    pub prompt_tokens: Vec<u32>,
    /// Output of every row so far, for penalties and --min-tokens.
    #[arg(long, value_name = "A,B,...", value_delimiter = ',', value_parser = token, allow_hyphen_values = true)]
    pub output_tokens: Vec<u32>,
    /// Read these parameters from a JSON file: one object for every row, or an array with one object per row. The fields
    /// are those of vLLM's SamplingParams, prompt_token_ids and output_token_ids. Row r draws at position P + r, with its
    /// own seed or with --seed.
    #[arg(long, value_name = "FILE", conflicts_with_all = excluded_by_params())]
    pub params: Option<PathBuf>,
    #[command(flatten)]
    #[allow(missing_docs)]
    pub fields: ParamArgs,
}

impl RowArgs {
    /// Refuses values out of range, flags without effect and flags that the sampler lacks, before a head is read.
    ///
    /// # Errors
    /// [`CommandError::Usage`], which names the flag.
    pub fn check(&self, sampler: &SamplerArgs) -> Result<(), CommandError> {
        let request = self.request(None)?;
        let row = request.params.row(0, 0, request.history.as_ref());
        ineffective_flags::refuse(&[ineffective_flags::knobs(&row), ineffective_flags::lists(&row)].concat())?;
        Support::new(sampler, self.canonical)?.refuse(&row)
    }

    /// The request of every row. Without a vocabulary size, tokens are not checked.
    pub(crate) fn request(&self, vocab_size: Option<u32>) -> Result<Request, CommandError> {
        let fields = SamplingParamsBuilder {
            n: self.draws,
            without_replacement: self.without_replacement,
            kept: self.kept,
            logprobs: self.fields.logprobs.or(Some(0)),
            ..self.fields.fields(1.0)
        };
        let has_history = !self.prompt_tokens.is_empty() || !self.output_tokens.is_empty();
        let history = has_history.then(|| {
            let mut history = History::new(&self.prompt_tokens);
            history.extend(self.output_tokens.iter().copied());
            history
        });
        Ok(Request { params: values::build(fields, vocab_size)?, history })
    }
}

fn excluded_by_params() -> Vec<Id> {
    let own = ["draws", "without_replacement", "mask", "kept", "prompt_tokens", "output_tokens"];
    [own.map(Id::from).to_vec(), flags_of::<ParamArgs>()].concat()
}
