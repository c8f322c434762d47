//! All that differs from row to row.

use crate::error::{Knob, RowError};
use crate::noise::Noise;
use crate::sampler::{Capabilities, Plan};
use crate::transform::RowTransform;

/// The parameters of one row (one sequence of the batch). [`RowParams::default`] has every knob disabled: one draw at
/// temperature 1 with seed 0 at position 0. A disabled knob leaves the result bit-identical.
///
/// The order of operations is vLLM's (v1): raw logits of the head, `mask`, `logit_bias`, penalties, greedy or
/// `temperature`, `min_p`, `top_k`, `top_p`, draw.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct RowParams<'a> {
    /// The key of the row's noise.
    pub seed: u64,
    /// The token's place in its sequence, up to [`POSITION_MAX`](crate::noise::POSITION_MAX). Never a batch index.
    pub position: u64,
    /// Divides the logits; 0 = greedy. Finite and not negative.
    pub temperature: f32,
    /// Number of draws; at least 1.
    pub draws: u32,
    /// The number of the first draw: draws `first_draw .. first_draw + draws` of the row are made. With replacement
    /// the draw number selects the noise; without, it selects the noise of the whole list.
    pub first_draw: u32,
    /// Draw a list of different tokens (Gumbel-top-k, Kool et al. 2019), best score first. The first of them is the
    /// token that a draw with replacement gives.
    pub without_replacement: bool,
    /// `Some(n)`: log Z, the log-probability of each drawn token, and the `n` largest log-probabilities; of the law
    /// drawn from (for a greedy row: of temperature 1).
    pub logprobs: Option<u32>,
    /// Bitmap over global token ids, least significant bit first, 1 = allowed; tokens beyond its end are forbidden.
    pub mask: Option<&'a [u32]>,
    /// Added to the logits of single tokens, tokens strictly ascending; `-inf` bans a token.
    pub logit_bias: &'a [(u32, f32)],
    /// Keep the `top_k` largest logits; 0 = off.
    pub top_k: u32,
    /// Keep the smallest set of largest probabilities that reaches `top_p`; 1 = off.
    pub top_p: f32,
    /// Keep probabilities of at least `min_p` times the largest; 0 = off.
    pub min_p: f32,
    /// Divides positive and multiplies negative logits of tokens in `prompt` or `output`; 1 = off.
    pub repetition_penalty: f32,
    /// Subtracted from a token's logit for each time it occurs in `output`; 0 = off.
    pub frequency_penalty: f32,
    /// Subtracted from a token's logit if it occurs in `output`; 0 = off.
    pub presence_penalty: f32,
    /// The prompt's tokens, for the repetition penalty.
    pub prompt: &'a [u32],
    /// The tokens generated so far, for the penalties.
    pub output: &'a [u32],
}

impl Default for RowParams<'_> {
    fn default() -> Self {
        RowParams {
            seed: 0,
            position: 0,
            temperature: 1.0,
            draws: 1,
            first_draw: 0,
            without_replacement: false,
            logprobs: None,
            mask: None,
            logit_bias: &[],
            top_k: 0,
            top_p: 1.0,
            min_p: 0.0,
            repetition_penalty: 1.0,
            frequency_penalty: 0.0,
            presence_penalty: 0.0,
            prompt: &[],
            output: &[],
        }
    }
}

/// A row whose parameters were checked, in the form that a backend works with.
#[derive(Clone, Copy, Debug)]
pub struct Row<'a> {
    /// The row's noise.
    pub noise: Noise,
    /// Whether scores are the logits themselves.
    pub greedy: bool,
    /// Mask, biases and temperature.
    pub transform: RowTransform<'a>,
    /// Number of the first draw.
    pub first_draw: u32,
    /// Number of draws.
    pub draws: u32,
    /// One list of different tokens rather than independent draws.
    pub without_replacement: bool,
    /// Log-probabilities asked for.
    pub logprobs: Option<u32>,
}

