//! Values of flags that mean nothing, refused by the flag's name before a head is read.

use crate::error::CommandError;
use crate::idle::Idle;
use flash_sampling::{RowError, RowParams};

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

/// Refuses flags that change nothing.
///
/// # Errors
/// [`CommandError::Usage`], naming the first.
pub(super) fn refuse(idle: &[Idle]) -> Result<(), CommandError> {
    idle.first().map_or(Ok(()), |idle| Err(CommandError::usage(idle.told(flag))))
}
