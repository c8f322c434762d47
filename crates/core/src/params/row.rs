//! The check of a row's parameters against a sampler, its plan and the vocabulary.

use crate::error::{KnobValue, RowError};
use crate::noise::{Noise, POSITION_MAX};
use crate::params::adjustments::Adjustment;
use crate::params::filters::{Filter, Filters, Order};
use crate::params::knob::{Knob, Knobs};
use crate::params::transform::RowTransform;
use crate::params::{LARGEST_PENALTY, LogprobsMode, RowParams};
use crate::sampler::{Capabilities, Plan};

fn out_of_range(knob: Knob, value: impl Into<KnobValue>, range: &'static str) -> RowError {
    RowError::OutOfRange { knob, value: value.into(), range }
}

/// The checked parameters of a row, in the form that backends use.
#[derive(Clone, Copy, Debug)]
pub struct Row<'a> {
    /// The row's noise.
    pub noise: Noise,
    /// Whether scores are logits without noise.
    pub greedy: bool,
    /// Mask, adjustments and temperature.
    pub transform: RowTransform<'a>,
    /// Number of the first draw.
    pub first_draw: u32,
    /// Number of draws.
    pub draws: u32,
    /// Whether the draws are one list of different tokens, not independent draws.
    pub without_replacement: bool,
    /// The number of requested log-probabilities in the law of the draws.
    pub logprobs: Option<u32>,
    /// The number of requested log-probabilities in the law of the model.
    pub raw_logprobs: Option<u32>,
    /// The tokens with requested log-probabilities, in the law of `logprobs` or `raw_logprobs`.
    pub logprob_token_ids: &'a [u32],
    /// Whether the ranks of the drawn tokens are requested, in the same law.
    pub ranks: bool,
    /// Whether the kept tokens are requested.
    pub kept: bool,
    /// The filters; `None` for a greedy row. Without filters, present only if the kept tokens are requested.
    pub filters: Option<Filters>,
}

impl<'a> Row<'a> {
    /// The same row with the [`Adjustments`](crate::backend::Adjustments) of its parameters.
    pub fn with_adjustments<'b>(&self, adjustments: &'b [Adjustment]) -> Row<'b>
    where
        'a: 'b,
    {
        let row: Row<'b> = *self;
        Row { transform: RowTransform { adjustments, ..row.transform }, ..row }
    }

    /// The same row without transforms, filters and log-probabilities. Its transformed logits are the raw ones.
    pub fn without_transforms(&self) -> Row<'a> {
        let transform = RowTransform { mask: None, adjustments: &[], inv_temperature: 1.0 };
        Row { transform, filters: None, logprobs: None, raw_logprobs: None, ..*self }
    }
}