impl<'a> RowParams<'a> {
    /// Checks the parameters against what a sampler can do, what was planned, and the size of the vocabulary.
    ///
    /// # Errors
    /// [`RowError::Invalid`], [`RowError::Unsupported`] or [`RowError::BeyondPlan`], naming the knob.
    pub fn check(&self, can: &Capabilities, plan: &Plan, vocab_size: u32) -> Result<Row<'a>, RowError> {
        let invalid = |knob, reason| Err(RowError::Invalid { knob, reason });
        let Some(noise) = Noise::new(self.seed, self.position) else {
            return invalid(Knob::Position, "must be below 2^56");
        };
        if !(self.temperature >= 0.0 && self.temperature.is_finite()) {
            return invalid(Knob::Temperature, "must be finite and not negative");
        }
        let greedy = self.temperature == 0.0;
        let inv_temperature = if greedy { 1.0 } else { 1.0 / self.temperature };
        if inv_temperature == f32::INFINITY {
            return invalid(Knob::Temperature, "is too small to divide by; use 0 for greedy");
        }
        if self.draws == 0 {
            return invalid(Knob::Draws, "must be at least 1");
        }
        if self.first_draw.checked_add(self.draws).is_none() {
            return invalid(Knob::FirstDraw, "plus draws must be below 2^32");
        }
        let mut previous = None;
        for &(token, value) in self.logit_bias {
            if token >= vocab_size {
                return invalid(Knob::LogitBias, "names a token beyond the vocabulary");
            }
            if previous.is_some_and(|p| p >= token) {
                return invalid(Knob::LogitBias, "must have its tokens strictly ascending");
            }
            if value.is_nan() || value == f32::INFINITY {
                return invalid(Knob::LogitBias, "has a value that is NaN or +inf");
            }
            previous = Some(token);
        }
        self.check_filters(can)?;
        self.check_plan(can, plan)?;
        Ok(Row {
            noise,
            greedy,
            transform: RowTransform { mask: self.mask, logit_bias: self.logit_bias, inv_temperature },
            first_draw: self.first_draw,
            draws: self.draws,
            without_replacement: self.without_replacement,
            logprobs: self.logprobs,
        })
    }

    /// Filters and penalties: a value that means something, and a sampler that can do it.
    fn check_filters(&self, can: &Capabilities) -> Result<(), RowError> {
        let finite = |x: f32| x.is_finite();
        // (knob, enabled, valid, supported)
        let knobs = [
            (Knob::TopK, self.top_k != 0, true, can.filters),
            (Knob::TopP, self.top_p != 1.0, self.top_p > 0.0 && self.top_p <= 1.0, can.filters),
            (Knob::MinP, self.min_p != 0.0, (0.0..=1.0).contains(&self.min_p), can.filters),
            (
                Knob::RepetitionPenalty,
                self.repetition_penalty != 1.0,
                self.repetition_penalty > 0.0 && finite(self.repetition_penalty),
                can.penalties,
            ),
            (Knob::FrequencyPenalty, self.frequency_penalty != 0.0, finite(self.frequency_penalty), can.penalties),
            (Knob::PresencePenalty, self.presence_penalty != 0.0, finite(self.presence_penalty), can.penalties),
        ];
        for (knob, enabled, valid, supported) in knobs {
            if !valid {
                return Err(RowError::Invalid { knob, reason: "is out of its range" });
            }
            if enabled && !supported {
                return Err(RowError::Unsupported { knob });
            }
        }
        Ok(())
    }

    /// What the plan has room for.
    fn check_plan(&self, can: &Capabilities, plan: &Plan) -> Result<(), RowError> {
        if self.without_replacement && !can.without_replacement {
            return Err(RowError::Unsupported { knob: Knob::WithoutReplacement });
        }
        let beyond = |knob, asked: u32, planned: u32| RowError::BeyondPlan {
            knob,
            asked: u64::from(asked),
            planned: u64::from(planned),
        };
        if self.draws > plan.max_draws {
            return Err(beyond(Knob::Draws, self.draws, plan.max_draws));
        }
        match (self.logprobs, plan.max_logprobs) {
            (Some(_), None) => Err(RowError::BeyondPlan { knob: Knob::Logprobs, asked: 1, planned: 0 }),
            (Some(n), Some(max)) if n > max => Err(beyond(Knob::Logprobs, n, max)),
            _ => Ok(()),
        }
    }
}
