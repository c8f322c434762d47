//! The bytes of values: little-endian, unaligned, checked.

use core::ops::Range;
use flash_sampling_core::backend::Stage;
use flash_sampling_core::{DType, Plan};

/// Why bytes are not a message.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum WireError {
    /// The message ends too early.
    #[error("it ends too early, at byte {at}")]
    Truncated {
        /// The length of the message.
        at: usize,
    },
    /// The message is longer than its content.
    #[error("{extra} bytes follow its end at byte {at}")]
    Trailing {
        /// The end of the content.
        at: usize,
        /// The number of bytes that follow.
        extra: usize,
    },
    /// A field has a value that no rank sends.
    #[error("{what} before byte {at}")]
    Invalid {
        /// What is wrong.
        what: &'static str,
        /// One past the last byte of the field.
        at: usize,
    },
}

/// A value in a message.
pub(crate) trait Wire: Sized {
    fn put(&self, bytes: &mut Vec<u8>);

    /// Takes the value from the front of a message.
    fn take(reader: &mut Reader<'_>) -> Result<Self, WireError>;
}

/// Implements [`Wire`] for numbers.
macro_rules! wire_numbers {
    ($($number:ty)*) => {$(
        impl Wire for $number {
            fn put(&self, bytes: &mut Vec<u8>) {
                bytes.extend_from_slice(&self.to_le_bytes());
            }

            fn take(reader: &mut Reader<'_>) -> Result<Self, WireError> {
                reader.array().map(<$number>::from_le_bytes)
            }
        }
    )*};
}

/// Implements [`Wire`] for an enum without fields, as one byte.
macro_rules! wire_enum {
    ($type:ty, $unknown:literal { $($code:literal = $variant:ident),* }) => {
        impl Wire for $type {
            fn put(&self, bytes: &mut Vec<u8>) {
                bytes.push(match self { $(<$type>::$variant => $code),* });
            }

            fn take(reader: &mut Reader<'_>) -> Result<Self, WireError> {
                match u8::take(reader)? {
                    $($code => Ok(<$type>::$variant),)*
                    _ => Err(reader.invalid($unknown)),
                }
            }
        }
    };
}

/// Implements [`Wire`] for a struct, as its fields in this order.
macro_rules! wire_struct {
    ($type:ty { $($field:ident),* $(,)? }) => {
        impl Wire for $type {
            fn put(&self, bytes: &mut Vec<u8>) {
                let Self { $($field),* } = self;
                $($field.put(bytes);)*
            }

            fn take(reader: &mut Reader<'_>) -> Result<Self, WireError> {
                $(let $field = Wire::take(reader)?;)*
                Ok(Self { $($field),* })
            }
        }
    };
}
pub(crate) use {wire_enum, wire_struct};

wire_numbers!(u8 u32 u64 f32 f64);
wire_enum!(Stage, "an unknown stage" { 0 = Raw, 1 = Transformed });
wire_struct!(Plan { max_rows, max_draws, max_logprobs, canonical });
wire_struct!(Range<u32> { start, end });

impl Wire for DType {
    fn put(&self, bytes: &mut Vec<u8>) {
        bytes.push(self.code());
    }

    fn take(reader: &mut Reader<'_>) -> Result<Self, WireError> {
        let code = u8::take(reader)?;
        DType::ALL.get(usize::from(code)).copied().ok_or(reader.invalid("an unknown type"))
    }
}

impl Wire for bool {
    fn put(&self, bytes: &mut Vec<u8>) {
        bytes.push(u8::from(*self));
    }

    fn take(reader: &mut Reader<'_>) -> Result<Self, WireError> {
        match u8::take(reader)? {
            0 => Ok(false),
            1 => Ok(true),
            _ => Err(reader.invalid("a flag that is neither 0 nor 1")),
        }
    }
}

impl Wire for usize {
    fn put(&self, bytes: &mut Vec<u8>) {
        (*self as u64).put(bytes);
    }

