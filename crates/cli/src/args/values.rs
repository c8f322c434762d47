//! Parsers of numbers in flags, and the check of their values.

use crate::error::CommandError;
use clap::builder::{PossibleValue, PossibleValuesParser, TypedValueParser};
use flash_sampling::{SamplingParams, SamplingParamsBuilder};
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

/// The flag of a field of a request.
pub(crate) fn flag(field: &str) -> String {
    match field {
        "n" => "--draws".into(),
        "banned" => "--banned-token-ids".into(),
        "prompt_token_ids" => "--prompt-tokens".into(),
        "output_token_ids" => "--output-tokens".into(),
        field => format!("--{}", field.replace('_', "-")),
    }
}

/// The parameters of flags, checked for a vocabulary. Without its size, tokens are not checked.
pub(crate) fn build(
    mut fields: SamplingParamsBuilder,
    vocab_size: Option<u32>,
) -> Result<SamplingParams, CommandError> {
    if vocab_size.is_none() {
        // The bitmap for all token ids would take 512 MiB.
        fields.allowed_token_ids = None;
    }
    let params = fields.build(vocab_size.unwrap_or(u32::MAX));
    params.map_err(|error| CommandError::usage(format!("{} {}", flag(error.field), error.reason)))
}
