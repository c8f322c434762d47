//! Comparison of docs/knobs.md with the capabilities of samplers, and with the laws of each knob.
//!
//! The suite compares the capabilities with the samplers: `refused_by_name` of `laws/knobs.rs` runs on every sampler.

mod backends;

use backends::gpu::Gpu;
use backends::gpu_ranks::{GpuRanks, Gpus};
use backends::{Cpu, GROUP, Kind, Shards};
use flash_sampling::GpuExchange;
use flash_sampling_conformance::suite::runs;
use flash_sampling_conformance::tensor::Tensor;
use flash_sampling_conformance::{SamplerFactory, laws};
use flash_sampling_core::reference::{Reference, ReferenceVariant};
use flash_sampling_core::{Capabilities, DType, Exactness, Head, Knob, Knobs, PerturbedArgmax, Plan};
use flash_sampling_cpu::Isa;
use flash_sampling_distributed::ShardMerge;

const PAGE: &str = include_str!("../../docs/knobs.md");
static PORTABLE: Cpu = Cpu::new(Kind::Tiled, Isa::Portable);

/// The knobs of rows and their laws. [`Knob::ALL`] also has two knobs of plans.
const LAWS: &[(&[Knob], &[&str])] = &[
    (&[Knob::Temperature], &["adjusted_draws_follow_their_softmax", "temperature_divides_logits"]),
    (&[Knob::Position], &["positions_are_independent"]),
    (&[Knob::Draws, Knob::FirstDraw], &["draws_are_independent", "draws_do_not_depend_on_how_many_are_asked"]),
    (&[Knob::WithoutReplacement], &["lists_follow_plackett_luce", "lists_extend_the_single_draw"]),
    (&[Knob::Logprobs], &["log_z_and_top_logprobs_are_right"]),
    (&[Knob::LogprobsMode], &["raw_logprobs_are_the_models_own"]),
    (&[Knob::LogprobTokenIds, Knob::Ranks], &["ranks_and_given_tokens_are_right"]),
    (&[Knob::Mask], &["adjusted_draws_follow_their_softmax", "masks_forbid_and_allow"]),
    (&[Knob::LogitBias], &["adjusted_draws_follow_their_softmax", "logit_bias_shifts_logits"]),
    (
        &[
            Knob::Banned,
            Knob::MinTokens,
            Knob::StopTokenIds,
            Knob::RepetitionPenalty,
            Knob::FrequencyPenalty,
            Knob::PresencePenalty,
            Knob::DryMultiplier,
            Knob::DryBase,
            Knob::DrySequenceBreakers,
        ],
        &["adjusted_draws_follow_their_softmax", "penalties_have_the_reference_bits"],
    ),
    (
        &[
            Knob::TopK,
            Knob::TopP,
            Knob::MinP,
            Knob::TopNSigma,
            Knob::EpsilonCutoff,
            Knob::TypicalP,
            Knob::XtcThreshold,
            Knob::XtcProbability,
        ],
        &["filtered_draws_follow_the_truncated_softmax", "filters_keep_the_references_tokens"],
    ),
    (&[Knob::Kept], &["filters_keep_the_references_tokens"]),
];

fn head() -> Tensor {
    Tensor::from_fn(DType::BF16, 640, 8, |t, k| ((t * 7 + k) % 5) as f32 * 0.25)
}

/// Returns the capabilities of a factory's sampler, and its capabilities in a canonical plan if it has one.
fn of(factory: &dyn SamplerFactory) -> (Capabilities, Option<Capabilities>) {
    let weight = head();
    let head = Head::new(weight.matrix()).unwrap();
    let can = |plan| factory.build(head, plan).map(|sampler| sampler.capabilities());
    let canonical = can(Plan { canonical: true, ..Plan::default() }).ok();
    (can(Plan::default()).unwrap(), canonical)
}

