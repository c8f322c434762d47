//! Numbers in the form of serde_json's feature `arbitrary_precision`.
//!
//! Any crate of a build can enable the feature for all crates. Then a reader of "any value" gets a number as a map with
//! one entry: the number's text under a private key of serde_json.

use serde::de::{Error, MapAccess, Unexpected, Visitor};

/// The private key.
pub(super) const PRECISE: &str = "$serde_json::private::Number";

/// Reads the map's value, a number as text, and passes it to the visitor as a plain number.
///
/// # Errors
/// The errors of map and visitor, and a text that is no number.
pub(super) fn precise<'de, A: MapAccess<'de>, V: Visitor<'de>>(map: &mut A, visitor: V) -> Result<V::Value, A::Error> {
    let text = map.next_value::<String>()?;
    if let Ok(number) = text.parse() {
        visitor.visit_u64(number)
    } else if let Ok(number) = text.parse() {
        visitor.visit_i64(number)
    } else if let Ok(number) = text.parse() {
        visitor.visit_f64(number)
    } else {
        Err(A::Error::invalid_type(Unexpected::Str(&text), &visitor))
    }
}
