//! The parameters of a request, owned: set one by one or (feature `serde`) read from JSON, checked once against a
//! vocabulary, and lent to a call as [`RowParams`] at every step.
//!
//! Fields have the names of vLLM's `SamplingParams`, so that the sampling part of a request maps without a table: `null`
//! stands for a field's default, -1 for no seed, every token (`top_k`) and all log-probabilities. What vLLM does not have is
//! named as in [`RowParams`]. Nothing is dropped: a field that is not known is refused, and vLLM's fields that are no matter
//! of the draw (`max_tokens`, `stop`, `detokenize`, ...) are refused unless their value asks for nothing, as null and vLLM's
//! own default of most of them do. (The default of `max_tokens` is 16, which asks for an end.) Two things differ: `logit_bias` is not clamped to ±100, and
//! `logprobs_mode`, which vLLM has for all requests alike, is the processed ones unless said.

use crate::error::RowError;
use crate::filters::Order;
use crate::history::History;
use crate::knob::Knob;
use crate::params::{LogprobsMode, RowParams};
#[cfg(feature = "serde")]
use read::{Most, Seed};
use std::collections::BTreeMap;
#[cfg(feature = "serde")]
use std::collections::BTreeSet;

#[cfg(feature = "serde")]
mod read;

/// A field with a value that means nothing.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{field} {reason}")]
pub struct ParamsError {
    /// The field's name.
    pub field: &'static str,
    /// What is wrong with it.
    pub reason: String,
}

/// The type that a field is read as: the last one.
#[cfg(feature = "serde")]
macro_rules! read_as {
    ($type:ty) => {
        $type
    };
    ($type:ty, $read:ty) => {
        $read
    };
}

