//! Knobs that the chosen sampler lacks, with flags that choose one that has them.

use super::shard_merge;
use crate::args::values;
use crate::args::{SamplerArgs, VariantName};
use crate::error::CommandError;
use flash_sampling::{GroupDraw, Knob, Knobs, RowParams, ShardMerge};

/// Why the chosen sampler lacks some knobs, and what to use instead.
fn limits(args: &SamplerArgs, canonical: bool) -> impl Iterator<Item = (Knobs, &'static str, &'static str)> {
    let kept = Knobs::FILTERS.with(Knob::Kept);
    let sampled = kept.with(Knob::WithoutReplacement);
    let of_plan = (canonical && args.variant != VariantName::Reference).then_some((
        kept.union(Knobs::LOGPROBS),
        "--canonical",
        "leave out --canonical",
    ));
    let of_variant = match args.variant {
        _ if shard_merge(args) == ShardMerge::LogMass => {
            Some((sampled.union(Knobs::LOGPROBS), "--merge log-mass", "use --merge winners"))
        }
        VariantName::Online => {
            let lacks = sampled.with(Knob::LogprobTokenIds).with(Knob::Ranks);
            Some((lacks, "--variant online", "use --variant tiled"))
        }
        VariantName::Grouped if args.group_draw != Some(GroupDraw::Reuse) => {
            Some((sampled, "--variant grouped", "use --variant tiled, or --group-draw reuse"))
        }
        _ => None,
    };
    of_variant.into_iter().chain(of_plan)
}

/// The knobs that the chosen sampler lacks.
pub(crate) fn knobs(args: &SamplerArgs, canonical: bool) -> Knobs {
    limits(args, canonical).fold(Knobs::NONE, |all, (knobs, ..)| all.union(knobs))
}

/// A line with the knob, the flags that chose a sampler without it, and flags to use instead. `name` maps the knob to
/// the name that the user knows.
pub(crate) fn message(
    args: &SamplerArgs,
    canonical: bool,
    knob: Knob,
    name: impl Fn(&str) -> String,
) -> Option<String> {
    let (causes, alternatives): (Vec<_>, Vec<_>) = limits(args, canonical)
        .filter(|(knobs, ..)| knobs.contains(knob))
        .map(|(_, cause, alternative)| (cause, alternative))
        .unzip();
    // The capability is named after XTC's threshold; the probability switches XTC on.
    let knob = if knob == Knob::XtcThreshold { Knob::XtcProbability } else { knob };
    let (name, alternative) = (name(knob.name()), alternatives.join(" and "));
    Some(format!("{name} is not supported with {}; {alternative}", causes.first()?))
}

/// Refuses flags that the chosen sampler lacks, before a head is read.
pub(crate) fn check(args: &SamplerArgs, canonical: bool, row: &RowParams<'_>) -> Result<(), CommandError> {
    let list = if row.without_replacement { Knobs::of(&[Knob::WithoutReplacement]) } else { Knobs::NONE };
    let lacked = row.enabled().union(list).intersection(knobs(args, canonical)).iter().next();
    let refusal = lacked.and_then(|knob| message(args, canonical, knob, values::flag));
    refusal.map_or(Ok(()), |refusal| Err(CommandError::usage(refusal)))
}