/// Returns a line of the page's table.
fn line(name: &str, can: &Capabilities) -> String {
    let yes = |yes| if yes { "yes" } else { "–" };
    let all = |wanted: Knobs| match can.knobs.intersection(wanted) {
        none if none.is_empty() => "–".to_owned(),
        all if all == wanted => "all".to_owned(),
        some => some.iter().map(|knob| format!("`{knob}`")).collect::<Vec<_>>().join(", "),
    };
    let exact = if can.exactness == Exactness::Pathwise { "pathwise" } else { "in distribution" };
    format!(
        "| {name} | {exact} | {} | {} | {} | {} | {} | {} | {} |",
        yes(can.without_replacement),
        all(Knobs::ADJUSTMENTS),
        all(Knobs::FILTERS),
        yes(can.knobs.contains(Knob::Kept)),
        yes(can.knobs.contains(Knob::LogprobsMode)),
        yes(can.knobs.contains(Knob::LogprobTokenIds) && can.knobs.contains(Knob::Ranks)),
        yes(can.canonical),
    )
}

/// The knobs that a sampler may lack.
const OPTIONAL: Knobs = Knobs::ADJUSTMENTS.union(Knobs::FILTERS).union(Knobs::LOGPROBS).with(Knob::Kept);

fn lacks(can: &Capabilities) -> (Knobs, bool) {
    (OPTIONAL.without(can.knobs), !can.without_replacement)
}

/// Checks that the alternative in a sampler's errors has all knobs that the sampler lacks.
fn check_instead(name: &str, can: &Capabilities, plan: &Plan, plain: &Capabilities) {
    if lacks(can) == (Knobs::NONE, false) {
        return;
    }
    let cpu = |kind| of(&Cpu::new(kind, Isa::Portable)).0;
    let alternative = can.alternative(plan);
    let named = match alternative {
        "the tiled variant" | "the tiled variant over a whole head in memory" => vec![cpu(Kind::Tiled)],
        "a plan without `canonical`" => vec![*plain],
        "a merge of shards by winners" | "a merge of shards by winners, planned without `canonical`," => {
            let merge = ShardMerge::Winners;
            vec![of(&Shards { name: "instead", merge, shards: &[&PORTABLE], equal: Some(2) }).0]
        }
        other => panic!("{name}: {other} has no sampler here"),
    };
    for of in named {
        assert_eq!(lacks(&of), (Knobs::NONE, false), "{name}, {plan:?}: {alternative} ({of:?})");
    }
}

/// Checks the lines of samplers, and that a canonical plan has only the adjustments.
fn check(lines: &[(&str, Capabilities, Option<Capabilities>)]) {
    for (name, can, canonical) in lines {
        check_instead(name, can, &Plan::default(), can);
        if let Some(canonical) = canonical {
            check_instead(name, canonical, &Plan { canonical: true, ..Plan::default() }, can);
        }
        let line = line(name, can);
        assert!(PAGE.contains(&line), "docs/knobs.md lacks this line, or has another for it:\n{line}");
        // The reference's dot products are canonical in any plan.
        let left = canonical.filter(|_| !name.starts_with("reference"));
        assert!(left.is_none_or(|left| left.knobs == Knobs::ADJUSTMENTS), "{name}, canonical: {left:?}");
        assert!(can.canonical || canonical.is_none() || name.starts_with("reference"), "{name} takes canonical plans");
    }
}