macro_rules! fields {
    ($($(#[$doc:meta])* $field:ident: $type:ty $([$read:ty])? = $default:expr;)*) => {
        /// The fields of [`SamplingParams`], to be set one by one and checked by
        /// [`build`](SamplingParamsBuilder::build). The default has every knob off.
        #[derive(Clone, Debug, PartialEq)]
        #[cfg_attr(feature = "serde", derive(serde::Serialize))]
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

        /// `null` is the default. Errors name the field.
        #[cfg(feature = "serde")]
        impl<'de> serde::Deserialize<'de> for SamplingParamsBuilder {
            fn deserialize<D: serde::Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
                use serde::de::Error;

                struct Fields;

                impl<'de> serde::de::Visitor<'de> for Fields {
                    type Value = SamplingParamsBuilder;

                    fn expecting(&self, f: &mut core::fmt::Formatter<'_>) -> core::fmt::Result {
                        f.write_str("an object of sampling parameters")
                    }

                    fn visit_map<A: serde::de::MapAccess<'de>>(self, mut map: A) -> Result<Self::Value, A::Error> {
                        let mut params = SamplingParamsBuilder::default();
                        let mut seen = BTreeSet::new();
                        while let Some(field) = map.next_key::<String>()? {
                            match field.as_str() {
                                $(stringify!($field) => {
                                    type As = read_as!($type $(, $read)?);
                                    if let Some(value) = read::value::<_, As>(stringify!($field), &mut map)? {
                                        params.$field = value.into();
                                    }
                                })*
                                _ => read::beside_the_draw(&field, &mut map, &[$(stringify!($field)),*])?,
                            }
                            if let Some(twice) = seen.replace(field) {
                                return Err(A::Error::custom(format_args!("duplicate field `{twice}`")));
                            }
                        }
                        Ok(params)
                    }
                }

                deserializer.deserialize_map(Fields)
            }
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
    seed: Option<u64> [Seed] = None;
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
    /// See [`RowParams::logprobs`]; `u32::MAX` = all.
    logprobs: Option<u32> [Most] = None;
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

/// The parameters of a request, checked for a vocabulary.
#[derive(Clone, Debug, PartialEq)]
pub struct SamplingParams {
    fields: SamplingParamsBuilder,
    /// `logit_bias` as rows take it.
    logit_bias: Vec<(u32, f32)>,
    /// `allowed_token_ids` as rows take them.
    mask: Option<Vec<u32>>,
}

impl SamplingParamsBuilder {
    /// Checks the values, for a vocabulary of `vocab_size` tokens. A `logprobs` of `u32::MAX` becomes `vocab_size`.
    ///
    /// # Errors
    /// The first field whose value means nothing, or that names a token beyond the vocabulary.
    pub fn build(mut self, vocab_size: u32) -> Result<SamplingParams, ParamsError> {
        let refuse = |field, reason: &str| Err(ParamsError { field, reason: reason.into() });
        if self.top_k < -1 {
            return refuse("top_k", "must be at least -1");
        }
        if self.dry_penalty_last_n < -1 {
            return refuse("dry_penalty_last_n", "must be at least -1");
        }
        if self.allowed_token_ids.as_ref().is_some_and(Vec::is_empty) {
            return refuse("allowed_token_ids", "must name a token");
        }
        self.check_tokens(vocab_size)?;
        match self.logprobs {
            Some(u32::MAX) => self.logprobs = Some(vocab_size),
            Some(most) if most > vocab_size => {
                return refuse("logprobs", &format!("is {most}, but there are {vocab_size} tokens"));
            }
            _ => {}
        }
        self.dry_sequence_breakers.sort_unstable();
        let mask = self.allowed_token_ids.as_ref().map(|tokens| {
            let mut mask = vec![0u32; vocab_size.div_ceil(32) as usize];
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

    /// Whether the vocabulary has the tokens that are named. (Those of `dry_sequence_breakers` may be placeholders, like
    /// those of a [`History`].)
    fn check_tokens(&self, vocab_size: u32) -> Result<(), ParamsError> {
        let last = [
            ("allowed_token_ids", self.allowed_token_ids.iter().flatten().max()),
            ("logit_bias", self.logit_bias.keys().next_back()),
            ("banned_token_ids", self.banned_token_ids.iter().max()),
            ("stop_token_ids", self.stop_token_ids.iter().max()),
        ];
        match last.into_iter().find(|(_, token)| token.is_some_and(|&token| token >= vocab_size)) {
            Some((field, token)) => {
                let token = token.copied().unwrap_or_default();
                let reason = format!("names token {token}, but there are {vocab_size} tokens");
                Err(ParamsError { field, reason })
            }
            None => Ok(()),
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

#[cfg(test)]
mod tests {
    use super::*;
    use crate::transform::allowed;

    #[test]
    fn the_default_is_the_default_row() {
        let params = SamplingParams::builder().build(300).unwrap();
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
            .build(300)
            .unwrap();
        let row = params.row(11, 5, None);
        assert_eq!((row.temperature, row.top_k, row.draws, row.seed, row.position), (0.5, 0, 3, 11, 5));
        assert_eq!(row.logit_bias, [(2, -1.0), (9, 1.5)]);
        assert_eq!(row.dry_sequence_breakers, [3, 7]);
        let mask = row.mask.unwrap();
        assert!((0..70).all(|token| allowed(mask, token) == [40, 2].contains(&token)));
        let seeded = SamplingParams::builder().seed(Some(8)).build(300).unwrap();
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
            (
                b().allowed_token_ids(Some(vec![!1])),
                "allowed_token_ids names token 4294967294, but there are 300 tokens",
            ),
            (b().allowed_token_ids(Some(vec![300, 2])), "allowed_token_ids names token 300, but there are 300 tokens"),
            (b().logit_bias([(300, 1.0)].into()), "logit_bias names token 300, but there are 300 tokens"),
            (b().banned_token_ids(vec![!0]), "banned_token_ids names token 4294967295, but there are 300 tokens"),
            (b().stop_token_ids(vec![2, 300]), "stop_token_ids names token 300, but there are 300 tokens"),
            (b().logprobs(Some(301)), "logprobs is 301, but there are 300 tokens"),
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
            assert_eq!(builder.build(300).unwrap_err().to_string(), says);
        }
    }

    #[cfg(feature = "serde")]
    #[test]
    fn a_request_of_vllm_maps_without_a_table() {
        let json = r#"{"n": 2, "temperature": 0.7, "top_p": 0.95, "top_k": -1, "min_p": 0.05, "seed": 42,
            "presence_penalty": 0.1, "frequency_penalty": 0.2, "repetition_penalty": 1.1, "logit_bias": {"11": -1.5, "2": 3},
            "allowed_token_ids": null, "min_tokens": 4, "stop_token_ids": [2], "logprobs": 5,
            "logprobs_mode": "raw_logprobs", "order": "llama-cpp"}"#;
        let read = |json: &str| serde_json::from_str::<SamplingParamsBuilder>(json);
        let params = read(json).unwrap().build(300).unwrap();
        let row = params.row(0, 0, None);
        assert_eq!((row.draws, row.temperature, row.top_k, row.seed, row.logprobs), (2, 0.7, 0, 42, Some(5)));
        assert_eq!((row.logit_bias, row.stop_token_ids), (&[(2, 3.0), (11, -1.5)][..], &[2][..]));
        assert_eq!((row.logprobs_mode, row.order), (LogprobsMode::Raw, Order::LlamaCpp));
        let again = serde_json::to_string(params.fields()).unwrap();
        assert_eq!(&read(&again).unwrap(), params.fields());
        for (json, says) in [
            (r#"{"temprature": 5}"#, "unknown field `temprature`"),
            (r#"{"top_k": 0.5}"#, "top_k: invalid type: floating point"),
            (r#"{"logit_bias": {"11": "low"}}"#, "logit_bias: invalid type: string \"low\""),
            (r#"{"order": "ours"}"#, "order: unknown variant `ours`"),
            (r#"[1]"#, "expected an object of sampling parameters"),
            (r#"{"seed": -2}"#, "seed: invalid value: integer `-2`, expected an integer of at least -1"),
            (r#"{"logprobs": 4294967296}"#, "must be below 2^32"),
            (r#"{"n": 1, "n": 2}"#, "duplicate field `n`"),
        ] {
            let error = read(json).unwrap_err().to_string();
            assert!(error.contains(says), "{json}: {error}");
        }
        for (json, says) in [(r#"{"top_p": 2}"#, "top_p must be"), (r#"{"temperature": 1e99}"#, "temperature must be")]
        {
            assert!(read(json).unwrap().build(300).unwrap_err().to_string().starts_with(says), "{json}");
        }
    }

    #[cfg(feature = "serde")]
    #[test]
    fn null_is_the_default_and_minus_one_is_none_or_all() {
        // What vLLM's own defaults look like in a request, and every field as null.
        let defaults = r#"{"n": 1, "presence_penalty": 0.0, "frequency_penalty": 0.0, "repetition_penalty": 1.0,
            "temperature": 1.0, "top_p": 1.0, "top_k": 0, "min_p": 0.0, "seed": null, "stop_token_ids": null,
            "min_tokens": 0, "logprobs": null, "logit_bias": null, "allowed_token_ids": null}"#;
        let default = SamplingParamsBuilder::default();
        assert_eq!(serde_json::from_str::<SamplingParamsBuilder>(defaults).unwrap(), default);
        let serde_json::Value::Object(mut fields) = serde_json::to_value(&default).unwrap() else { panic!() };
        fields.values_mut().for_each(|value| *value = serde_json::Value::Null);
        assert_eq!(serde_json::from_value::<SamplingParamsBuilder>(fields.into()).unwrap(), default);

        let read: SamplingParamsBuilder = serde_json::from_str(r#"{"seed": -1, "logprobs": -1, "top_k": -1}"#).unwrap();
        assert_eq!((read.seed, read.logprobs, read.top_k), (None, Some(u32::MAX), -1));
        assert_eq!(read.build(300).unwrap().row(5, 0, None).logprobs, Some(300));
        let seed = r#"{"seed": 18446744073709551615}"#;
        assert_eq!(serde_json::from_str::<SamplingParamsBuilder>(seed).unwrap().seed, Some(u64::MAX));
    }

    #[cfg(feature = "serde")]
    #[test]
    fn fields_that_are_no_matter_of_the_draw_are_taken_where_they_ask_for_nothing() {
        let read = |json: &str| serde_json::from_str::<SamplingParamsBuilder>(json);
        let neutral = r#"{"stop": [], "ignore_eos": false, "max_tokens": null, "prompt_logprobs": null, "detokenize": true,
            "flat_logprobs": false, "skip_special_tokens": true, "spaces_between_special_tokens": true, "top_k": 7,
            "include_stop_str_in_output": false, "output_kind": 0, "skip_clone": false, "output_text_buffer_length": 0,
            "structured_outputs": null, "guided_decoding": null, "extra_args": {}, "bad_words": [], "best_of": 1,
            "truncate_prompt_tokens": null, "skip_reading_prefix_cache": null, "thinking_token_budget": null}"#;
        assert_eq!(read(neutral).unwrap(), SamplingParamsBuilder::default().top_k(7));
        let takes = "is no matter of the draw: only null";
        for (field, value, or) in [
            ("stop", r#"["."]"#, " or empty"),
            ("stop", r#"".""#, " or empty"),
            ("max_tokens", "16", ""),
            ("ignore_eos", "true", " or false"),
            ("detokenize", "false", " or true"),
            ("best_of", "2", " or 1"),
            ("guided_decoding", r#"{"regex": "a"}"#, ""),
            ("extra_args", r#"{"a": 1}"#, " or empty"),
            ("prompt_logprobs", "0", ""),
        ] {
            let error = read(&format!(r#"{{"top_k": 7, "{field}": {value}}}"#)).unwrap_err().to_string();
            assert!(error.starts_with(&format!("{field} {takes}{or} is taken here at line 1")), "{error}");
        }
        assert!(read(r#"{"stop": null, "stop": null}"#).unwrap_err().to_string().contains("duplicate field `stop`"));
    }
}
