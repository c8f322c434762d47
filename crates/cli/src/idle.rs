//! Knobs that ask for something and change nothing, for want of another or beside it.

use flash_sampling::{History, Knob, Knobs, RowParams};
use std::sync::LazyLock;

/// What keeps a knob from doing anything.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Lack {
    /// One of these fields would have to be given.
    Of(&'static [&'static str]),
    /// A field that has this value.
    By(&'static str, &'static str),
}

/// A field that changes nothing beside the others.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Idle {
    /// The field, as files of parameters name it.
    pub(crate) field: &'static str,
    lack: Lack,
}

impl Idle {
    /// Whether it is idle for a temperature of 0 alone.
    pub(crate) fn is_of_greedy(&self) -> bool {
        self.lack == GREEDY
    }

    /// One sentence of it, with the names that `name` gives to fields.
    pub(crate) fn told(&self, name: impl Fn(&str) -> String) -> String {
        let field = name(self.field);
        match self.lack {
            Lack::Of(others) => {
                let others: Vec<_> = others.iter().map(|other| name(other)).collect();
                format!("{field} means nothing without {}", others.join(" or "))
            }
            Lack::By(other, value) => format!("{field} means nothing at {} {value}", name(other)),
        }
    }
}

/// A sequence that is being written: for all that is asked of its tokens there will be some.
pub(crate) fn written() -> &'static History {
    static WRITTEN: LazyLock<History> = LazyLock::new(|| {
        let mut history = History::new(&[0]);
        history.push(0);
        history
    });
    &WRITTEN
}

const TOKENS: Lack = Lack::Of(&["prompt_token_ids", "output_token_ids"]);
const OUTPUT: Lack = Lack::Of(&["output_token_ids"]);
const DRY: Lack = Lack::Of(&["dry_multiplier"]);
const GREEDY: Lack = Lack::By("temperature", "0");
const FILTERS: Lack =
    Lack::Of(&["top_k", "top_p", "min_p", "top_n_sigma", "epsilon_cutoff", "typical_p", "xtc_probability"]);

/// The knobs of a row that are not at their default, and might as well be. (Filters that may drop the largest logit are an
/// error of greedy rows.)
pub(crate) fn knobs(row: &RowParams<'_>) -> Vec<Idle> {
    let (off, on) = (RowParams::default(), row.enabled());
    let tokens = row.history.map_or(0, |history| history.tokens().len());
    let output = row.history.map_or(0, |history| history.output().len());
    let has_dry = row.dry_multiplier != 0.0;
    let greedy = |knob| row.temperature == 0.0 && on.contains(knob);
    let has_filter = !on.intersection(Knobs::FILTERS).is_empty();
    found([
        ("min_tokens", row.min_tokens > 0 && row.stop_token_ids.is_empty(), Lack::Of(&["stop_token_ids"])),
        ("repetition_penalty", on.contains(Knob::RepetitionPenalty) && tokens == 0, TOKENS),
        ("frequency_penalty", on.contains(Knob::FrequencyPenalty) && output == 0, OUTPUT),
        ("presence_penalty", on.contains(Knob::PresencePenalty) && output == 0, OUTPUT),
        ("dry_multiplier", has_dry && tokens == 0, TOKENS),
        ("dry_multiplier", has_dry && row.dry_penalty_last_n == 0, Lack::By("dry_penalty_last_n", "0")),
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
            Lack::Of(&["xtc_probability"]),
        ),
        // Two tokens cannot both have more than half of the mass.
        (
            "xtc_probability",
            row.xtc_probability != 0.0 && row.xtc_threshold > 0.5,
            Lack::By("xtc_threshold", "above 0.5"),
        ),
        ("order", row.order != off.order && !has_filter, FILTERS),
        ("logprobs_mode", row.logprobs_mode != off.logprobs_mode && row.logprobs.is_none(), Lack::Of(&["logprobs"])),
    ])
}

/// The lists of a row that nothing reads. Flags ask for something by them; a file may carry the sequence as it stands.
pub(crate) fn lists(row: &RowParams<'_>) -> Vec<Idle> {
    let on = row.enabled();
    let of_all = on.contains(Knob::RepetitionPenalty) || on.contains(Knob::DryMultiplier);
    let of_output =
        [Knob::FrequencyPenalty, Knob::PresencePenalty, Knob::MinTokens].into_iter().any(|k| on.contains(k));
    let prompt = row.history.map_or(0, |history| history.prompt().len());
    let output = row.history.map_or(0, |history| history.output().len());
    found([
        ("prompt_token_ids", prompt > 0 && !of_all, Lack::Of(&["repetition_penalty", "dry_multiplier"])),
        (
            "output_token_ids",
            output > 0 && !of_all && !of_output,
            Lack::Of(&["repetition_penalty", "frequency_penalty", "presence_penalty", "dry_multiplier", "min_tokens"]),
        ),
        ("stop_token_ids", !row.stop_token_ids.is_empty() && row.min_tokens == 0, Lack::Of(&["min_tokens"])),
    ])
}

fn found<const N: usize>(table: [(&'static str, bool, Lack); N]) -> Vec<Idle> {
    table.into_iter().filter(|(_, is_idle, _)| *is_idle).map(|(field, _, lack)| Idle { field, lack }).collect()
}
