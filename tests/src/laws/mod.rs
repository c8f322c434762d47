//! The laws: one function per law, whose name states the promise.

mod adjustments;
mod agreement;
mod bad_rows;
mod batch;
mod calls;
mod filters;
mod granules;
mod group_max;
mod independence;
mod knobs;
mod logprobs;
mod noise;
mod parameters;
mod partition;
mod shapes;
mod softmax;
mod speculation;
mod tail;
mod transforms;
mod values;
mod without_replacement;

pub use values::{scheme_name, stability_problem, stability_schemes, uneven_starts};

use crate::report::{Broken, LawFailure, LawReport};
use crate::trial::Trial;

/// A testable property of samplers.
#[derive(Clone, Copy, Debug)]
pub struct Law {
    /// The name of the law and of its test.
    pub name: &'static str,
    /// The promise, in one sentence.
    pub promise: &'static str,
    run: fn(&Trial<'_>, &mut LawReport) -> Result<(), Broken>,
}

impl Law {
    /// Runs the law.
    ///
    /// # Errors
    /// Returns the report of the broken law and the reason.
    pub fn check(&self, trial: &Trial<'_>) -> Result<LawReport, LawFailure> {
        let mut report = LawReport { law: self.name, sampler: trial.factory.name(), ..LawReport::default() };
        let outcome = (self.run)(trial, &mut report);
        (trial.progress)(1.0);
        report.verdict(outcome)
    }
}

/// Finds a law by its name.
pub fn named(name: &str) -> Option<&'static Law> {
    ALL.iter().find(|law| law.name == name)
}

