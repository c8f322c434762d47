//! Floats of requests. JSON has no infinities and NaN, so requests write them as the texts `"-inf"`, `"inf"` and
//! `"NaN"`.
//!
//! serde_json would write them as null, and null reads as the field's default.

use super::precise::{PRECISE, precise};
use core::fmt;
use serde::de::{Deserializer, Error, MapAccess, Unexpected, Visitor};
use serde::{Deserialize, Serialize, Serializer};
use std::collections::BTreeMap;

/// Converts fields to and from their serialized forms, which are types around the fields.
macro_rules! forms {
    ($($form:ident: $field:ty);+) => {$(
        impl From<$field> for $form {
            fn from(field: $field) -> Self {
                $form(field)
            }
        }

        impl From<$form> for $field {
            fn from(form: $form) -> Self {
                form.0
            }
        }
    )+};
}
pub(super) use forms;

forms!(Number: f32);

/// The float of a field.
#[derive(Clone, Copy)]
pub(super) struct Number(f32);

impl Serialize for Number {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        if self.0.is_finite() { serializer.serialize_f32(self.0) } else { serializer.collect_str(&self.0) }
    }
}

impl<'de> Deserialize<'de> for Number {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct Float;

        impl<'de> Visitor<'de> for Float {
            type Value = Number;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("a number, \"-inf\", \"inf\" or \"NaN\"")
            }

            fn visit_f64<E: Error>(self, value: f64) -> Result<Number, E> {
                let number = value as f32;
                if number == 0.0 && value != 0.0 {
                    // 15 digits, to show the number as typed: readers may be a unit in the last place off.
                    let typed = format!("{value:.14e}").parse().unwrap_or(value);
                    return Err(E::custom(format_args!("{typed:?} rounds to 0 as a float32")));
                }
                Ok(Number(number))
            }

            fn visit_u64<E: Error>(self, value: u64) -> Result<Number, E> {
                Ok(Number(value as f32))
            }

            fn visit_i64<E: Error>(self, value: i64) -> Result<Number, E> {
                Ok(Number(value as f32))
            }

            fn visit_str<E: Error>(self, value: &str) -> Result<Number, E> {
                match value {
                    "-inf" => Ok(Number(f32::NEG_INFINITY)),
                    "inf" => Ok(Number(f32::INFINITY)),
                    "NaN" => Ok(Number(f32::NAN)),
                    _ => Err(E::invalid_type(Unexpected::Str(value), &self)),
                }
            }

            fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Number, A::Error> {
                match map.next_key::<String>()?.as_deref() {
                    Some(PRECISE) => precise(&mut map, self),
                    _ => Err(A::Error::invalid_type(Unexpected::Map, &self)),
                }
            }
        }

        deserializer.deserialize_any(Float)
    }
}

/// The floats of single tokens.
#[derive(Serialize, Deserialize)]
#[serde(transparent)]
pub(super) struct Numbers(BTreeMap<u32, Number>);

impl From<BTreeMap<u32, f32>> for Numbers {
    fn from(values: BTreeMap<u32, f32>) -> Self {
        Numbers(values.into_iter().map(|(token, value)| (token, value.into())).collect())
    }
}

impl From<Numbers> for BTreeMap<u32, f32> {
    fn from(numbers: Numbers) -> Self {
        numbers.0.into_iter().map(|(token, number)| (token, number.into())).collect()
    }
}