impl<'a> RowParams<'a> {
    /// Checks the parameters against a sampler's capabilities and plan, and the size of the vocabulary.
    ///
    /// `adjustments` are the [`Adjustments`](crate::backend::Adjustments) of these parameters; empty if the caller does
    /// not transform logits.
    ///
    /// # Errors
    /// The errors of [`RowParams::check_values`], and [`RowError::Unsupported`], [`RowError::Unplanned`] or
    /// [`RowError::BeyondPlan`] with the name of the knob.
    pub fn check(
        &self,
        adjustments: &'a [Adjustment],
        can: &Capabilities,
        plan: &Plan,
        vocab_size: u32,
    ) -> Result<Row<'a>, RowError> {
        let enabled = self.check_values_for(vocab_size)?;
        if let Some(knob) = enabled.without(can.knobs).iter().next() {
            return Err(RowError::Unsupported { knob, alternative: can.alternative(plan) });
        }
        self.check_plan(can, plan)?;
        let greedy = self.temperature == 0.0;
        let inv_temperature = if greedy { 1.0 } else { 1.0 / self.temperature };
        let noise = Noise::new(self.seed, self.position).ok_or(self.beyond_positions())?;
        let filters = (!greedy)
            .then(|| self.filters(&noise, inv_temperature, vocab_size))
            .filter(|f| self.kept || !f.steps().is_empty());
        // Filters before the temperature use the logits without it.
        let early = filters.is_some_and(|f| f.rescale != 1.0);
        let scale = if early { 1.0 } else { inv_temperature };
        Ok(Row {
            noise,
            greedy,
            transform: RowTransform { mask: self.mask, adjustments, inv_temperature: scale },
            first_draw: self.first_draw,
            draws: self.draws,
            without_replacement: self.without_replacement,
            logprobs: self.logprobs.filter(|_| self.logprobs_mode == LogprobsMode::Processed),
            raw_logprobs: self.logprobs.filter(|_| self.logprobs_mode == LogprobsMode::Raw),
            logprob_token_ids: self.logprob_token_ids,
            ranks: self.ranks,
            kept: self.kept,
            filters,
        })
    }

    /// Checks the lists of tokens: tokens are in the vocabulary, biases are sorted and valid.
    fn check_lists(&self, vocab_size: u32) -> Result<(), RowError> {
        let invalid = |knob, reason| Err(RowError::Invalid { knob, reason });
        let unknown = |knob, token| Err(RowError::UnknownToken { knob, token, vocab_size });
        let mut previous = None;
        for &(token, value) in self.logit_bias {
            if token >= vocab_size {
                return unknown(Knob::LogitBias, token);
            }
            if previous.is_some_and(|p| p >= token) {
                return invalid(Knob::LogitBias, "must have its tokens strictly ascending");
            }
            if value.is_nan() || value == f32::INFINITY {
                return invalid(Knob::LogitBias, "has a value that is NaN or +inf");
            }
            previous = Some(token);
        }
        for (knob, tokens) in [
            (Knob::Banned, self.banned),
            (Knob::StopTokenIds, self.stop_token_ids),
            (Knob::LogprobTokenIds, self.logprob_token_ids),
        ] {
            if let Some(&token) = tokens.iter().find(|&&token| token >= vocab_size) {
                return unknown(knob, token);
            }
        }
        Ok(())
    }

    /// The enabled knobs that a sampler may lack; see [`Capabilities::knobs`].
    pub fn enabled(&self) -> Knobs {
        let knobs = [
            (Knob::Banned, !self.banned.is_empty()),
            (Knob::MinTokens, self.min_tokens > 0),
            (Knob::RepetitionPenalty, self.repetition_penalty != 1.0),
            (Knob::FrequencyPenalty, self.frequency_penalty != 0.0),
            (Knob::PresencePenalty, self.presence_penalty != 0.0),
            (Knob::DryMultiplier, self.dry_multiplier != 0.0),
            (Knob::TopK, self.top_k != 0),
            (Knob::TopP, self.top_p != 1.0),
            (Knob::MinP, self.min_p != 0.0),
            (Knob::TopNSigma, self.top_n_sigma != 0.0),
            (Knob::EpsilonCutoff, self.epsilon_cutoff != 0.0),
            (Knob::TypicalP, self.typical_p != 1.0),
            // In a sampler's capabilities, the threshold covers both knobs of XTC.
            (Knob::XtcThreshold, self.xtc_probability != 0.0),
            (Knob::Kept, self.kept),
            (Knob::LogprobsMode, self.logprobs.is_some() && self.logprobs_mode != LogprobsMode::Processed),
            (Knob::LogprobTokenIds, !self.logprob_token_ids.is_empty()),
            (Knob::Ranks, self.ranks),
        ];
        let with = |all: Knobs, (knob, is_on)| if is_on { all.with(knob) } else { all };
        knobs.into_iter().fold(Knobs::NONE, with)
    }

    /// Checks the numbers of penalties and filters.
    fn check_ranges(&self) -> Result<(), RowError> {
        let within = |knob, value: f32, is_within: bool, range| match is_within {
            true => Ok(()),
            false => Err(out_of_range(knob, value, range)),
        };
        let penalty = |knob, x: f32| within(knob, x, x.abs() <= LARGEST_PENALTY, "between -2^64 and 2^64");
        let not_negative = |knob, x: f32| within(knob, x, x >= 0.0 && x.is_finite(), "finite and not negative");
        let from_0 = |knob, x: f32| within(knob, x, (0.0..=1.0).contains(&x), "between 0 and 1");
        let above_0 = |knob, x: f32| within(knob, x, x > 0.0 && x <= 1.0, "above 0 and at most 1");
        let (repetition, base) = (self.repetition_penalty, self.dry_base);
        let is_factor = repetition > 0.0 && repetition.is_finite();
        within(Knob::RepetitionPenalty, repetition, is_factor, "finite and above 0")?;
        penalty(Knob::FrequencyPenalty, self.frequency_penalty)?;
        penalty(Knob::PresencePenalty, self.presence_penalty)?;
        not_negative(Knob::DryMultiplier, self.dry_multiplier)?;
        within(Knob::DryBase, base, base >= 1.0 && base.is_finite(), "finite and at least 1")?;
        if !self.dry_sequence_breakers.is_sorted() {
            return Err(RowError::Invalid { knob: Knob::DrySequenceBreakers, reason: "must be ascending" });
        }
        above_0(Knob::TopP, self.top_p)?;
        from_0(Knob::MinP, self.min_p)?;
        not_negative(Knob::TopNSigma, self.top_n_sigma)?;
        from_0(Knob::EpsilonCutoff, self.epsilon_cutoff)?;
        above_0(Knob::TypicalP, self.typical_p)?;
        above_0(Knob::XtcThreshold, self.xtc_threshold)?;
        from_0(Knob::XtcProbability, self.xtc_probability)
    }

    fn beyond_positions(&self) -> RowError {
        out_of_range(Knob::Position, self.position, "below 2^56")
    }

    /// Checks that every value is valid, without a sampler.
    ///
    /// # Errors
    /// [`RowError::OutOfRange`], [`RowError::UnknownToken`] or [`RowError::Invalid`] with the name of the knob.
    pub fn check_values(&self) -> Result<(), RowError> {
        self.check_values_for(u32::MAX).map(drop)
    }

    /// Checks every value, and returns the [`RowParams::enabled`] knobs.
    fn check_values_for(&self, vocab_size: u32) -> Result<Knobs, RowError> {
        let invalid = |knob, reason| Err(RowError::Invalid { knob, reason });
        let temperature = |range| Err(out_of_range(Knob::Temperature, self.temperature, range));
        if self.position > POSITION_MAX {
            return Err(self.beyond_positions());
        }
        if !(self.temperature >= 0.0 && self.temperature.is_finite()) {
            return temperature("finite and not negative");
        }
        if self.temperature > 0.0 && 1.0 / self.temperature == f32::INFINITY {
            return temperature("large enough to divide by, or 0 for greedy");
        }
        if self.draws == 0 {
            return Err(out_of_range(Knob::Draws, u64::from(self.draws), "at least 1"));
        }
        if self.first_draw.checked_add(self.draws).is_none() {
            return invalid(Knob::FirstDraw, "plus draws must be below 2^32");
        }
        self.check_lists(vocab_size)?;
        self.check_ranges()?;
        let enabled = self.enabled();
        if self.temperature == 0.0 && self.kept {
            return invalid(Knob::Kept, "is not defined for a greedy row");
        }
        for knob in [Knob::LogprobTokenIds, Knob::Ranks] {
            if self.logprobs.is_none() && enabled.contains(knob) {
                return invalid(knob, "needs logprobs");
            }
        }
        // Pairs of a filter and the knob that enables it.
        for (filter, knob) in [(Knob::TypicalP, Knob::TypicalP), (Knob::XtcThreshold, Knob::XtcProbability)] {
            if self.temperature == 0.0 && enabled.contains(filter) {
                return invalid(knob, "can drop the largest logit, which a greedy row takes");
            }
        }
        Ok(enabled)
    }

    /// Checks the row against the limits of the plan.
    fn check_plan(&self, can: &Capabilities, plan: &Plan) -> Result<(), RowError> {
        if self.without_replacement && !can.without_replacement {
            return Err(RowError::Unsupported { knob: Knob::WithoutReplacement, alternative: can.alternative(plan) });
        }
        let beyond = |knob, requested: u32, planned: u32| RowError::BeyondPlan {
            knob,
            requested: u64::from(requested),
            planned: u64::from(planned),
        };
        if self.draws > plan.max_draws {
            return Err(beyond(Knob::Draws, self.draws, plan.max_draws));
        }
        match (self.logprobs, plan.max_logprobs) {
            (Some(_), None) => Err(RowError::Unplanned { knob: Knob::Logprobs }),
            (Some(n), Some(max)) if n > max => Err(beyond(Knob::Logprobs, n, max)),
            _ => Ok(()),
        }
    }

    /// The enabled filters that can drop a token, in their order.
    fn filters(&self, noise: &Noise, inv_temperature: f32, vocab_size: u32) -> Filters {
        let top_k = (1..vocab_size).contains(&self.top_k).then_some(Filter::TopK(self.top_k));
        let top_p = (self.top_p != 1.0).then_some(Filter::TopP(self.top_p));
        let min_p = (self.min_p != 0.0).then_some(Filter::MinP(self.min_p));
        let sigma = (self.top_n_sigma != 0.0).then_some(Filter::TopNSigma(self.top_n_sigma));
        let typical = (self.typical_p != 1.0).then_some(Filter::TypicalP(self.typical_p));
        let epsilon = (self.epsilon_cutoff != 0.0).then_some(Filter::Epsilon(self.epsilon_cutoff));
        let heads = self.xtc_probability > 0.0 && noise.xtc_coin() < f64::from(self.xtc_probability);
        let xtc = heads.then_some(Filter::Xtc(self.xtc_threshold));
        let steps = match self.order {
            Order::Vllm => [sigma, min_p, top_k, top_p, typical, epsilon, xtc],
            Order::HuggingFace => [sigma, top_k, top_p, min_p, typical, epsilon, xtc],
            Order::LlamaCpp => [sigma, top_k, typical, top_p, min_p, epsilon, xtc],
        };
        let mut filters = Filters::new(steps, 1.0);
        match self.order {
            Order::LlamaCpp => filters.rescale = inv_temperature,
            _ => filters.temperature = self.temperature,
        }
        filters
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::reference::{Reference, ReferenceVariant};
    use crate::{Head, Matrix, PerturbedArgmax};

    fn checked(params: RowParams<'_>) -> Result<Row<'_>, RowError> {
        let weight = [0.0f32; 8];
        let head = Head::new(Matrix::new(&weight, 8, 1).unwrap()).unwrap();
        let reference = Reference::new(head, Plan::default(), ReferenceVariant::Tiled);
        params.check(&[], &reference.capabilities(), &Plan::default(), 8)
    }

    #[test]
    fn filters_that_may_drop_the_largest_logit_are_refused_on_greedy_rows() {
        let greedy = RowParams { temperature: 0.0, ..RowParams::default() };
        for (row, knob) in [
            (RowParams { typical_p: 0.9, ..greedy }, Knob::TypicalP),
            (RowParams { xtc_probability: 0.5, ..greedy }, Knob::XtcProbability),
        ] {
            let reason = "can drop the largest logit, which a greedy row takes";
            assert_eq!(checked(row).unwrap_err(), RowError::Invalid { knob, reason });
            assert!(checked(RowParams { temperature: 1.0, ..row }).is_ok());
        }
        let others = RowParams { top_k: 2, top_p: 0.5, min_p: 0.1, top_n_sigma: 1.0, epsilon_cutoff: 0.1, ..greedy };
        assert!(checked(others).unwrap().filters.is_none());
        assert!(checked(RowParams { xtc_threshold: 0.01, ..greedy }).is_ok());
    }

    #[test]
    fn the_coin_of_top_choices_falls_as_often_as_it_should() {
        const ROWS: u64 = 40_000;
        for (xtc_probability, at) in [(0.1f32, 0), (0.5, 1), (0.85, 2)] {
            let heads = (0..ROWS).filter(|i| {
                let row = RowParams { xtc_probability, seed: 7 + at, position: *i, ..RowParams::default() };
                checked(row).unwrap().filters.is_some_and(|f| matches!(f.steps(), [Filter::Xtc(_)]))
            });
            let (p, heads) = (f64::from(xtc_probability), heads.count() as f64);
            // A false alarm at five deviations has probability 1 in 1.7 million.
            let deviations = |p: f64| ((heads - p * ROWS as f64) / (p * (1.0 - p) * ROWS as f64).sqrt()).abs();
            assert!(deviations(p) < 5.0, "{heads} of {ROWS} at {p}: {} deviations", deviations(p));
            // The negative control: a probability that is off by 0.02.
            assert!(deviations(p + 0.02) > 5.0 && deviations(p - 0.02) > 5.0);
        }
    }

    #[test]
    fn filters_know_the_temperature_that_comes_before_them() {
        let of = |order| {
            let row = checked(RowParams { top_n_sigma: 1.0, temperature: 8.0, order, ..RowParams::default() }).unwrap();
            row.filters.map(|f| (f.temperature, f.rescale))
        };
        assert_eq!((of(Order::Vllm), of(Order::HuggingFace)), (Some((8.0, 1.0)), Some((8.0, 1.0))));
        assert_eq!(of(Order::LlamaCpp), Some((1.0, 0.125)));
    }

    #[test]
    fn a_top_k_of_the_whole_vocabulary_is_no_filter() {
        for (top_k, filters) in [(7, 1), (8, 0), (9, 0), (u32::MAX, 0)] {
            let row = checked(RowParams { top_k, ..RowParams::default() }).unwrap();
            assert_eq!(row.filters.map_or(0, |f| f.steps().len()), filters, "top_k {top_k}");
            let row = checked(RowParams { top_k, top_p: 0.5, ..RowParams::default() }).unwrap();
            assert_eq!(row.filters.unwrap().steps().len(), filters + 1, "top_k {top_k} and top_p");
        }
    }
}
