//! Token ids outside the vocabulary: an error in a flag, a warning in a sequence.

use crate::error::CommandError;
use crate::input::requests::Request;
use crate::output::line;
use flash_sampling::RowParams;
use std::collections::BTreeSet;
use std::path::Path;

/// One line that names the flag (or field) and the token.
pub(crate) fn message(name: &str, token: u32, vocab_size: u32) -> String {
    format!("{name} names token {token}, but {}", line::there_are(vocab_size, "token"))
}

/// Refuses tokens of flags outside the vocabulary.
///
/// # Errors
/// Bad usage, which names the first such token.
pub(crate) fn check(row: &RowParams<'_>, allowed: Option<&[u32]>, vocab_size: u32) -> Result<(), CommandError> {
    let biased: Vec<u32> = row.logit_bias.iter().map(|(token, _)| *token).collect();
    for (flag, tokens) in [
        ("--logit-bias", &biased[..]),
        ("--banned-token-ids", row.banned),
        ("--stop-token-ids", row.stop_token_ids),
        ("--allowed-token-ids", allowed.unwrap_or_default()),
    ] {
        if let Some(token) = tokens.iter().find(|token| **token >= vocab_size) {
            return Err(CommandError::usage(message(flag, *token, vocab_size)));
        }
    }
    Ok(())
}

/// The warning about a token of a sequence. It is no error: engines number image placeholders in this way.
fn warning(name: &str, tokens: &[u32], vocab_size: u32) -> Option<String> {
    let token = tokens.iter().find(|token| **token >= vocab_size)?;
    Some(format!("{}: penalties ignore it", message(name, *token, vocab_size)))
}

/// Warns of a token outside the vocabulary in a sequence that a flag gives.
pub(crate) fn warn(flag: &str, tokens: &[u32], vocab_size: u32) {
    if let Some(warning) = warning(flag, tokens, vocab_size) {
        tracing::warn!("{warning}");
    }
}

/// Warns of tokens outside the vocabulary in the sequences of a parameter file, once per field.
pub(crate) fn warn_in_file(path: &Path, requests: &[Request], vocab_size: u32) {
    let mut warned = BTreeSet::new();
    for (row, request) in requests.iter().enumerate() {
        let Some(history) = &request.history else { continue };
        for (field, tokens) in [("prompt_token_ids", history.prompt()), ("output_token_ids", history.output())] {
            if let Some(warning) = warning(field, tokens, vocab_size)
                && warned.insert(field)
            {
                tracing::warn!("{}: row {row}: {warning}", path.display());
            }
        }
    }
}
