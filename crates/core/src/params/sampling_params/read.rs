//! Readers of single fields of a request: null, -1, and fields that do not affect a draw.

use super::number::forms;
use super::precise::{PRECISE, precise};
use crate::params::filters::Order;
use core::fmt;
use serde::de::{Deserializer, Error, IgnoredAny, IntoDeserializer, MapAccess, SeqAccess, Unexpected, Visitor};
use serde::{Deserialize, Serialize};

forms!(Seed: Option<u64>; LogprobCount: Option<u32>; OrderName: Order);

/// A seed; -1 is none.
#[derive(Serialize)]
#[serde(transparent)]
pub(super) struct Seed(Option<u64>);

impl<'de> Deserialize<'de> for Seed {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        or_minus_one(deserializer).map(Seed)
    }
}

/// A number of log-probabilities; -1 is all.
#[derive(Serialize)]
#[serde(transparent)]
pub(super) struct LogprobCount(Option<u32>);

impl<'de> Deserialize<'de> for LogprobCount {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        let count = or_minus_one(deserializer)?;
        let count = count.map_or(Ok(u32::MAX), u32::try_from);
        count
            .map(|count| LogprobCount(Some(count)))
            .map_err(|_| D::Error::custom("the number of log-probabilities must be below 2^32"))
    }
}

/// An order of temperature and filters, by the name of its project.
#[derive(Serialize)]
#[serde(transparent)]
pub(super) struct OrderName(Order);

impl<'de> Deserialize<'de> for OrderName {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct Name;

        impl Visitor<'_> for Name {
            type Value = OrderName;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("one of `vllm`, `hugging-face` and `llama-cpp`")
            }

            fn visit_str<E: Error>(self, value: &str) -> Result<OrderName, E> {
                Order::deserialize(value.into_deserializer()).map(OrderName)
            }
        }

        deserializer.deserialize_any(Name)
    }
}

/// A number that is not negative; `None` for -1.
fn or_minus_one<'de, D: Deserializer<'de>>(deserializer: D) -> Result<Option<u64>, D::Error> {
    struct OrMinusOne;

    impl<'de> Visitor<'de> for OrMinusOne {
        type Value = Option<u64>;

        fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
            f.write_str("an integer of at least -1")
        }

        fn visit_u64<E: Error>(self, value: u64) -> Result<Self::Value, E> {
            Ok(Some(value))
        }

        fn visit_i64<E: Error>(self, value: i64) -> Result<Self::Value, E> {
            match (u64::try_from(value), value) {
                (Ok(value), _) => Ok(Some(value)),
                (_, -1) => Ok(None),
                _ => Err(E::invalid_value(Unexpected::Signed(value), &self)),
            }
        }

        fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Self::Value, A::Error> {
            match map.next_key::<String>()?.as_deref() {
                Some(PRECISE) => precise(&mut map, self),
                _ => Err(A::Error::invalid_type(Unexpected::Map, &self)),
            }
        }
    }

    deserializer.deserialize_any(OrMinusOne)
}

/// The value of a field that does not affect a draw, as far as the neutral values need it.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) enum FieldValue {
    Null,
    Bool(bool),
    Number(f64),
    /// An empty text, list or object.
    Empty,
    Other,
}

impl<'de> Deserialize<'de> for FieldValue {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct Any;

        impl<'de> Visitor<'de> for Any {
            type Value = FieldValue;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("a value")
            }

            fn visit_unit<E: Error>(self) -> Result<FieldValue, E> {
                Ok(FieldValue::Null)
            }

            fn visit_none<E: Error>(self) -> Result<FieldValue, E> {
                Ok(FieldValue::Null)
            }

