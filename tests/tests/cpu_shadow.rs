//! The suite on the CPU backend and on the reference, over heads with a shadow.

mod backends;

use backends::referee::Referee;
use backends::shadow::WithShadow;
use backends::shadow_draws::{CallSize, draws_have_equal_bits};
use backends::{Cpu, Kind};
use flash_sampling_conformance::problem::Size;
use flash_sampling_conformance::suite;
use flash_sampling_core::DType;
use flash_sampling_cpu::Isa;

suite!(tiled, WithShadow(Cpu::new(Kind::Tiled, Isa::best_for(DType::BF16, DType::BF16))));
suite!(tiled_portable, WithShadow(Cpu::new(Kind::Tiled, Isa::Portable)));
suite!(grouped_reuse, WithShadow(Cpu::new(Kind::GroupedReuse, Isa::best_for(DType::BF16, DType::BF16))));
// The other laws test the distribution of draws, as the suite on the reference without a shadow does. These laws compare
// the bits of both.
suite!(
    reference,
    WithShadow(Referee("tiled")),
    [
        noise_has_the_reference_bits,
        noise_matches_the_vectors,
        values_are_stable,
        partitions_merge_to_the_same_winner,
        granules_may_be_cut,
        rows_do_not_depend_on_the_batch,
        draws_do_not_depend_on_how_many_are_asked,
        results_do_not_depend_on_earlier_calls,
        exact_inputs_have_the_reference_bits,
        many_draws_have_the_reference_bits,
        low_logits_change_no_draw,
        real_inputs_stay_within_the_rounding_bound,
        canonical_plans_have_the_reference_bits,
        scores_are_logit_plus_noise,
        every_shape_is_taken,
        ties_go_to_the_lower_token,
        lists_extend_the_single_draw,
        masks_forbid_and_allow,
        logit_bias_shifts_logits,
        temperature_divides_logits,
        head_transforms_have_the_reference_bits,
        padding_is_never_drawn,
        verified_blocks_emit_what_the_target_draws,
        filters_keep_the_references_tokens,
        penalties_have_the_reference_bits,
        disabled_knobs_change_nothing,
        knobs_do_not_reach_other_rows,
        any_parameters_have_the_reference_bits,
        raw_logprobs_are_the_models_own,
        ranks_and_given_tokens_are_right,
        log_z_and_top_logprobs_are_right,
        bad_rows_are_errors_that_name_themselves,
        impossible_knobs_are_errors,
        wrong_shapes_are_errors,
    ]
);

#[test]
fn a_million_draws_by_a_shadow_have_equal_bits() {
    // With AVX2 alone, only calls of one row read the shadow.
    let sizes = [(1, 64), (1, 48), (1, 64), (1, 64), (1, 64), (1, 64), (4, 16)];
    let calls = sizes.map(|(rows, draws)| CallSize { rows, draws });
    let isa = Isa::best_for(DType::BF16, DType::BF16);
    draws_have_equal_bits(Cpu::new(Kind::Tiled, isa).with_threads(1), Size::new(16, 2560, 64), &calls);
}
