//! Rows for all optional knobs, and the check that a sampler refuses the knobs it lacks.

use crate::problem::{Problem, Size};
use crate::report::{Broken, LawReport, ensure};
use crate::trial::Trial;
use flash_sampling_core::{DType, History, Knob, Knobs, LogprobsMode, Plan, RowError, RowParams};

/// Returns rows with one knob each. Knobs of the sequence use `history`.
pub(super) fn one_of_each<'a>(row: RowParams<'a>, history: &'a History) -> Vec<(Knob, RowParams<'a>)> {
    let past = RowParams { history: Some(history), ..row };
    vec![
        (Knob::Banned, RowParams { banned: &[7, 3], ..row }),
        (Knob::MinTokens, RowParams { min_tokens: 1000, stop_token_ids: &[5, 2], ..past }),
        (Knob::RepetitionPenalty, RowParams { repetition_penalty: 1.1, ..past }),
        (Knob::FrequencyPenalty, RowParams { frequency_penalty: 0.5, ..past }),
        (Knob::PresencePenalty, RowParams { presence_penalty: -0.5, ..past }),
        (Knob::DryMultiplier, RowParams { dry_multiplier: 0.8, dry_allowed_length: 1, ..past }),
        (Knob::TopK, RowParams { top_k: 5, ..row }),
        (Knob::TopP, RowParams { top_p: 0.9, ..row }),
        (Knob::MinP, RowParams { min_p: 0.1, ..row }),
        (Knob::TopNSigma, RowParams { top_n_sigma: 1.5, ..row }),
        (Knob::EpsilonCutoff, RowParams { epsilon_cutoff: 0.002, ..row }),
        (Knob::TypicalP, RowParams { typical_p: 0.6, ..row }),
        (Knob::XtcThreshold, RowParams { xtc_threshold: 0.01, xtc_probability: 1.0, ..row }),
        (Knob::Kept, RowParams { kept: true, ..row }),
        (Knob::LogprobTokenIds, RowParams { logprobs: Some(2), logprob_token_ids: &[7, 3], ..row }),
        (Knob::Ranks, RowParams { logprobs: Some(2), ranks: true, ..row }),
        (Knob::LogprobsMode, RowParams { logprobs: Some(2), logprobs_mode: LogprobsMode::Raw, ..row }),
    ]
}

/// The knobs that a sampler may lack.
const OPTIONAL: Knobs = Knobs::ADJUSTMENTS.union(Knobs::FILTERS).union(Knobs::LOGPROBS).with(Knob::Kept);

/// Checks the knobs in `wanted` against the capabilities under `plan`: the sampler draws from a row with a supported
/// knob, and refuses an unsupported knob by name. Returns the supported knobs.
pub(super) fn refused_by_name(
    trial: &Trial<'_>,
    report: &mut LawReport,
    wanted: Knobs,
    plan: Plan,
) -> Result<Knobs, Broken> {
    let history = History::new(&[1, 2, 1]);
    let cases = one_of_each(RowParams { seed: 5, ..RowParams::default() }, &history);
    let covered = cases.iter().fold(Knobs::NONE, |all, (knob, _)| all.union(Knobs::of(&[*knob])));
    ensure!(covered == OPTIONAL, "no row tries {:?}", OPTIONAL.without(covered));
    let cases: Vec<_> = cases.into_iter().filter(|(knob, _)| wanted.contains(*knob)).collect();
    let problem = Problem::gaussian(Size::new(cases.len(), 300, 16), DType::BF16, DType::BF16, 952);
    let plan = Plan { max_rows: cases.len(), max_logprobs: Some(2), ..plan };
    let can = trial.sampler(problem.head(), plan)?.capabilities();
    let rows: Vec<_> = cases.iter().map(|(_, row)| *row).collect();
    let out = trial.sample(&problem, plan, &rows)?;
    for (r, (knob, row)) in cases.iter().enumerate() {
        ensure!(row.enabled() == Knobs::of(&[*knob]), "a row with {knob} says that {:?} are on", row.enabled());
        let alternative = can.alternative(&plan);
        let want =
            if can.knobs.contains(*knob) { None } else { Some(RowError::Unsupported { knob: *knob, alternative }) };
        let found = out.row(r).err();
        ensure!(found == want, "{knob}: {found:?}, but by the capabilities it must be {want:?}");
    }
    let missing = wanted.without(can.knobs);
    if !missing.is_empty() {
        report.agreed(format!("knobs refused by name: {missing:?}"), missing.iter().count());
    }
    Ok(wanted.intersection(can.knobs))
}
