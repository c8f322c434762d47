//! Flags with lists of tokens: the sequence so far, and tokens with a special role.

use clap::Args;
use flash_sampling::{History, RowParams};
use std::sync::Arc;

/// Lists of token ids, the same for every row.
#[derive(Clone, Debug, Args)]
#[command(next_help_heading = "Tokens")]
pub struct SequenceArgs {
    /// Prompt of every row, for penalties.
    #[arg(long, value_name = "A,B,...", value_parser = tokens, allow_hyphen_values = true)]
    pub prompt_tokens: Option<Tokens>,
    /// Output of every row so far, for penalties and --min-tokens.
    #[arg(long, value_name = "A,B,...", value_parser = tokens, allow_hyphen_values = true)]
    pub output_tokens: Option<Tokens>,
    /// Tokens that end a sequence, for --min-tokens.
    #[arg(long, value_name = "A,B,...", value_parser = tokens, allow_hyphen_values = true)]
    pub stop_token_ids: Option<Tokens>,
    /// Tokens that must not be drawn.
    #[arg(long, value_name = "A,B,...", value_parser = tokens, allow_hyphen_values = true)]
    pub banned_token_ids: Option<Tokens>,
    /// Tokens that interrupt a repetition, for --dry-multiplier.
    #[arg(long, value_name = "A,B,...", value_parser = ascending, allow_hyphen_values = true)]
    pub dry_sequence_breakers: Option<Tokens>,
}

/// Token ids.
pub(crate) type Tokens = Arc<[u32]>;

pub(super) fn tokens(text: &str) -> Result<Tokens, String> {
    let token = |id: &str| id.trim().parse().map_err(|_| format!("{id:?} is not a token id"));
    text.split(',').map(token).collect()
}

pub(super) fn ascending(text: &str) -> Result<Tokens, String> {
    let mut ids = tokens(text)?.to_vec();
    ids.sort_unstable();
    Ok(ids.into())
}

impl SequenceArgs {
    /// The sequence so far; `None` without its flags.
    pub fn history(&self) -> Option<History> {
        let given = self.prompt_tokens.is_some() || self.output_tokens.is_some();
        given.then(|| {
            let mut history = History::new(self.prompt_tokens.as_deref().unwrap_or_default());
            history.extend(self.output_tokens.as_deref().unwrap_or_default().iter().copied());
            history
        })
    }

    /// The row with these lists.
    pub fn apply<'a>(&'a self, history: Option<&'a History>, row: RowParams<'a>) -> RowParams<'a> {
        RowParams {
            history,
            stop_token_ids: self.stop_token_ids.as_deref().unwrap_or_default(),
            banned: self.banned_token_ids.as_deref().unwrap_or_default(),
            dry_sequence_breakers: self.dry_sequence_breakers.as_deref().unwrap_or_default(),
            ..row
        }
    }
}