/// Lists every law once: (file, function, promise). Passes the list to `$then`, a macro of this crate.
#[doc(hidden)]
#[macro_export]
macro_rules! each_law {
    ($then:ident { $($context:tt)* }) => {
        $crate::$then! {
            { $($context)* }
            (noise, noise_has_the_reference_bits, "The noise of (seed, position, draw, token) has the bits of the scalar definition, for every token of a tile, the last one included.")
            (noise, noise_matches_the_vectors, "The noise of the words in vectors/noise.txt, the rarest words included, has the bits written there.")
            (values, values_are_stable, "The tokens of vectors/value_stability.txt come out.")
            (partition, partitions_merge_to_the_same_winner, "Every split of the vocabulary, merged in any order, gives the winner, the score bits and the log Z bits of the whole.")
            (granules, granules_may_be_cut, "Shards and vocabularies that begin or end within a granule, and masks that leave some tokens of one, its leader or not, have the reference's bits and the law of the draw.")
            (batch, rows_do_not_depend_on_the_batch, "A row alone and the row in any place of any batch have the same bits.")
            (batch, draws_do_not_depend_on_how_many_are_asked, "Draw n has the same bits whether it is made alone or among others.")
            (batch, results_do_not_depend_on_earlier_calls, "A sampler that has served other calls, failed ones included, answers like a new one.")
            (agreement, exact_inputs_have_the_reference_bits, "Where dot products are exact, token, score, logit and log Z have the bits of the float64 reference, for all dtypes.")
            (agreement, many_draws_have_the_reference_bits, "Of two hundred thousand draws each has the bits of the reference: what a sampler skips could not have won.")
            (agreement, low_logits_change_no_draw, "Tokens with logits of -1e4 to -1e9, before the others and among them, leave every draw with the bits of the reference.")
            (agreement, real_inputs_stay_within_the_rounding_bound, "On real inputs scores stay within the float32 rounding bound, and only near ties may change a token.")
            (agreement, canonical_plans_have_the_reference_bits, "With a canonical plan, token, score and logit have the bits of the reference on real inputs too.")
            (agreement, scores_are_logit_plus_noise, "Every draw's score is its logit plus the noise of its token, rounded once, in every variant.")
            (shapes, every_shape_is_taken, "Vocabularies from 1 to 256k and hidden sizes from 1 to 8192, aligned or not, one row to 256, strided and unaligned.")
            (shapes, ties_go_to_the_lower_token, "Of equal scores the lower token wins.")
            (softmax, tokens_follow_the_softmax, "Tokens follow the softmax: by index, by lane within a tile, by tile, and by probability decade with the tail pooled.")
            (softmax, tokens_follow_the_softmax_over_large_vocabularies, "The same at 32k to 256k tokens.")
            (tail, rare_tokens_are_drawn_as_often_as_they_should, "Tokens of probability 1e-6 and 1e-7 are drawn as often as they should, pooled.")
            (group_max, winning_scores_are_gumbel, "The winning score of a group is Gumbel with the group's log-mass as location.")
            (independence, draws_are_independent, "Successive draws of a row are independent.")
            (independence, positions_are_independent, "Neighbouring positions under one seed are independent.")
            (independence, rows_are_independent, "Rows with neighbouring seeds are independent.")
            (independence, shards_are_independent, "Shards of one head draw from independent noise.")
            (without_replacement, lists_follow_plackett_luce, "Lists without replacement follow the Plackett-Luce law, by enumeration on a small vocabulary.")
            (without_replacement, lists_extend_the_single_draw, "A list is distinct, sorted, begins with the draw made with replacement, and has the reference's bits.")
            (transforms, masks_forbid_and_allow, "Masked tokens never come, a full mask changes no bit, tokens beyond the mask's end are forbidden.")
            (transforms, logit_bias_shifts_logits, "A sparse logit bias is the same as a bias of the head.")
            (transforms, temperature_divides_logits, "Temperature divides the logits; 0 is the argmax and takes no noise.")
            (transforms, head_transforms_have_the_reference_bits, "Head bias, soft-cap, scale and all row transforms together have the reference's bits.")
            (transforms, padding_is_never_drawn, "Weight rows beyond vocab_size are never drawn nor looked at.")
            (speculation, verified_blocks_emit_what_the_target_draws, "A draft verified by shared noise, a block in one call, gives the tokens that are drawn one by one.")
            (filters, filters_keep_the_references_tokens, "Under every filter, alone and together, in every order, the kept tokens and the draws are the reference's.")
            (filters, filtered_draws_follow_the_truncated_softmax, "Filtered draws follow the softmax over the tokens that the filter must keep.")
            (adjustments, penalties_have_the_reference_bits, "Penalties, bans and minimum lengths have the reference's bits.")
            (adjustments, adjusted_draws_follow_their_softmax, "Under masks, biases, bans and penalties, alone and together, draws follow the softmax of the logits that the definitions give.")
            (filters, disabled_knobs_change_nothing, "A knob that is off, and a filter on a greedy row, leaves the result bit-identical.")
            (filters, knobs_do_not_reach_other_rows, "A row with any knob on leaves its neighbours' bits alone.")
            (parameters, any_parameters_have_the_reference_bits, "Rows whose knobs, filters and penalties are drawn at random, tiny and huge values among them, have the reference's bits and kept tokens.")
            (logprobs, raw_logprobs_are_the_models_own, "Raw log-probabilities are of the logits before anything that belongs to the row, to the bits of the reference, and change no draw.")
            (logprobs, ranks_and_given_tokens_are_right, "The rank of each drawn token and the log-probabilities of given tokens are the reference's, ties included, in either law, and change no draw.")
            (logprobs, log_z_and_top_logprobs_are_right, "log Z is within 2e-8 of the float64 value, and the top list holds the largest logits.")
            (bad_rows, bad_rows_are_errors_that_name_themselves, "NaN, +inf, all masked and all -inf rows give the reference's error, and the other rows keep their bits.")
            (calls, impossible_knobs_are_errors, "A knob out of range, beyond the plan or beyond the sampler is an error that names it.")
            (calls, wrong_shapes_are_errors, "A call with wrong width, wrong parameter count or too many rows is an error, and the sampler lives on.")
        }
    };
}

/// Expands [`each_law!`](crate::each_law) to the table of laws.
#[doc(hidden)]
#[macro_export]
macro_rules! law_table {
    ({} $(($module:ident, $law:ident, $promise:expr))*) => {
        &[$(Law { name: stringify!($law), promise: $promise, run: $module::$law }),*]
    };
}

/// All laws, in the order of reports.
pub const ALL: &[Law] = crate::each_law!(law_table {});
