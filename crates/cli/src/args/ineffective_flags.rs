//! Flags and fields without effect in combination with the others, such as a penalty without tokens.

use super::values::flag;
use crate::error::CommandError;
use crate::input::requests::{RequestKind, Requests};
use crate::output::line;
use crate::sampler::Support;
use flash_sampling::{History, Knob, Knobs, RowParams};
use std::collections::BTreeSet;
use std::path::Path;

/// A field without effect in combination with the others.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Ineffective {
    /// The field's name in parameter files.
    field: &'static str,
    /// The reason, with `$` before names of fields.
    reason: &'static str,
}

impl Ineffective {
    /// Formats one line; `name` maps fields to the names that the user knows.
    fn message(&self, name: impl Fn(&str) -> String) -> String {
        let word = |word: &str| word.strip_prefix('$').map_or_else(|| word.to_owned(), &name);
        let reason: Vec<_> = self.reason.split(' ').map(word).collect();
        format!("{} has no effect {}", name(self.field), reason.join(" "))
    }
}

/// Refuses flags without effect. Filters of a greedy row are no error, since users sweep the temperature and leave the
/// filters.
pub(crate) fn refuse(ineffective: &[Ineffective]) -> Result<(), CommandError> {
    let refused = ineffective.iter().find(|flag| flag.reason != GREEDY);
    refused.map_or(Ok(()), |refused| Err(CommandError::usage(refused.message(flag))))
}

/// Warns of knobs without effect, and of tokens outside the vocabulary in a sequence, once per field. Such tokens are no
/// error: engines number image placeholders in this way. Rows with an unsupported knob have an error instead.
/// `file` is the file of the rows, and the noun of one; without it, the rows are of flags.
pub(crate) fn warn<'a>(
    file: Option<(&Path, RequestKind)>,
    support: &Support<'_>,
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
        if support.has_all(&row) {
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
pub(crate) fn refuse_seed(flag: Option<&str>, requests: &Requests) -> Result<(), CommandError> {
    match flag {
        Some(flag) if requests.iter().all(|request| request.params.fields().seed.is_some()) => {
            Err(CommandError::usage(format!("{flag} has no effect: every object of --params has a seed")))
        }
        _ => Ok(()),
    }
}

/// A placeholder for the sequence of `generate`, which will have a prompt and an output.
pub(crate) fn placeholder_history() -> History {
    let mut history = History::new(&[0]);
    history.push(0);
    history
}

const TOKENS: &str = "without $prompt_token_ids or $output_token_ids";
const OUTPUT: &str = "without $output_token_ids";
const DRY: &str = "without $dry_multiplier";
const GREEDY: &str = "at $temperature 0";
const XTC: &str = "without $xtc_probability";
const OUTPUT_KNOBS: &str =
    "without $repetition_penalty or $frequency_penalty or $presence_penalty or $dry_multiplier or $min_tokens";
const FILTERS: &str =
    "without $top_k or $top_p or $min_p or $top_n_sigma or $epsilon_cutoff or $typical_p or $xtc_probability";

/// The knobs of a row that differ from their defaults without effect. (A greedy row refuses filters that may drop the
/// largest logit.)
pub(crate) fn knobs(row: &RowParams<'_>) -> Vec<Ineffective> {
    let (off, on) = (RowParams::default(), row.enabled());
    let has_tokens = row.history.is_some_and(|history| !history.tokens().is_empty());
    let has_output = row.history.is_some_and(|history| !history.output().is_empty());
    let has_dry = row.dry_multiplier != 0.0;
    let has_filter = !on.intersection(Knobs::FILTERS).is_empty();
    let without_dry = |is_set: bool| is_set && !has_dry;
    let greedy = |knob| row.temperature == 0.0 && on.contains(knob);
    collect([
        ("min_tokens", row.min_tokens > 0 && row.stop_token_ids.is_empty(), "without $stop_token_ids"),
        ("repetition_penalty", on.contains(Knob::RepetitionPenalty) && !has_tokens, TOKENS),
        ("frequency_penalty", on.contains(Knob::FrequencyPenalty) && !has_output, OUTPUT),
        ("presence_penalty", on.contains(Knob::PresencePenalty) && !has_output, OUTPUT),
        ("dry_multiplier", has_dry && !has_tokens, TOKENS),
        ("dry_multiplier", has_dry && row.dry_penalty_last_n == 0, "at $dry_penalty_last_n 0"),
        ("dry_base", without_dry(row.dry_base != off.dry_base), DRY),
        ("dry_allowed_length", without_dry(row.dry_allowed_length != off.dry_allowed_length), DRY),
        ("dry_penalty_last_n", without_dry(row.dry_penalty_last_n != off.dry_penalty_last_n), DRY),
        ("dry_sequence_breakers", without_dry(!row.dry_sequence_breakers.is_empty()), DRY),
        ("top_k", greedy(Knob::TopK), GREEDY),
        ("top_p", greedy(Knob::TopP), GREEDY),
        ("min_p", greedy(Knob::MinP), GREEDY),
        ("top_n_sigma", greedy(Knob::TopNSigma), GREEDY),
        ("epsilon_cutoff", greedy(Knob::EpsilonCutoff), GREEDY),
        ("xtc_threshold", row.xtc_threshold != off.xtc_threshold && row.xtc_probability == 0.0, XTC),
        // Two tokens cannot both have more than half of the mass.
        ("xtc_probability", row.xtc_probability != 0.0 && row.xtc_threshold > 0.5, "at $xtc_threshold above 0.5"),
        ("order", row.order != off.order && !has_filter, FILTERS),
        ("logprobs_mode", row.logprobs_mode != off.logprobs_mode && row.logprobs.is_none(), "without $logprobs"),
    ])
}

/// The token lists of a row that no knob reads. In a file they are no mistake: a request may carry its whole sequence.
pub(super) fn lists(row: &RowParams<'_>) -> Vec<Ineffective> {
    let on = row.enabled();
    let of_all = on.contains(Knob::RepetitionPenalty) || on.contains(Knob::DryMultiplier);
    let of_output =
        [Knob::FrequencyPenalty, Knob::PresencePenalty, Knob::MinTokens].into_iter().any(|k| on.contains(k));
    let has_prompt = row.history.is_some_and(|history| !history.prompt().is_empty());
    let has_output = row.history.is_some_and(|history| !history.output().is_empty());
    collect([
        ("prompt_token_ids", has_prompt && !of_all, "without $repetition_penalty or $dry_multiplier"),
        ("output_token_ids", has_output && !of_all && !of_output, OUTPUT_KNOBS),
        ("stop_token_ids", !row.stop_token_ids.is_empty() && row.min_tokens == 0, "without $min_tokens"),
    ])
}

fn collect<const N: usize>(table: [(&'static str, bool, &'static str); N]) -> Vec<Ineffective> {
    let ineffective = table.into_iter().filter(|(_, is_ineffective, _)| *is_ineffective);
    ineffective.map(|(field, _, reason)| Ineffective { field, reason }).collect()
}
