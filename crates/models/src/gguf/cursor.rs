//! Reads numbers, texts and values at increasing offsets of the file.

use super::error::Fault;
use super::value::{Array, Value};

/// The largest number of arrays that enclose an array. Known files have no nested arrays.
const MAX_DEPTH: u32 = 4;

/// A position in the file. A read beyond the end is a [`Fault`] and allocates nothing.
#[derive(Clone, Copy, Debug)]
pub(super) struct Cursor<'a> {
    bytes: &'a [u8],
    at: usize,
}

impl<'a> Cursor<'a> {
    pub(super) fn new(bytes: &'a [u8], at: usize) -> Self {
        Cursor { bytes, at }
    }

    /// The position, in bytes from the start of the file.
    pub(super) fn at(&self) -> usize {
        self.at
    }

    pub(super) fn take(&mut self, needed: u64) -> Result<&'a [u8], Fault> {
        let left = &self.bytes[self.at..];
        let short = Fault::Short { needed, left: left.len() as u64 };
        let taken = usize::try_from(needed).ok().and_then(|needed| left.get(..needed)).ok_or(short)?;
        self.at += taken.len();
        Ok(taken)
    }

    fn array<const N: usize>(&mut self) -> Result<[u8; N], Fault> {
        let mut out = [0; N];
        out.copy_from_slice(self.take(N as u64)?);
        Ok(out)
    }

    pub(super) fn u32(&mut self) -> Result<u32, Fault> {
        self.array().map(u32::from_le_bytes)
    }

    pub(super) fn u64(&mut self) -> Result<u64, Fault> {
        self.array().map(u64::from_le_bytes)
    }

    fn text(&mut self) -> Result<&'a [u8], Fault> {
        let length = self.u64()?;
        self.take(length)
    }

    /// Reads a key or the name of a tensor.
    pub(super) fn name(&mut self) -> Result<&'a str, Fault> {
        let bytes = self.text()?;
        core::str::from_utf8(bytes).map_err(|_| Fault::Invalid("has a name that is not UTF-8".into()))
    }

    /// Reads a type, then a value of this type.
    pub(super) fn typed_value(&mut self) -> Result<Value<'a>, Fault> {
        let kind = self.u32()?;
        self.value(kind, 0)
    }

    /// Reads a value of type `kind` that `depth` arrays enclose.
    pub(super) fn value(&mut self, kind: u32, depth: u32) -> Result<Value<'a>, Fault> {
        Ok(match kind {
            0 => Value::Unsigned(u8::from_le_bytes(self.array()?).into()),
            1 => Value::Signed(i8::from_le_bytes(self.array()?).into()),
            2 => Value::Unsigned(u16::from_le_bytes(self.array()?).into()),
            3 => Value::Signed(i16::from_le_bytes(self.array()?).into()),
            4 => Value::Unsigned(self.u32()?.into()),
            5 => Value::Signed(i32::from_le_bytes(self.array()?).into()),
            6 => Value::Float(f32::from_le_bytes(self.array()?).into()),
            7 => Value::Bool(self.array::<1>()? != [0]),
            8 => Value::Text(self.text()?),
            9 => Value::Array(self.elements(depth)?),
            10 => Value::Unsigned(self.u64()?),
            11 => Value::Signed(i64::from_le_bytes(self.array()?)),
            12 => Value::Float(f64::from_le_bytes(self.array()?)),
            other => return Err(Fault::Invalid(format!("has a value of the unknown type {other}"))),
        })
    }

    fn elements(&mut self, depth: u32) -> Result<Array<'a>, Fault> {
        let (kind, len) = (self.u32()?, self.u64()?);
        let start = self.at;
        let size = match kind {
            0 | 1 | 7 => 1,
            2 | 3 => 2,
            4..=6 => 4,
            10..=12 => 8,
            8 => 0,
            9 if depth < MAX_DEPTH => 0,
            9 => return Err(Fault::Invalid(format!("has more than {MAX_DEPTH} arrays around an array"))),
            other => return Err(Fault::Invalid(format!("is an array of the unknown type {other}"))),
        };
        if size > 0 {
            self.take(len.saturating_mul(size))?;
        } else {
            // Every element has at least 8 bytes for its length, so a wrong `len` stops at the end of the file.
            for _ in 0..len {
                self.value(kind, depth + 1)?;
            }
        }
        Ok(Array { kind, len: len as usize, depth: depth + 1, bytes: &self.bytes[start..self.at] })
    }
}
