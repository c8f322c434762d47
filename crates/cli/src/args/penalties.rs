//! Flags of penalties.

use crate::args::values::{float, whole};
use clap::Args;
use flash_sampling::RowParams;

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
    /// Minimum of tokens before the sequence may end.
    #[arg(long, value_name = "N", default_value_t = 0, value_parser = whole(0..=u32::MAX), allow_negative_numbers = true)]
    pub min_tokens: u32,
}

impl PenaltyArgs {
    /// The row with these penalties; the caller sets history and stop tokens.
    pub fn apply<'a>(&self, row: RowParams<'a>) -> RowParams<'a> {
        RowParams {
            repetition_penalty: self.repetition_penalty,
            frequency_penalty: self.frequency_penalty,
            presence_penalty: self.presence_penalty,
            dry_multiplier: self.dry_multiplier,
            dry_base: self.dry_base,
            dry_allowed_length: self.dry_allowed_length,
            dry_penalty_last_n: u32::try_from(self.dry_penalty_last_n).unwrap_or(u32::MAX),
            min_tokens: self.min_tokens,
            ..row
        }
    }
}