#[test]
fn the_page_says_what_samplers_without_a_gpu_take() {
    let weight = head();
    let head = Head::new(weight.matrix()).unwrap();
    let reference = |scheme| (Reference::new(head, Plan::default(), scheme).capabilities(), None);
    let cpu = |kind| of(&Cpu::new(kind, Isa::Portable));
    let shards = |merge| of(&Shards { name: "knobs", merge, shards: &[&PORTABLE], equal: Some(2) });
    let all = [
        ("reference: tiled", reference(ReferenceVariant::Tiled)),
        ("reference: grouped", reference(ReferenceVariant::Grouped(128))),
        ("reference: online", reference(ReferenceVariant::Online(128))),
        ("reference: sharded", reference(ReferenceVariant::Sharded(vec![0, 300]))),
        ("CPU: `Tiled`", cpu(Kind::Tiled)),
        ("CPU: `Standalone`", cpu(Kind::Standalone)),
        ("CPU: `Grouped`", cpu(Kind::Grouped)),
        ("CPU: `Online`", cpu(Kind::Online)),
        ("CPU: `OnlineStream`", cpu(Kind::Stream)),
        ("shards of `Tiled`, `Winners`", shards(ShardMerge::Winners)),
        ("shards of `Tiled`, `LogMass`", shards(ShardMerge::LogMass)),
    ];
    check(&all.map(|(name, (can, canonical))| (name, can, canonical)));
}

#[test]
fn what_refuses_canonical_plans_names_what_takes_them() {
    let weight = head();
    let plan = Plan { canonical: true, ..Plan::default() };
    for kind in [Kind::Standalone, Kind::Grouped, Kind::Online, Kind::Stream] {
        let refused = Cpu::new(kind, Isa::Portable).build(Head::new(weight.matrix()).unwrap(), plan).err().unwrap();
        assert!(
            refused.0.contains("canonical is not supported by this variant; the tiled one has it"),
            "{}",
            refused.0
        );
    }
    assert!(of(&PORTABLE).0.canonical);
}

#[test]
fn the_page_says_what_samplers_on_a_gpu_take() {
    if !runs("cuda/knobs", Gpu::TILED.unavailable(), 1) {
        return;
    }
    // A single rank needs only one queue.
    let rank = GpuRanks { exchange: GpuExchange::Peers, gpus: Gpus::One, equal: Some(1), in_place: false };
    let all = [
        ("CUDA: `CudaTiled`", of(&Gpu::TILED)),
        ("CUDA: `DeviceSampler`", of(&Gpu::Shared)),
        ("CUDA: `CudaStandalone`", of(&Gpu::Standalone)),
        ("CUDA: `CudaGrouped`", of(&Gpu::Grouped(GROUP))),
        ("CUDA: `CudaOnline`", of(&Gpu::Online(GROUP))),
        ("CUDA: `CudaStreamed::tiled`", of(&Gpu::StreamedTiled)),
        ("CUDA: `CudaStreamed::online`", of(&Gpu::StreamedOnline)),
        ("ranks on GPUs: `CudaRank`", of(&rank)),
    ];
    check(&all.map(|(name, (can, canonical))| (name, can, canonical)));
}

#[test]
fn every_knob_of_a_row_has_a_law_and_the_page_names_it() {
    let named: Vec<Knob> = LAWS.iter().flat_map(|(knobs, _)| knobs.iter().copied()).collect();
    for knob in Knob::ALL.iter().filter(|knob| !matches!(knob, Knob::Canonical | Knob::MaxRows)) {
        assert_eq!(named.iter().filter(|n| *n == knob).count(), 1, "{knob}");
    }
    for (knobs, judges) in LAWS {
        let quoted = |names: Vec<String>| names.join(", ");
        let knobs = quoted(knobs.iter().map(|knob| format!("`{knob}`")).collect());
        let judges = judges.iter().inspect(|law| assert!(laws::named(law).is_some(), "{law}"));
        let line = format!("| {knobs} | {} |", quoted(judges.map(|law| format!("`{law}`")).collect()));
        assert!(PAGE.contains(&line), "docs/knobs.md lacks this line:\n{line}");
    }
    // The page has no line of a sampler that does not exist.
    let samplers = PAGE.lines().filter(|line| line.contains("| pathwise |") || line.contains("| in distribution |"));
    assert_eq!(samplers.count(), 19, "a line of the table of samplers is nobody's");
}
