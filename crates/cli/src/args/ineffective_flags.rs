//! Flags and fields without effect beside the others, such as a penalty without tokens.

use super::values::flag;
use crate::error::CommandError;
use crate::input::requests::{Request, RequestKind};
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
    /// Whether a temperature of 0 is the only reason.
    fn is_filter_of_greedy_row(&self) -> bool {
        self.reason == GREEDY
    }

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
pub(super) fn refuse(ineffective: &[Ineffective]) -> Result<(), CommandError> {
    let refused = ineffective.iter().find(|flag| !flag.is_filter_of_greedy_row());
    refused.map_or(Ok(()), |refused| Err(CommandError::usage(refused.message(flag))))
}

/// Warns of filters of a greedy row.
pub(crate) fn warn(ineffective: &[Ineffective]) {
    let filters = ineffective.iter().filter(|flag| flag.is_filter_of_greedy_row());
    filters.for_each(|filter| tracing::warn!("{}", filter.message(flag)));
}

/// Warns of fields without effect in a parameter file, once per field. Rows with a knob of `unsupported` have an error
/// instead.
pub(crate) fn warn_in_file<'a>(
    path: &Path,
    kind: RequestKind,
    unsupported: Knobs,
    rows: impl IntoIterator<Item = RowParams<'a>>,
) {
    let mut warned = BTreeSet::new();
    let is_supported = |row: &RowParams<'_>| row.enabled().intersection(unsupported).is_empty();
    for (at, row) in rows.into_iter().enumerate().filter(|(_, row)| is_supported(row)) {
        for field in knobs(&row).into_iter().filter(|ineffective| warned.insert(ineffective.field)) {
            tracing::warn!("{}: {} {at}: {}", path.display(), kind.name(), field.message(str::to_owned));
        }
    }
}

/// Refuses a flag for seeds if every object of a parameter file has its own seed.
///
/// # Errors
/// [`CommandError::Usage`], which names the flag.
pub(crate) fn refuse_seed(flag: Option<&str>, requests: &[Request]) -> Result<(), CommandError> {
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