            fn visit_some<D: Deserializer<'de>>(self, value: D) -> Result<FieldValue, D::Error> {
                value.deserialize_any(self)
            }

            fn visit_bool<E: Error>(self, value: bool) -> Result<FieldValue, E> {
                Ok(FieldValue::Bool(value))
            }

            fn visit_u64<E: Error>(self, value: u64) -> Result<FieldValue, E> {
                Ok(FieldValue::Number(value as f64))
            }

            fn visit_i64<E: Error>(self, value: i64) -> Result<FieldValue, E> {
                Ok(FieldValue::Number(value as f64))
            }

            fn visit_f64<E: Error>(self, value: f64) -> Result<FieldValue, E> {
                Ok(FieldValue::Number(value))
            }

            fn visit_str<E: Error>(self, value: &str) -> Result<FieldValue, E> {
                Ok(if value.is_empty() { FieldValue::Empty } else { FieldValue::Other })
            }

            fn visit_seq<A: SeqAccess<'de>>(self, mut list: A) -> Result<FieldValue, A::Error> {
                let mut found = FieldValue::Empty;
                while list.next_element::<IgnoredAny>()?.is_some() {
                    found = FieldValue::Other;
                }
                Ok(found)
            }

            fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<FieldValue, A::Error> {
                match map.next_key::<String>()?.as_deref() {
                    None => return Ok(FieldValue::Empty),
                    Some(PRECISE) => return precise(&mut map, self),
                    Some(_) => map.next_value::<IgnoredAny>()?,
                };
                while map.next_entry::<IgnoredAny, IgnoredAny>()?.is_some() {}
                Ok(FieldValue::Other)
            }
        }

        deserializer.deserialize_any(Any)
    }
}

/// The fields of vLLM's `SamplingParams`, current and past, that do not affect a draw, with the neutral value of each.
/// Null is neutral for every field.
const FIELDS_WITHOUT_EFFECT: &[(&str, FieldValue)] = &[
    ("bad_words", FieldValue::Empty),
    ("best_of", FieldValue::Number(1.0)),
    ("detokenize", FieldValue::Bool(true)),
    ("early_stopping", FieldValue::Bool(false)),
    ("extra_args", FieldValue::Empty),
    ("flat_logprobs", FieldValue::Bool(false)),
    ("guided_decoding", FieldValue::Null),
    ("ignore_eos", FieldValue::Bool(false)),
    ("include_stop_str_in_output", FieldValue::Bool(false)),
    ("length_penalty", FieldValue::Number(1.0)),
    ("logits_processors", FieldValue::Empty),
    ("max_tokens", FieldValue::Null),
    ("output_kind", FieldValue::Number(0.0)),
    ("output_text_buffer_length", FieldValue::Number(0.0)),
    ("prompt_logprob_start", FieldValue::Null),
    ("prompt_logprob_token_ids", FieldValue::Null),
    ("prompt_logprobs", FieldValue::Null),
    ("repetition_detection", FieldValue::Null),
    ("routed_experts_prompt_start", FieldValue::Number(0.0)),
    ("skip_clone", FieldValue::Bool(false)),
    ("skip_reading_prefix_cache", FieldValue::Null),
    ("skip_special_tokens", FieldValue::Bool(true)),
    ("spaces_between_special_tokens", FieldValue::Bool(true)),
    ("stop", FieldValue::Empty),
    ("stream_interval", FieldValue::Null),
    ("structured_outputs", FieldValue::Null),
    ("thinking_token_budget", FieldValue::Null),
    ("trace_decode_token_ids", FieldValue::Null),
    ("truncate_prompt_tokens", FieldValue::Null),
    ("use_beam_search", FieldValue::Bool(false)),
];

/// Accepts a field that does not affect a draw if its value is neutral.
///
/// # Errors
/// Names the field if it is unknown or has another value.
pub(super) fn accept_neutral<'de, A: MapAccess<'de>>(
    field: &str,
    map: &mut A,
    known: &'static [&'static str],
) -> Result<(), A::Error> {
    if let "prompt_token_ids" | "output_token_ids" = field {
        let reason = "is the sequence's, not a parameter: give SamplingParams::row a History with these tokens";
        return Err(A::Error::custom(format_args!("{field} {reason}")));
    }
    let Some((_, neutral)) = FIELDS_WITHOUT_EFFECT.iter().find(|(name, _)| *name == field) else {
        return Err(A::Error::unknown_field(field, known));
    };
    let value: FieldValue = map.next_value()?;
    if value == FieldValue::Null || value == *neutral {
        return Ok(());
    }
    let or = match neutral {
        FieldValue::Bool(value) => format!(" or {value}"),
        FieldValue::Number(value) => format!(" or {value}"),
        FieldValue::Empty => " or empty".into(),
        FieldValue::Null | FieldValue::Other => String::new(),
    };
    Err(A::Error::custom(format_args!("{field} does not affect a draw: it must be null{or}")))
}

/// The value of a field.
///
/// # Errors
/// The reader's error, with the field's name in front.
pub(super) fn value<'de, A: MapAccess<'de>, T: Deserialize<'de>>(
    field: &'static str,
    map: &mut A,
) -> Result<Option<T>, A::Error> {
    map.next_value().map_err(|error| A::Error::custom(format_args!("{field}: {error}")))
}
