//! Flags and fields without effect beside the others, such as a penalty without tokens.

use super::values::flag;
use crate::error::CommandError;
use crate::input::requests::{RequestKind, Requests};
use crate::output::line;
use flash_sampling::{History, Knob, Knobs, RowParams};
use std::collections::BTreeSet;
use std::path::Path;
use std::sync::LazyLock;

/// Why a field has no effect.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Reason {
    /// It needs one of these fields.
    Without(&'static [&'static str]),
    /// Another field has this value.
    At(&'static str, &'static str),
}

/// A field without effect beside the others.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Ineffective {
    /// The field's name in parameter files.
    field: &'static str,
    reason: Reason,
}

impl Ineffective {
    /// One line; `name` maps fields to the names that the user knows.
    fn message(&self, name: impl Fn(&str) -> String) -> String {
        let field = name(self.field);
        match self.reason {
            Reason::Without(others) => {
                let others: Vec<_> = others.iter().map(|other| name(other)).collect();
                format!("{field} has no effect without {}", others.join(" or "))
            }
            Reason::At(other, value) => format!("{field} has no effect at {} {value}", name(other)),
        }
    }
}

/// Refuses flags without effect. Filters of a greedy row are no error, since users sweep the temperature and leave the
/// filters.
///
/// # Errors
/// [`CommandError::Usage`], which names the first flag.
pub(crate) fn refuse(ineffective: &[Ineffective]) -> Result<(), CommandError> {
    let refused = ineffective.iter().find(|flag| flag.reason != GREEDY);
    refused.map_or(Ok(()), |refused| Err(CommandError::usage(refused.message(flag))))
}

/// Warns of knobs without effect, and of tokens outside the vocabulary in a sequence, once per field. Such tokens are no
/// error: engines number image placeholders in this way. Rows with a knob of `unsupported` have an error instead.
/// `file` is the file of the rows, and the noun of one; without it, the rows are of flags.
pub(crate) fn warn<'a>(
    file: Option<(&Path, RequestKind)>,
    unsupported: Knobs,
    vocab_size: u32,
    rows: impl IntoIterator<Item = RowParams<'a>>,
) {
    let mut warned = BTreeSet::new();
    for (at, row) in rows.into_iter().enumerate() {
        let place = |(path, kind): (&Path, RequestKind)| format!("{}: {} {at}: ", path.display(), kind.name());
        let place = file.map_or_else(String::new, place);
        let name = |field: &str| if file.is_some() { field.to_owned() } else { flag(field) };
        let mut warn = |field, message: String| {
            if warned.insert(field) {
                tracing::warn!("{place}{message}");
            }
        };
        if row.enabled().intersection(unsupported).is_empty() {
            knobs(&row).into_iter().for_each(|knob| warn(knob.field, knob.message(name)));
        }
        let Some(history) = row.history else { continue };
        for (field, tokens) in [("prompt_token_ids", history.prompt()), ("output_token_ids", history.output())] {
            if let Some(token) = tokens.iter().find(|token| **token >= vocab_size) {
                let message = line::unknown_token(&name(field), *token, vocab_size);
                warn(field, format!("{message}: penalties ignore it"));
            }
        }
    }
}

/// Refuses a flag for seeds if every object of a parameter file has its own seed.
///
/// # Errors
/// [`CommandError::Usage`], which names the flag.
pub(crate) fn refuse_seed(flag: Option<&str>, requests: &Requests) -> Result<(), CommandError> {
    match flag {
        Some(flag) if requests.iter().all(|request| request.params.fields().seed.is_some()) => {
            Err(CommandError::usage(format!("{flag} has no effect: every object of --params has a seed")))
        }
        _ => Ok(()),
    }
}

/// A stand-in for the sequence of `generate`, which will have a prompt and an output.
pub(crate) fn placeholder_history() -> &'static History {
    static PLACEHOLDER: LazyLock<History> = LazyLock::new(|| {
        let mut history = History::new(&[0]);
        history.push(0);
        history
    });
    &PLACEHOLDER
}

const TOKENS: Reason = Reason::Without(&["prompt_token_ids", "output_token_ids"]);
const OUTPUT: Reason = Reason::Without(&["output_token_ids"]);
const DRY: Reason = Reason::Without(&["dry_multiplier"]);
const GREEDY: Reason = Reason::At("temperature", "0");
const FILTERS: Reason =
    Reason::Without(&["top_k", "top_p", "min_p", "top_n_sigma", "epsilon_cutoff", "typical_p", "xtc_probability"]);

