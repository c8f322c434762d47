//! Negative controls: every law rejects a sampler that breaks it, with the seeds and the effort of the tests.

mod wrong;

use flash_sampling_conformance::report::ALPHA;
use flash_sampling_conformance::{Effort, granules, laws, noise_map, suite};
use std::sync::atomic::AtomicUsize;
use std::sync::atomic::Ordering::Relaxed;
use wrong::Fault;
use wrong::maps::WrongMap;

/// Pairs of a fault and the law that must reject it. Every law has a pair.
const CONTROLS: &[(Fault, &str)] = &[
    (Fault::Map(WrongMap::TritonRand), "noise_has_the_reference_bits"),
    (Fault::DroppedTile, "noise_has_the_reference_bits"),
    (Fault::Map(WrongMap::NoRefinement), "noise_matches_the_vectors"),
    (Fault::Map(WrongMap::SixteenRefined), "noise_matches_the_vectors"),
    (Fault::LocalGranules, "granules_may_be_cut"),
    (Fault::GranuleOfItsLeader, "granules_may_be_cut"),
    (Fault::NextCoin, "values_are_stable"),
    (Fault::LocalNoise, "partitions_merge_to_the_same_winner"),
    (Fault::LocalGranules, "partitions_merge_to_the_same_winner"),
    (Fault::DroppedTile, "partitions_merge_to_the_same_winner"),
    (Fault::RowNoise, "rows_do_not_depend_on_the_batch"),
    (Fault::SumsByBatch, "rows_do_not_depend_on_the_batch"),
    (Fault::FirstDrawIgnored, "draws_do_not_depend_on_how_many_are_asked"),
    (Fault::CallNoise, "results_do_not_depend_on_earlier_calls"),
    (Fault::Bf16Maxima, "exact_inputs_have_the_reference_bits"),
    (Fault::NextCoin, "exact_inputs_have_the_reference_bits"),
    (Fault::SkipsTooMuch, "many_draws_have_the_reference_bits"),
    (Fault::StaleThreshold, "low_logits_change_no_draw"),
    (Fault::Bf16Logits, "real_inputs_stay_within_the_rounding_bound"),
    (Fault::NotCanonical, "canonical_plans_have_the_reference_bits"),
    (Fault::Bf16Maxima, "scores_are_logit_plus_noise"),
    (Fault::OddHidden, "every_shape_is_taken"),
    (Fault::HigherTie, "ties_go_to_the_lower_token"),
    (Fault::DroppedTile, "tokens_follow_the_softmax"),
    (Fault::Map(WrongMap::OwnLeader), "tokens_follow_the_softmax"),
    (Fault::RunningMassTooEarly, "tokens_follow_the_softmax"),
    (Fault::OneCoin, "tokens_follow_the_softmax_over_large_vocabularies"),
    (Fault::Map(WrongMap::Clipped), "rare_tokens_are_drawn_as_often_as_they_should"),
    (Fault::Map(WrongMap::MinimumOfOne), "winning_scores_are_gumbel"),
    (Fault::ReuseCalledFresh, "winning_scores_are_gumbel"),
    (Fault::DrawHalved, "draws_are_independent"),
    (Fault::PositionTruncated, "positions_are_independent"),
    (Fault::SeedTruncated, "rows_are_independent"),
    (Fault::LocalNoise, "shards_are_independent"),
    (Fault::LocalGranules, "shards_are_independent"),
    (Fault::Map(WrongMap::OneExcess), "lists_follow_plackett_luce"),
    (Fault::GreedyList, "lists_follow_plackett_luce"),
    (Fault::ListOfDraws, "lists_extend_the_single_draw"),
    (Fault::MaskBitOrder, "masks_forbid_and_allow"),
    (Fault::BiasTooShort, "logit_bias_shifts_logits"),
    (Fault::TemperatureOnScores, "temperature_divides_logits"),
    (Fault::BiasAfterTemperature, "head_transforms_have_the_reference_bits"),
    (Fault::PaddingDrawn, "padding_is_never_drawn"),
    (Fault::TopPWithoutBoundary, "filters_keep_the_references_tokens"),
    (Fault::HigherKth, "filters_keep_the_references_tokens"),
    (Fault::LowerEpsilon, "filters_keep_the_references_tokens"),
    (Fault::CoarseDeviation, "filters_keep_the_references_tokens"),
    (Fault::TopPWithoutBoundary, "filtered_draws_follow_the_truncated_softmax"),
    (Fault::FilterBeforeTemperature, "filtered_draws_follow_the_truncated_softmax"),
    (Fault::XtcAlways, "filtered_draws_follow_the_truncated_softmax"),
    (Fault::SmallMinPLost, "any_parameters_have_the_reference_bits"),
    (Fault::TopBeforeTemperature, "any_parameters_have_the_reference_bits"),
    (Fault::PenaltiesAfterTemperature, "penalties_have_the_reference_bits"),
    (Fault::PenaltiesAfterTemperature, "adjusted_draws_follow_their_softmax"),
    (Fault::BiasAfterTemperature, "adjusted_draws_follow_their_softmax"),
    (Fault::RepetitionDivides, "adjusted_draws_follow_their_softmax"),
    (Fault::PenaltyOfOne, "disabled_knobs_change_nothing"),
    (Fault::RowNoise, "verified_blocks_emit_what_the_target_draws"),
    (Fault::NeighboursBans, "knobs_do_not_reach_other_rows"),
    (Fault::ProcessedCalledRaw, "raw_logprobs_are_the_models_own"),
    (Fault::RankBehindTies, "ranks_and_given_tokens_are_right"),
    (Fault::NextTokensLogit, "ranks_and_given_tokens_are_right"),
    (Fault::Bf16Mass, "log_z_and_top_logprobs_are_right"),
    (Fault::NanIgnored, "bad_rows_are_errors_that_name_themselves"),
    (Fault::FiltersDropped, "impossible_knobs_are_errors"),
    (Fault::RowCountIgnored, "wrong_shapes_are_errors"),
];

