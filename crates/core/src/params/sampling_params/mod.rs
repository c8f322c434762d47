//! The owned parameters of a request.
//!
//! A caller sets them one by one or (feature `serde`) reads them from JSON, checks them once against a vocabulary, and
//! borrows them as [`RowParams`] at every step.
//!
//! Fields have the names of vLLM's `SamplingParams`; fields that vLLM lacks have the names of [`RowParams`]. In JSON:
//!
//! * `null` is a field's default.
//! * -1 means no `seed`, every token (`top_k`), and all log-probabilities (`logprobs`).
//! * `"-inf"`, `"inf"` and `"NaN"` are the floats that JSON has no number for.
//!
//! No field is ignored. An unknown field is an error. A field of vLLM that does not affect a draw (`max_tokens`,
//! `stop`, `detokenize`, ...) is an error unless its value is neutral: null, and vLLM's default of most of these
//! fields. (The default of `max_tokens` is 16, which is not neutral.) There are two differences to vLLM: `logit_bias`
//! is not clamped to ±100, and `logprobs_mode` is a field of the request with the default `processed_logprobs`.
//!
//! Other self-describing formats work like JSON: YAML, TOML and MessagePack. Formats with text values only (query
//! strings, the environment) or without types (bincode, postcard) do not work.
//!
//! The tokens of the sequence are not a field, because parameters are constant and a sequence grows. The caller keeps
//! them as a [`History`], which [`SamplingParams::row`] takes.

use crate::error::RowError;
use crate::params::filters::Order;
use crate::params::history::History;
use crate::params::knob::Knob;
use crate::params::{LogprobsMode, RowParams};
#[cfg(feature = "serde")]
use number::{Number, Numbers};
#[cfg(feature = "serde")]
use read::{LogprobCount, OrderName, Seed};
use std::collections::BTreeMap;
#[cfg(feature = "serde")]
use std::collections::BTreeSet;

#[cfg(feature = "serde")]
mod number;
#[cfg(feature = "serde")]
mod precise;
#[cfg(feature = "serde")]
mod read;
#[cfg(test)]
mod tests;

/// A field with an invalid value.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{field} {reason}")]
pub struct ParamsError {
    /// The field's name.
    pub field: &'static str,
    /// What is wrong with the value.
    pub reason: String,
}

/// The serialized type of a field: the last argument.
#[cfg(feature = "serde")]
macro_rules! form_of {
    ($type:ty) => {
        $type
    };
    ($type:ty, $form:ty) => {
        $form
    };
}

