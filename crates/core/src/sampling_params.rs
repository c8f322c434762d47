//! The parameters of a request, owned: made by a builder or (feature `serde`) read from JSON, checked once, and lent to a
//! call as [`RowParams`] at every step.
//!
//! Fields have the names of vLLM's `SamplingParams`, so that the sampling part of a request maps without a table; what
//! vLLM does not have is named as in [`RowParams`]. Fields that are not known are refused, not dropped: what is no
//! matter of the draw (`max_tokens`, `stop`, ...) must be taken out before.

use crate::error::RowError;
use crate::filters::Order;
use crate::history::History;
use crate::knob::Knob;
use crate::params::{LogprobsMode, RowParams};
use std::collections::BTreeMap;

/// A field with a value that means nothing.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{field} {reason}")]
pub struct ParamsError {
    /// The field's name.
    pub field: &'static str,
    /// What is wrong with it.
    pub reason: &'static str,
}

macro_rules! fields {
    ($($(#[$doc:meta])* $field:ident: $type:ty = $default:expr;)*) => {
        /// The fields of [`SamplingParams`], to be set one by one and checked by
        /// [`build`](SamplingParamsBuilder::build). The default has every knob off.
        #[derive(Clone, Debug, PartialEq)]
        #[cfg_attr(feature = "serde", derive(serde::Deserialize, serde::Serialize), serde(default, deny_unknown_fields))]
        pub struct SamplingParamsBuilder {
            $($(#[$doc])* pub $field: $type,)*
        }

        impl Default for SamplingParamsBuilder {
            fn default() -> Self {
                SamplingParamsBuilder { $($field: $default,)* }
            }
        }

        impl SamplingParamsBuilder {
            $(
                /// Sets the field of this name.
                #[must_use]
                pub fn $field(mut self, $field: $type) -> Self {
                    self.$field = $field;
                    self
                }
            )*
        }
    };
}

fields! {
    /// Draws of a step.
    n: u32 = 1;
    /// Divides the logits; 0 = greedy.
    temperature: f32 = 1.0;
    /// See [`RowParams::top_p`].
    top_p: f32 = 1.0;
    /// Keep this many of the largest logits; 0 or -1 = all.
    top_k: i32 = 0;
    /// See [`RowParams::min_p`].
    min_p: f32 = 0.0;
    /// The key of the noise; `None` = the caller's.
    seed: Option<u64> = None;
    /// See [`RowParams::presence_penalty`].
    presence_penalty: f32 = 0.0;
    /// See [`RowParams::frequency_penalty`].
    frequency_penalty: f32 = 0.0;
    /// See [`RowParams::repetition_penalty`].
    repetition_penalty: f32 = 1.0;
    /// Added to the logits of single tokens.
    logit_bias: BTreeMap<u32, f32> = BTreeMap::new();
    /// The only tokens that may be drawn; `None` = all.
    allowed_token_ids: Option<Vec<u32>> = None;
    /// See [`RowParams::banned`].
    banned_token_ids: Vec<u32> = Vec::new();
    /// See [`RowParams::min_tokens`].
    min_tokens: u32 = 0;
    /// See [`RowParams::stop_token_ids`].
    stop_token_ids: Vec<u32> = Vec::new();
    /// See [`RowParams::logprobs`].
    logprobs: Option<u32> = None;
    /// See [`RowParams::logprobs_mode`]. (vLLM has this for all requests alike, and its default is the raw ones.)
    logprobs_mode: LogprobsMode = LogprobsMode::Processed;
    /// See [`RowParams::top_n_sigma`].
    top_n_sigma: f32 = 0.0;
    /// See [`RowParams::epsilon_cutoff`].
    epsilon_cutoff: f32 = 0.0;
    /// See [`RowParams::typical_p`].
    typical_p: f32 = 1.0;
    /// See [`RowParams::xtc_threshold`].
    xtc_threshold: f32 = 0.1;
    /// See [`RowParams::xtc_probability`].
    xtc_probability: f32 = 0.0;
    /// See [`RowParams::dry_multiplier`].
    dry_multiplier: f32 = 0.0;
    /// See [`RowParams::dry_base`].
    dry_base: f32 = 1.75;
    /// See [`RowParams::dry_allowed_length`].
    dry_allowed_length: u32 = 2;
    /// See [`RowParams::dry_penalty_last_n`]; -1 = the whole sequence.
    dry_penalty_last_n: i32 = -1;
    /// See [`RowParams::dry_sequence_breakers`]; in any order.
    dry_sequence_breakers: Vec<u32> = Vec::new();
    /// See [`RowParams::order`].
    order: Order = Order::Vllm;
    /// See [`RowParams::without_replacement`].
    without_replacement: bool = false;
    /// See [`RowParams::kept`].
    kept: bool = false;
}

/// The parameters of a request, checked.
#[derive(Clone, Debug, PartialEq)]
#[cfg_attr(feature = "serde", derive(serde::Deserialize, serde::Serialize))]
#[cfg_attr(feature = "serde", serde(try_from = "SamplingParamsBuilder", into = "SamplingParamsBuilder"))]
pub struct SamplingParams {
    fields: SamplingParamsBuilder,
    /// `logit_bias` as rows take it.
    logit_bias: Vec<(u32, f32)>,
    /// `allowed_token_ids` as rows take them.
    mask: Option<Vec<u32>>,
}

impl SamplingParamsBuilder {
    /// Checks the values.
    ///
    /// # Errors
    /// The first field whose value means nothing.
    pub fn build(mut self) -> Result<SamplingParams, ParamsError> {
        let refuse = |field, reason| Err(ParamsError { field, reason });
        if self.top_k < -1 {
            return refuse("top_k", "must be at least -1");
        }
        if self.dry_penalty_last_n < -1 {
            return refuse("dry_penalty_last_n", "must be at least -1");
        }
        if self.allowed_token_ids.as_ref().is_some_and(Vec::is_empty) {
            return refuse("allowed_token_ids", "must name a token");
        }
        if self.allowed_token_ids.iter().flatten().any(|&token| token == u32::MAX) {
            return refuse("allowed_token_ids", "names a token beyond every vocabulary");
        }
        self.dry_sequence_breakers.sort_unstable();
        let mask = self.allowed_token_ids.as_ref().map(|tokens| {
            let mut mask = vec![0u32; tokens.iter().max().map_or(0, |&last| (last >> 5) as usize + 1)];
            tokens.iter().for_each(|token| mask[(token >> 5) as usize] |= 1 << (token & 31));
            mask
        });
        let logit_bias = self.logit_bias.iter().map(|(&token, &bias)| (token, bias)).collect();
        let params = SamplingParams { fields: self, logit_bias, mask };
        match params.row(0, 0, None).check_values() {
            Err(RowError::Invalid { knob, reason }) => refuse(field_of(knob), reason),
            _ => Ok(params),
        }
    }
}

/// The field that sets a knob.
fn field_of(knob: Knob) -> &'static str {
    match knob {
        Knob::Draws => "n",
        Knob::Mask => "allowed_token_ids",
        Knob::Banned => "banned_token_ids",
        knob => knob.name(),
    }
}

impl SamplingParams {
    /// Starts with every knob off.
    pub fn builder() -> SamplingParamsBuilder {
        SamplingParamsBuilder::default()
    }

    /// The values.
    pub fn fields(&self) -> &SamplingParamsBuilder {
        &self.fields
    }

    /// The parameters of the row that draws at `position` of a sequence, the `history` of which is known so far. Of
    /// requests without a seed of their own the noise is keyed by `seed`: requests of one batch must not share both seed and
    /// position.
    pub fn row<'a>(&'a self, seed: u64, position: u64, history: Option<&'a History>) -> RowParams<'a> {
        let fields = &self.fields;
        RowParams {
            seed: fields.seed.unwrap_or(seed),
            position,
            temperature: fields.temperature,
            draws: fields.n,
            first_draw: 0,
            without_replacement: fields.without_replacement,
            logprobs: fields.logprobs,
            logprobs_mode: fields.logprobs_mode,
            kept: fields.kept,
            mask: self.mask.as_deref(),
            logit_bias: &self.logit_bias,
            banned: &fields.banned_token_ids,
            history,
            min_tokens: fields.min_tokens,
            stop_token_ids: &fields.stop_token_ids,
            repetition_penalty: fields.repetition_penalty,
            frequency_penalty: fields.frequency_penalty,
            presence_penalty: fields.presence_penalty,
            dry_multiplier: fields.dry_multiplier,
            dry_base: fields.dry_base,
            dry_allowed_length: fields.dry_allowed_length,
            dry_penalty_last_n: u32::try_from(fields.dry_penalty_last_n).unwrap_or(u32::MAX),
            dry_sequence_breakers: &fields.dry_sequence_breakers,
            top_k: u32::try_from(fields.top_k).unwrap_or(0),
            top_p: fields.top_p,
            min_p: fields.min_p,
            top_n_sigma: fields.top_n_sigma,
            epsilon_cutoff: fields.epsilon_cutoff,
            typical_p: fields.typical_p,
            xtc_threshold: fields.xtc_threshold,
            xtc_probability: fields.xtc_probability,
            order: fields.order,
        }
    }
}

impl TryFrom<SamplingParamsBuilder> for SamplingParams {
    type Error = ParamsError;

    fn try_from(fields: SamplingParamsBuilder) -> Result<Self, ParamsError> {
        fields.build()
    }
}

impl From<SamplingParams> for SamplingParamsBuilder {
    fn from(params: SamplingParams) -> Self {
        params.fields
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::transform::allowed;

    #[test]
    fn the_default_is_the_default_row() {
        let params = SamplingParams::builder().build().unwrap();
        assert_eq!(params.row(0, 0, None), RowParams::default());
        assert!(params.row(0, 0, None).enabled().is_empty());
    }

    #[test]
    fn fields_reach_the_row() {
        let params = SamplingParams::builder()
            .temperature(0.5)
            .top_k(-1)
            .n(3)
            .logit_bias([(9, 1.5), (2, -1.0)].into())
            .allowed_token_ids(Some(vec![40, 2]))
            .dry_sequence_breakers(vec![7, 3])
            .build()
            .unwrap();
        let row = params.row(11, 5, None);
        assert_eq!((row.temperature, row.top_k, row.draws, row.seed, row.position), (0.5, 0, 3, 11, 5));
        assert_eq!(row.logit_bias, [(2, -1.0), (9, 1.5)]);
        assert_eq!(row.dry_sequence_breakers, [3, 7]);
        let mask = row.mask.unwrap();
        assert!((0..70).all(|token| allowed(mask, token) == [40, 2].contains(&token)));
        let seeded = SamplingParams::builder().seed(Some(8)).build().unwrap();
        assert_eq!(seeded.row(11, 5, None).seed, 8);
    }

    #[test]
    fn values_out_of_range_name_their_field() {
        let b = SamplingParams::builder;
        let bias = |value| [(3, value)].into();
        let cases = [
            (b().n(0), "n must be at least 1"),
            (b().temperature(-0.5), "temperature must be finite and not negative"),
            (b().temperature(f32::NAN), "temperature must be finite and not negative"),
            (b().top_p(0.0), "top_p must be above 0 and at most 1"),
            (b().top_p(1.5), "top_p must be above 0 and at most 1"),
            (b().top_k(-2), "top_k must be at least -1"),
            (b().min_p(-0.1), "min_p must be between 0 and 1"),
            (b().presence_penalty(f32::INFINITY), "presence_penalty must be between -2^64 and 2^64"),
            (b().frequency_penalty(f32::NAN), "frequency_penalty must be between -2^64 and 2^64"),
            (b().repetition_penalty(0.0), "repetition_penalty must be finite and above 0"),
            (b().logit_bias(bias(f32::NAN)), "logit_bias has a value that is NaN or +inf"),
            (b().allowed_token_ids(Some(vec![])), "allowed_token_ids must name a token"),
            (b().allowed_token_ids(Some(vec![!0])), "allowed_token_ids names a token beyond every vocabulary"),
            (b().banned_token_ids(vec![!0]), "banned_token_ids names a token beyond the vocabulary"),
            (b().stop_token_ids(vec![!0]), "stop_token_ids names a token beyond the vocabulary"),
            (b().top_n_sigma(-1.0), "top_n_sigma must be finite and not negative"),
            (b().epsilon_cutoff(2.0), "epsilon_cutoff must be between 0 and 1"),
            (b().typical_p(0.0), "typical_p must be above 0 and at most 1"),
            (b().xtc_threshold(0.0), "xtc_threshold must be above 0 and at most 1"),
            (b().xtc_probability(2.0), "xtc_probability must be between 0 and 1"),
            (b().dry_multiplier(-1.0), "dry_multiplier must be finite and not negative"),
            (b().dry_base(0.5), "dry_base must be finite and at least 1"),
            (b().dry_penalty_last_n(-2), "dry_penalty_last_n must be at least -1"),
        ];
        for (builder, says) in cases {
            assert_eq!(builder.build().unwrap_err().to_string(), says);
        }
    }

    #[cfg(feature = "serde")]
    #[test]
    fn a_request_of_vllm_maps_without_a_table() {
        let json = r#"{"n": 2, "temperature": 0.7, "top_p": 0.95, "top_k": -1, "min_p": 0.05, "seed": 42,
            "presence_penalty": 0.1, "frequency_penalty": 0.2, "repetition_penalty": 1.1, "logit_bias": {"11": -1.5, "2": 3},
            "allowed_token_ids": null, "min_tokens": 4, "stop_token_ids": [2], "logprobs": 5,
            "logprobs_mode": "raw_logprobs", "order": "llama-cpp"}"#;
        let params: SamplingParams = serde_json::from_str(json).unwrap();
        let row = params.row(0, 0, None);
        assert_eq!((row.draws, row.temperature, row.top_k, row.seed, row.logprobs), (2, 0.7, 0, 42, Some(5)));
        assert_eq!((row.logit_bias, row.stop_token_ids), (&[(2, 3.0), (11, -1.5)][..], &[2][..]));
        assert_eq!((row.logprobs_mode, row.order), (LogprobsMode::Raw, Order::LlamaCpp));
        let again = serde_json::to_string(&params).unwrap();
        assert_eq!(serde_json::from_str::<SamplingParams>(&again).unwrap(), params);
        for (json, says) in [
            (r#"{"max_tokens": 5}"#, "unknown field `max_tokens`"),
            (r#"{"top_p": 2}"#, "top_p must be above 0 and at most 1"),
            (r#"{"temperature": 1e99}"#, "temperature must be finite"),
            (r#"{"top_k": 0.5}"#, "invalid type: floating point"),
            (r#"{"n": 1, "n": 2}"#, "duplicate field `n`"),
        ] {
            let error = serde_json::from_str::<SamplingParams>(json).unwrap_err().to_string();
            assert!(error.contains(says), "{json}: {error}");
        }
    }
}
