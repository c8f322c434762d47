//! Knobs that the chosen sampler lacks, with flags that choose one that has them.

use super::shard_merge;
use crate::args::values;
use crate::args::{SamplerArgs, VariantName};
use crate::error::CommandError;
use flash_sampling::{GroupDraw, Knob, Knobs, RowError, RowParams, ShardMerge};

/// A knob that the chosen sampler lacks.
#[derive(Clone, Debug, PartialEq, thiserror::Error)]
#[error("{name} is not supported with {cause}; {alternative}")]
pub(crate) struct Unsupported {
    /// The knob's flag, or its field in a file.
    name: String,
    /// The flags that chose the sampler.
    cause: &'static str,
    /// Flags to use instead.
    alternative: String,
}

/// Why the chosen sampler lacks some knobs, and what to use instead; `None` if the sampler has every knob.
fn limits(args: &SamplerArgs, canonical: bool) -> [Option<(Knobs, &'static str, &'static str)>; 2] {
    let kept = Knobs::FILTERS.with(Knob::Kept);
    let sampled = kept.with(Knob::WithoutReplacement);
    let of_plan = (canonical && args.variant != VariantName::Reference).then_some((
        kept.with(Knob::LogprobsMode),
        "--canonical",
        "leave out --canonical",
    ));
    let of_variant = match args.variant {
        _ if shard_merge(args) == ShardMerge::LogMass => {
            Some((sampled.with(Knob::LogprobsMode), "--merge log-mass", "use --merge winners"))
        }
        VariantName::Online => Some((sampled, "--variant online", "use --variant tiled")),
        VariantName::Grouped if args.group_draw != Some(GroupDraw::Reuse) => {
            Some((sampled, "--variant grouped", "use --variant tiled, or --group-draw reuse"))
        }
        _ => None,
    };
    [of_variant, of_plan]
}

/// The knobs that the chosen sampler lacks.
pub(crate) fn knobs(args: &SamplerArgs, canonical: bool) -> Knobs {
    limits(args, canonical).iter().flatten().fold(Knobs::NONE, |all, (knobs, ..)| all.union(*knobs))
}

fn find(args: &SamplerArgs, canonical: bool, knob: Knob, name: impl Fn(&str) -> String) -> Option<Unsupported> {
    let limits = limits(args, canonical).into_iter().flatten();
    let mut limits = limits.filter(|(knobs, ..)| knobs.contains(knob)).peekable();
    let cause = limits.peek()?.1;
    let alternative = limits.map(|(.., alternative)| alternative).collect::<Vec<_>>().join(" and ");
    // The capability is named after XTC's threshold; the probability switches XTC on.
    let knob = if knob == Knob::XtcThreshold { Knob::XtcProbability } else { knob };
    Some(Unsupported { name: name(knob.name()), cause, alternative })
}

fn of_flag(args: &SamplerArgs, canonical: bool, knob: Knob) -> Option<CommandError> {
    let unsupported = find(args, canonical, knob, values::flag)?;
    Some(CommandError::usage(unsupported.to_string()))
}

/// Refuses flags that the chosen sampler lacks, before a head is read.
///
/// # Errors
/// Bad usage, which names the flag and an alternative.
pub(crate) fn check(args: &SamplerArgs, canonical: bool, row: &RowParams<'_>) -> Result<(), CommandError> {
    let list = if row.without_replacement { Knobs::of(&[Knob::WithoutReplacement]) } else { Knobs::NONE };
    let lacked = row.enabled().union(list).intersection(knobs(args, canonical)).iter().next();
    lacked.and_then(|knob| of_flag(args, canonical, knob)).map_or(Ok(()), Err)
}

/// A row's error as a knob that the chosen sampler lacks, by its field.
pub(crate) fn of_error(args: &SamplerArgs, canonical: bool, error: &RowError) -> Option<Unsupported> {
    let RowError::Unsupported { knob, .. } = error else { return None };
    find(args, canonical, *knob, str::to_owned)
}

/// A row's error as a refusal of the flags, if it applies to every row.
pub(crate) fn refusal(args: &SamplerArgs, canonical: bool, error: &RowError) -> Option<CommandError> {
    match error {
        RowError::Unsupported { knob, .. } => {
            Some(of_flag(args, canonical, *knob).unwrap_or_else(|| CommandError::usage(error.to_string())))
        }
        RowError::OutOfRange { .. }
        | RowError::UnknownToken { .. }
        | RowError::Invalid { .. }
        | RowError::Unplanned { .. }
        | RowError::BeyondPlan { .. } => Some(CommandError::usage(error.to_string())),
        _ => None,
    }
}