macro_rules! fields {
    ($($(#[$doc:meta])* $field:ident: $type:ty $([$form:ty])? = $default:expr;)*) => {
        /// The fields of [`SamplingParams`], which [`build`](SamplingParamsBuilder::build) checks. The default has
        /// every knob disabled.
        #[derive(Clone, Debug, PartialEq)]
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

        /// All fields, in a form that deserializes to the same values.
        #[cfg(feature = "serde")]
        impl serde::Serialize for SamplingParamsBuilder {
            fn serialize<S: serde::Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
                use serde::ser::SerializeStruct;

                let count = [$(stringify!($field)),*].len();
                let mut fields = serializer.serialize_struct("SamplingParamsBuilder", count)?;
                $(
                    let value = <form_of!($type $(, $form)?)>::from(self.$field.clone());
                    fields.serialize_field(stringify!($field), &value)?;
                )*
                fields.end()
            }
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
                                    type Form = form_of!($type $(, $form)?);
                                    if let Some(value) = read::value::<_, Form>(stringify!($field), &mut map)? {
                                        params.$field = value.into();
                                    }
                                })*
                                _ => read::accept_neutral(&field, &mut map, &[$(stringify!($field)),*])?,
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
    /// Number of draws per step.
    n: u32 = 1;
    /// Divides the logits; 0 = greedy.
    temperature: f32 [Number] = 1.0;
    /// See [`RowParams::top_p`].
    top_p: f32 [Number] = 1.0;
    /// Keep this many of the largest logits; 0 or -1 = all.
    top_k: i32 = 0;
    /// See [`RowParams::min_p`].
    min_p: f32 [Number] = 0.0;
    /// The key of the noise; `None` = the seed that the caller of [`SamplingParams::row`] passes.
    seed: Option<u64> [Seed] = None;
    /// See [`RowParams::presence_penalty`].
    presence_penalty: f32 [Number] = 0.0;
    /// See [`RowParams::frequency_penalty`].
    frequency_penalty: f32 [Number] = 0.0;
    /// See [`RowParams::repetition_penalty`].
    repetition_penalty: f32 [Number] = 1.0;
    /// Added to the logits of single tokens; -inf (in JSON `"-inf"`) forbids one, as `banned_token_ids` does.
    logit_bias: BTreeMap<u32, f32> [Numbers] = BTreeMap::new();
    /// The only tokens that may be drawn; `None` = all.
    allowed_token_ids: Option<Vec<u32>> = None;
    /// See [`RowParams::banned`].
    banned_token_ids: Vec<u32> = Vec::new();
    /// See [`RowParams::min_tokens`].
    min_tokens: u32 = 0;
    /// See [`RowParams::stop_token_ids`].
    stop_token_ids: Vec<u32> = Vec::new();
    /// See [`RowParams::logprobs`]; `u32::MAX` = all.
    logprobs: Option<u32> [LogprobCount] = None;
    /// See [`RowParams::logprobs_mode`]. (In vLLM this is an option of the engine, with the default `raw_logprobs`.)
    logprobs_mode: LogprobsMode = LogprobsMode::Processed;
    /// See [`RowParams::logprob_token_ids`]. Without `logprobs` they imply `logprobs` 0.
    logprob_token_ids: Vec<u32> = Vec::new();
    /// See [`RowParams::ranks`].
    ranks: bool = false;
    /// See [`RowParams::top_n_sigma`].
    top_n_sigma: f32 [Number] = 0.0;
    /// See [`RowParams::epsilon_cutoff`].
    epsilon_cutoff: f32 [Number] = 0.0;
    /// See [`RowParams::typical_p`].
    typical_p: f32 [Number] = 1.0;
    /// See [`RowParams::xtc_threshold`].
    xtc_threshold: f32 [Number] = 0.1;
    /// See [`RowParams::xtc_probability`].
    xtc_probability: f32 [Number] = 0.0;
    /// See [`RowParams::dry_multiplier`].
    dry_multiplier: f32 [Number] = 0.0;
    /// See [`RowParams::dry_base`].
    dry_base: f32 [Number] = 1.75;
    /// See [`RowParams::dry_allowed_length`].
    dry_allowed_length: u32 = 2;
    /// See [`RowParams::dry_penalty_last_n`]; -1 = the whole sequence.
    dry_penalty_last_n: i32 = -1;
    /// See [`RowParams::dry_sequence_breakers`]; in any order.
    dry_sequence_breakers: Vec<u32> = Vec::new();
    /// See [`RowParams::order`].
    order: Order [OrderName] = Order::Vllm;
    /// See [`RowParams::without_replacement`].
    without_replacement: bool = false;
    /// See [`RowParams::kept`].
    kept: bool = false;
}

/// The parameters of a request, checked for a vocabulary.
#[derive(Clone, Debug, PartialEq)]
pub struct SamplingParams {
    fields: SamplingParamsBuilder,
    /// `logit_bias` in the form of [`RowParams::logit_bias`].
    logit_bias: Vec<(u32, f32)>,
    /// `allowed_token_ids` in the form of [`RowParams::mask`].
    mask: Option<Vec<u32>>,
}

impl SamplingParamsBuilder {
    /// Checks the values, for a vocabulary of `vocab_size` tokens. A `logprobs` of `u32::MAX` becomes `vocab_size`.
    ///
    /// # Errors
    /// The first field with an invalid value or with a token beyond the vocabulary.
    pub fn build(mut self, vocab_size: u32) -> Result<SamplingParams, ParamsError> {
        let refuse = |field, reason: &str| Err(ParamsError { field, reason: reason.into() });
        for (field, value) in [("top_k", self.top_k), ("dry_penalty_last_n", self.dry_penalty_last_n)] {
            if value < -1 {
                return refuse(field, &format!("is {value}, but must be at least -1"));
            }
        }
        if self.allowed_token_ids.as_ref().is_some_and(Vec::is_empty) {
            return refuse("allowed_token_ids", "must name a token");
        }
        self.check_tokens(vocab_size)?;
        match self.logprobs {
            Some(u32::MAX) => self.logprobs = Some(vocab_size),
            Some(most) if most > vocab_size => {
                return refuse("logprobs", &format!("is {most}, but the vocabulary has size {vocab_size}"));
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
            Err(RowError::OutOfRange { knob, value, range }) => {
                refuse(field_of(knob), &format!("is {value}, but must be {range}"))
            }
            Err(RowError::UnknownToken { knob, token, .. }) => {
                refuse(field_of(knob), &no_such_token(token, vocab_size))
            }
            // These errors depend on logits, samplers and plans, so `check_values` never returns them.
            Ok(())
            | Err(
                RowError::NoFiniteLogit
                | RowError::NaN { .. }
                | RowError::PositiveInfinity { .. }
                | RowError::SupportTooSmall { .. }
                | RowError::Unsupported { .. }
                | RowError::Unplanned { .. }
                | RowError::BeyondPlan { .. },
            ) => Ok(params),
        }
    }

    /// Checks that all tokens are in the vocabulary, except `dry_sequence_breakers`, which may be placeholders.
    fn check_tokens(&self, vocab_size: u32) -> Result<(), ParamsError> {
        let last = [
            ("allowed_token_ids", self.allowed_token_ids.iter().flatten().max()),
            ("logit_bias", self.logit_bias.keys().next_back()),
            ("banned_token_ids", self.banned_token_ids.iter().max()),
            ("stop_token_ids", self.stop_token_ids.iter().max()),
            ("logprob_token_ids", self.logprob_token_ids.iter().max()),
        ];
        match last.into_iter().find(|(_, token)| token.is_some_and(|&token| token >= vocab_size)) {
            Some((field, token)) => {
                let token = token.copied().unwrap_or_default();
                Err(ParamsError { field, reason: no_such_token(token, vocab_size) })
            }
            None => Ok(()),
        }
    }
}

fn no_such_token(token: u32, vocab_size: u32) -> String {
    format!("names token {token}, but the vocabulary has size {vocab_size}")
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
    /// A builder with every knob disabled.
    pub fn builder() -> SamplingParamsBuilder {
        SamplingParamsBuilder::default()
    }

    /// The values of all fields.
    pub fn fields(&self) -> &SamplingParamsBuilder {
        &self.fields
    }

    /// The parameters of the row that draws the token after `history`, at the position after its last token. The
    /// request's seed, if set, replaces `seed`; see [`SamplingParams::row`].
    pub fn next_row<'a>(&'a self, seed: u64, history: &'a History) -> RowParams<'a> {
        self.row(seed, history.tokens().len() as u64, Some(history))
    }

    /// The parameters of the row that draws at `position` of a sequence with this `history`. The request's seed, if
    /// set, replaces `seed`. Two requests of a batch must not share both seed and position.
    pub fn row<'a>(&'a self, seed: u64, position: u64, history: Option<&'a History>) -> RowParams<'a> {
        let fields = &self.fields;
        RowParams {
            seed: fields.seed.unwrap_or(seed),
            position,
            temperature: fields.temperature,
            draws: fields.n,
            first_draw: 0,
            without_replacement: fields.without_replacement,
            logprobs: fields.logprobs.or((!fields.logprob_token_ids.is_empty()).then_some(0)),
            logprobs_mode: fields.logprobs_mode,
            logprob_token_ids: &fields.logprob_token_ids,
            ranks: fields.ranks,
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