suite!(without_a_fault, Fault::None);

#[test]
fn every_law_rejects_the_samplers_that_break_it() {
    let check = |&(fault, law): &(Fault, &str)| {
        let law = laws::named(law).expect("a law of the table");
        match law.check(&suite::trial(&fault)) {
            Ok(report) => Some(format!("{fault:?}: {report}")),
            Err(failure) => {
                println!("{fault:?}: {failure}");
                None
            }
        }
    };
    let next = AtomicUsize::new(0);
    let some = || std::iter::from_fn(|| CONTROLS.get(next.fetch_add(1, Relaxed))).filter_map(check).collect();
    let missed: Vec<String> = std::thread::scope(|scope| {
        let threads = [(); 2].map(|()| scope.spawn(some));
        threads.into_iter().flat_map(|thread| -> Vec<String> { thread.join().expect("laws do not panic") }).collect()
    });
    assert!(missed.is_empty(), "not rejected:\n{}", missed.join("\n"));
}

#[test]
fn every_law_has_a_control() {
    let without: Vec<&str> =
        laws::ALL.iter().map(|law| law.name).filter(|law| !CONTROLS.iter().any(|(_, l)| l == law)).collect();
    assert!(without.is_empty(), "no control breaks {without:?}");
}

/// Counts the instances of the suite in the sources. Those with NEON run on ARM only.
#[test]
fn a_correct_system_fails_a_run_with_probability_below_two_percent() {
    const CHECKS: usize = 139;
    let folder = std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join("tests");
    let files =
        |folder| std::fs::read_dir(folder).expect("the sources of the tests").map(|file| file.expect("a file").path());
    let mut instances = 0;
    for file in files(folder.clone()).chain(files(folder.join("python_package"))).filter(|file| file.is_file()) {
        let source = std::fs::read_to_string(&file).expect("a source");
        instances += source.lines().filter(|line| line.starts_with("suite!(") && !line.contains("neon")).count();
    }
    assert!(instances > 70, "{instances} instances were found");
    let level = (instances * CHECKS) as f64 * ALPHA;
    println!("{instances} instances: {level}");
    assert!(level < 0.02, "{instances} instances: {level}");
}

#[test]
fn the_hits_of_rare_tokens_reject_triton_rand() {
    let outcome = noise_map::hits(&WrongMap::TritonRand, 1e-8, 1 << 16, 400, &|_| ());
    println!("TritonRand: {outcome:?}");
    assert!(outcome.p < ALPHA);
}

#[test]
fn the_measure_of_the_tail_rejects_wrong_maps() {
    use WrongMap::{Clipped, FastInnerLog, LeaderInMinimum, MinimumOfOne};
    use WrongMap::{NoRefinement, RoundsToOne, SixteenRefined, TritonRand};
    for (map, p) in [
        (TritonRand, 1e-6),
        (RoundsToOne, 1e-7),
        (Clipped, 1e-6),
        (FastInnerLog, 1e-7),
        (NoRefinement, 1e-9),
        (SixteenRefined, 2e-9),
        (LeaderInMinimum, 1e-9),
        (MinimumOfOne, 1e-3),
    ] {
        let biases = noise_map::biases(&map, p);
        println!("{map:?}: relative biases {biases:?} of a token of probability {p:e}");
        assert!(biases.iter().any(|(_, bias)| bias.abs() > noise_map::BIAS_LIMIT), "{map:?} is not rejected at {p:e}");
    }
}

#[test]
fn the_law_of_granules_rejects_wrong_maps() {
    for (map, what) in [
        (WrongMap::MinimumOfOne, "minimum, Kolmogorov-Smirnov"),
        (WrongMap::OneExcess, "all pairs, correlations"),
        (WrongMap::OneExcess, "a triple, contingency table"),
        (WrongMap::OwnLeader, "minimum, Kolmogorov-Smirnov"),
        (WrongMap::OwnLeader, "tokens in the tail of 1/256, chi-square"),
    ] {
        let failure = granules::check(&map, Effort::Quick).expect_err("this map is wrong");
        println!("{failure}");
        let check = failure.report.checks.iter().find(|check| check.what == what);
        assert!(check.is_some_and(|check| !check.passes()), "{map:?} is not rejected by {what}");
    }
}
