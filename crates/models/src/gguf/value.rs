//! Values of the metadata.

use super::cursor::Cursor;
use core::fmt;

/// A value, borrowed from the file. Numbers of all widths become 64-bit numbers of the same value.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Value<'a> {
    /// An unsigned integer.
    Unsigned(u64),
    /// A signed integer.
    Signed(i64),
    /// A float.
    Float(f64),
    /// A boolean.
    Bool(bool),
    /// A text, which may be invalid UTF-8.
    Text(&'a [u8]),
    /// Several values of one type.
    Array(Array<'a>),
}

/// An array, decoded on iteration.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Array<'a> {
    pub(super) kind: u32,
    pub(super) len: usize,
    /// The number of arrays that enclose an element.
    pub(super) depth: u32,
    pub(super) bytes: &'a [u8],
}

impl<'a> Array<'a> {
    /// Number of values.
    pub fn len(&self) -> usize {
        self.len
    }

    /// Whether it has no values.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// The values.
    pub fn iter(&self) -> impl Iterator<Item = Value<'a>> + use<'a> {
        let (mut cursor, kind, depth) = (Cursor::new(self.bytes, 0), self.kind, self.depth);
        // The bytes were checked when the file was parsed.
        (0..self.len).map_while(move |_| cursor.value(kind, depth).ok())
    }
}

impl<'a> Value<'a> {
    /// The value as an integer; `None` for other types and for negative integers.
    pub fn as_u64(&self) -> Option<u64> {
        match *self {
            Value::Unsigned(n) => Some(n),
            Value::Signed(n) => u64::try_from(n).ok(),
            _ => None,
        }
    }

    /// The value as a float; `None` if it is no number.
    pub fn as_f64(&self) -> Option<f64> {
        match *self {
            Value::Unsigned(n) => Some(n as f64),
            Value::Signed(n) => Some(n as f64),
            Value::Float(x) => Some(x),
            _ => None,
        }
    }

    /// The value as a boolean; `None` for other types.
    pub fn as_bool(&self) -> Option<bool> {
        if let Value::Bool(value) = *self { Some(value) } else { None }
    }

    /// The value as a text; `None` for other types and for invalid UTF-8.
    pub fn as_str(&self) -> Option<&'a str> {
        if let Value::Text(bytes) = *self { core::str::from_utf8(bytes).ok() } else { None }
    }

    /// The value as an array; `None` for other types.
    pub fn as_array(&self) -> Option<Array<'a>> {
        if let Value::Array(array) = *self { Some(array) } else { None }
    }
}

/// Formats a value for messages: a text is quoted and shortened, an array is its number of values.
impl fmt::Display for Value<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Value::Unsigned(n) => write!(f, "{n}"),
            Value::Signed(n) => write!(f, "{n}"),
            Value::Float(x) => write!(f, "{x}"),
            Value::Bool(value) => write!(f, "{value}"),
            Value::Text(bytes) => {
                let text = String::from_utf8_lossy(&bytes[..bytes.len().min(400)]);
                let short: String = text.chars().take(60).collect();
                write!(f, "{short:?}{}", if short.len() < bytes.len() { "..." } else { "" })
            }
            Value::Array(array) => write!(f, "an array of {}", array.len),
        }
    }
}