    fn take(reader: &mut Reader<'_>) -> Result<Self, WireError> {
        usize::try_from(u64::take(reader)?).map_err(|_| reader.invalid("a size beyond this machine's"))
    }
}

impl<T: Wire> Wire for Option<T> {
    fn put(&self, bytes: &mut Vec<u8>) {
        self.is_some().put(bytes);
        self.iter().for_each(|value| value.put(bytes));
    }

    fn take(reader: &mut Reader<'_>) -> Result<Self, WireError> {
        bool::take(reader)?.then(|| T::take(reader)).transpose()
    }
}

/// Takes fields from the front of a message.
#[derive(Debug)]
pub(crate) struct Reader<'a> {
    rest: &'a [u8],
    length: usize,
}

impl<'a> Reader<'a> {
    pub(crate) fn new(bytes: &'a [u8]) -> Self {
        Reader { rest: bytes, length: bytes.len() }
    }

    /// Continues a message at a byte.
    pub(crate) fn from(bytes: &'a [u8], at: usize) -> Self {
        Reader { rest: &bytes[at..], length: bytes.len() }
    }

    /// The index of the next byte.
    pub(crate) fn at(&self) -> usize {
        self.length - self.rest.len()
    }

    fn array<const N: usize>(&mut self) -> Result<[u8; N], WireError> {
        let (array, rest) = self.rest.split_first_chunk().ok_or(WireError::Truncated { at: self.length })?;
        self.rest = rest;
        Ok(*array)
    }

    /// Reads a count of items of `size` bytes each, and checks that the message has them.
    pub(crate) fn count(&mut self, size: usize) -> Result<usize, WireError> {
        let count = u32::take(self)? as usize;
        let needed = count.checked_mul(size).filter(|needed| *needed <= self.rest.len());
        needed.map(|_| count).ok_or(WireError::Truncated { at: self.length })
    }

    /// Borrows items of `N` bytes each, after their count.
    pub(crate) fn items<const N: usize>(&mut self) -> Result<&'a [[u8; N]], WireError> {
        let count = self.count(N)?;
        let (items, rest) = self.rest.split_at(count * N);
        self.rest = rest;
        Ok(items.as_chunks().0)
    }

    /// Borrows text, after its length.
    pub(crate) fn text(&mut self) -> Result<&'a str, WireError> {
        let count = self.count(1)?;
        let (text, rest) = self.rest.split_at(count);
        self.rest = rest;
        core::str::from_utf8(text).map_err(|_| self.invalid("text that is not UTF-8"))
    }

    /// The error of the field that was read last.
    pub(crate) fn invalid(&self, what: &'static str) -> WireError {
        WireError::Invalid { what, at: self.at() }
    }

    /// Checks that the message ends here.
    pub(crate) fn finish(self) -> Result<(), WireError> {
        let (at, extra) = (self.at(), self.rest.len());
        if extra == 0 { Ok(()) } else { Err(WireError::Trailing { at, extra }) }
    }
}

/// Appends the length of a text, and the text.
pub(crate) fn put_text(bytes: &mut Vec<u8>, text: &str) {
    (text.len() as u32).put(bytes);
    bytes.extend_from_slice(text.as_bytes());
}

/// Appends the number of items of `N` bytes each, and the items.
pub(crate) fn put_items<const N: usize>(bytes: &mut Vec<u8>, items: impl ExactSizeIterator<Item = [u8; N]>) {
    (items.len() as u32).put(bytes);
    put_all(bytes, items);
}

/// Appends items of `N` bytes each, after one allocation.
pub(crate) fn put_all<const N: usize>(bytes: &mut Vec<u8>, items: impl ExactSizeIterator<Item = [u8; N]>) {
    let at = bytes.len();
    bytes.resize(at + N * items.len(), 0);
    bytes[at..].as_chunks_mut().0.iter_mut().zip(items).for_each(|(place, item)| *place = item);
}
