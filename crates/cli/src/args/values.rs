//! Parsers of numbers in flags, and the check of their values before a head is read.

use crate::error::CommandError;
use crate::output::line;
use clap::builder::{PossibleValue, PossibleValuesParser, TypedValueParser};
use flash_sampling::{RowError, RowParams};
use std::fmt::Display;
use std::ops::RangeInclusive;
use std::str::FromStr;

pub(super) use crate::input::number::float;

/// A parser of whole numbers in a range.
pub(super) fn whole<T>(range: RangeInclusive<T>) -> impl Fn(&str) -> Result<T, String> + Clone + Send + Sync + 'static
where
    T: FromStr + PartialOrd + Display + Clone + Send + Sync + 'static,
{
    move |text| {
        let number = text.trim().parse().ok().filter(|number| range.contains(number));
        number.ok_or_else(|| format!("it must be {} to {}", range.start(), range.end()))
    }
}

/// A parser of names: each with a line for the help, and its value.
pub(super) fn choice<T: Copy + Send + Sync + 'static>(
    choices: &'static [(&'static str, &'static str, T)],
) -> impl TypedValueParser<Value = T> {
    let names = choices.iter().map(|(name, help, _)| PossibleValue::new(*name).help(*help));
    PossibleValuesParser::new(names).try_map(|text| {
        let choice = choices.iter().find(|(name, ..)| *name == text);
        choice.map(|(.., value)| *value).ok_or("it is not a known name")
    })
}

/// The seed of -1, which vLLM's requests use for "no seed".
const NO_SEED: u64 = 0;

/// A seed, or -1 for none.
pub(super) fn seed(text: &str) -> Result<u64, String> {
    match text.trim() {
        "-1" => Ok(NO_SEED),
        text => whole(0..=u64::MAX)(text).map_err(|range| format!("{range}, or -1 for none")),
    }
}

/// A number of log-probabilities, or -1 for all (`u32::MAX`).
pub(super) fn logprobs(text: &str) -> Result<u32, String> {
    match text.trim() {
        "-1" => Ok(u32::MAX),
        text => whole(0..=u32::MAX)(text).map_err(|range| format!("{range}, or -1 for all")),
    }
}

/// The number of `--logprobs`, where all is the vocabulary size.
///
/// # Errors
/// [`CommandError::Usage`]: more than the vocabulary has tokens.
pub(crate) fn checked_logprobs(number: u32, vocab_size: u32) -> Result<u32, CommandError> {
    match number {
        u32::MAX => Ok(vocab_size),
        number if number > vocab_size => {
            Err(CommandError::usage(format!("--logprobs {number}, but {}", line::there_are(vocab_size, "token"))))
        }
        number => Ok(number),
    }
}

/// The flag of a field of row parameters.
pub(crate) fn flag(field: &str) -> String {
    match field {
        "banned" => "--banned-token-ids".into(),
        "prompt_token_ids" => "--prompt-tokens".into(),
        "output_token_ids" => "--output-tokens".into(),
        field => format!("--{}", field.replace('_', "-")),
    }
}

/// Refuses values that are out of range in any head.
///
/// # Errors
/// [`CommandError::Usage`], which names the flag.
pub(super) fn check(row: &RowParams<'_>) -> Result<(), CommandError> {
    match row.check_values() {
        Err(RowError::OutOfRange { knob, value, range }) => {
            Err(CommandError::usage(format!("{} is {value}, but must be {range}", flag(knob.name()))))
        }
        Err(RowError::Invalid { knob, reason }) => Err(CommandError::usage(format!("{} {reason}", flag(knob.name())))),
        // Other errors depend on the vocabulary.
        Ok(()) | Err(_) => Ok(()),
    }
}
