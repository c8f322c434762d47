//! Numbers of flags, and values that mean nothing, refused by the flag's name before a head is read.

use crate::error::CommandError;
use crate::idle::Idle;
use crate::output::line;
use flash_sampling::{RowError, RowParams};
use std::fmt::Display;
use std::ops::RangeInclusive;
use std::str::FromStr;

/// A parser of whole numbers within a range.
pub(super) fn whole<T>(range: RangeInclusive<T>) -> impl Fn(&str) -> Result<T, String> + Clone + Send + Sync + 'static
where
    T: FromStr + PartialOrd + Display + Clone + Send + Sync + 'static,
{
    move |text| {
        let number = text.trim().parse().ok().filter(|number| range.contains(number));
        number.ok_or_else(|| format!("it must be {} to {}", range.start(), range.end()))
    }
}

/// The seed where none is given.
const NO_SEED: u64 = 0;

/// A seed; -1 is none, as in a request.
pub(super) fn seed(text: &str) -> Result<u64, String> {
    match text.trim() {
        "-1" => Ok(NO_SEED),
        text => whole(0..=u64::MAX)(text).map_err(|range| format!("{range}, or -1 for none")),
    }
}

/// A number of log-probabilities; -1 is `u32::MAX`, which is all, as in a request.
pub(super) fn logprobs(text: &str) -> Result<u32, String> {
    match text.trim() {
        "-1" => Ok(u32::MAX),
        text => whole(0..=u32::MAX)(text).map_err(|range| format!("{range}, or -1 for all")),
    }
}

/// As many log-probabilities as `--logprobs` asks for, of a vocabulary.
///
/// # Errors
/// [`CommandError::Usage`]: more than there are tokens.
pub(crate) fn known_logprobs(asked: u32, vocab_size: u32) -> Result<u32, CommandError> {
    match asked {
        u32::MAX => Ok(vocab_size),
        asked if asked > vocab_size => {
            Err(CommandError::usage(format!("--logprobs {asked}, but {}", line::there_are(vocab_size, "token"))))
        }
        asked => Ok(asked),
    }
}

/// A float32 that is 0 only where the text says so.
pub(crate) fn float(text: &str) -> Result<f32, String> {
    let number = text.parse().map_err(|_| "it is not a number")?;
    let significand = text.split(['e', 'E']).next().unwrap_or_default();
    match number == 0.0 && significand.contains(|digit: char| ('1'..='9').contains(&digit)) {
        true => Err("it rounds to 0 as a float32".into()),
        false => Ok(number),
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

/// Refuses a row of flags that means nothing by itself, as far as it is told without a head.
///
/// # Errors
/// [`CommandError::Usage`], naming the flag.
pub(super) fn check(row: &RowParams<'_>) -> Result<(), CommandError> {
    let refusal = match row.check_values() {
        Err(RowError::OutOfRange { knob, value, range }) => {
            format!("{} is {value}, but must be {range}", flag(knob.name()))
        }
        Err(RowError::Invalid { knob, reason }) => format!("{} {reason}", flag(knob.name())),
        // How many tokens there are is the head's to say.
        Ok(()) | Err(_) => return Ok(()),
    };
    Err(CommandError::usage(refusal))
}

/// Refuses flags that change nothing, but for filters of a greedy row.
///
/// # Errors
/// [`CommandError::Usage`], naming the first.
pub(super) fn refuse(idle: &[Idle]) -> Result<(), CommandError> {
    let refused = idle.iter().find(|idle| !idle.is_of_greedy());
    refused.map_or(Ok(()), |idle| Err(CommandError::usage(idle.told(flag))))
}

/// Warns of filters of a greedy row: who sweeps the temperature leaves them as they are.
pub(super) fn tell(idle: &[Idle]) {
    idle.iter().filter(|idle| idle.is_of_greedy()).for_each(|idle| tracing::warn!("{}", idle.told(flag)));
}
