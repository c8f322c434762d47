//! Numbers as serde_json gives them with its feature `arbitrary_precision`.
//!
//! Any crate of a build may turn it on, for all. A reader that takes numbers and texts alike is then given a number not as
//! one, but as a map of one entry, the number's text under a name of serde_json's own.

use serde::de::{Error, MapAccess, Unexpected, Visitor};

/// The name.
pub(super) const PRECISE: &str = "$serde_json::private::Number";

/// Has the visitor visit the number that stands under the name, as what it is without the feature.
///
/// # Errors
/// The map's, a text that is no number, or the visitor's.
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