/// The knobs of a row that differ from their defaults without effect. (A greedy row refuses filters that may drop the
/// largest logit.)
pub(crate) fn knobs(row: &RowParams<'_>) -> Vec<Ineffective> {
    let (off, on) = (RowParams::default(), row.enabled());
    let tokens = row.history.map_or(0, |history| history.tokens().len());
    let output = row.history.map_or(0, |history| history.output().len());
    let has_dry = row.dry_multiplier != 0.0;
    let greedy = |knob| row.temperature == 0.0 && on.contains(knob);
    let has_filter = !on.intersection(Knobs::FILTERS).is_empty();
    collect([
        ("min_tokens", row.min_tokens > 0 && row.stop_token_ids.is_empty(), Reason::Without(&["stop_token_ids"])),
        ("repetition_penalty", on.contains(Knob::RepetitionPenalty) && tokens == 0, TOKENS),
        ("frequency_penalty", on.contains(Knob::FrequencyPenalty) && output == 0, OUTPUT),
        ("presence_penalty", on.contains(Knob::PresencePenalty) && output == 0, OUTPUT),
        ("dry_multiplier", has_dry && tokens == 0, TOKENS),
        ("dry_multiplier", has_dry && row.dry_penalty_last_n == 0, Reason::At("dry_penalty_last_n", "0")),
        ("dry_base", row.dry_base != off.dry_base && !has_dry, DRY),
        ("dry_allowed_length", row.dry_allowed_length != off.dry_allowed_length && !has_dry, DRY),
        ("dry_penalty_last_n", row.dry_penalty_last_n != off.dry_penalty_last_n && !has_dry, DRY),
        ("dry_sequence_breakers", !row.dry_sequence_breakers.is_empty() && !has_dry, DRY),
        ("top_k", greedy(Knob::TopK), GREEDY),
        ("top_p", greedy(Knob::TopP), GREEDY),
        ("min_p", greedy(Knob::MinP), GREEDY),
        ("top_n_sigma", greedy(Knob::TopNSigma), GREEDY),
        ("epsilon_cutoff", greedy(Knob::EpsilonCutoff), GREEDY),
        (
            "xtc_threshold",
            row.xtc_threshold != off.xtc_threshold && row.xtc_probability == 0.0,
            Reason::Without(&["xtc_probability"]),
        ),
        // Two tokens cannot both have more than half of the mass.
        (
            "xtc_probability",
            row.xtc_probability != 0.0 && row.xtc_threshold > 0.5,
            Reason::At("xtc_threshold", "above 0.5"),
        ),
        ("order", row.order != off.order && !has_filter, FILTERS),
        (
            "logprobs_mode",
            row.logprobs_mode != off.logprobs_mode && row.logprobs.is_none(),
            Reason::Without(&["logprobs"]),
        ),
    ])
}

/// The token lists of a row that no knob reads. In a file they are no mistake: a request may carry its whole sequence.
pub(super) fn lists(row: &RowParams<'_>) -> Vec<Ineffective> {
    let on = row.enabled();
    let of_all = on.contains(Knob::RepetitionPenalty) || on.contains(Knob::DryMultiplier);
    let of_output =
        [Knob::FrequencyPenalty, Knob::PresencePenalty, Knob::MinTokens].into_iter().any(|k| on.contains(k));
    let prompt = row.history.map_or(0, |history| history.prompt().len());
    let output = row.history.map_or(0, |history| history.output().len());
    collect([
        ("prompt_token_ids", prompt > 0 && !of_all, Reason::Without(&["repetition_penalty", "dry_multiplier"])),
        (
            "output_token_ids",
            output > 0 && !of_all && !of_output,
            Reason::Without(&[
                "repetition_penalty",
                "frequency_penalty",
                "presence_penalty",
                "dry_multiplier",
                "min_tokens",
            ]),
        ),
        ("stop_token_ids", !row.stop_token_ids.is_empty() && row.min_tokens == 0, Reason::Without(&["min_tokens"])),
    ])
}

fn collect<const N: usize>(table: [(&'static str, bool, Reason); N]) -> Vec<Ineffective> {
    let ineffective = table.into_iter().filter(|(_, is_ineffective, _)| *is_ineffective);
    ineffective.map(|(field, _, reason)| Ineffective { field, reason }).collect()
}
