//! GGUF, the file format of llama.cpp (ggml's docs/gguf.md): metadata by key, and tensors.
//!
//! | module | content |
//! | --- | --- |
//! | this one | the container: [`Gguf`], in versions 2 and 3, little-endian |
//! | `value`, `cursor` | values of the metadata, and their bytes |
//! | `tensor` | types, shapes and byte ranges of tensors |
//! | `head` | the tensors and the parameters of the LM head: [`Gguf::head`] |
//! | `names` | the names of tensors, in Hugging Face's and in llama.cpp's form |
//! | `config` | [`ModelConfig::from_gguf`](crate::ModelConfig::from_gguf) |
//!
//! A parsed file borrows from its bytes, so its memory is at most a small multiple of the number of keys and tensors. A
//! length that exceeds the file is an error before any allocation. No bytes make the reader panic; the fuzz target
//! `gguf` tests this.

mod config;
mod cursor;
mod error;
mod head;
mod names;
mod tensor;
mod value;

pub use error::GgufError;
pub use head::{GgufHead, HEAD_BIAS, Scale};
pub use names::{gguf_name, tensor_names};
pub use tensor::GgufTensor;
pub use value::{Array, Value};

use cursor::Cursor;
use std::collections::BTreeMap;
use std::collections::btree_map::Entry;
use tensor::TensorInfo;

/// The first bytes of a file.
pub const MAGIC: &[u8] = b"GGUF";
/// The alignment of tensors in a file without [`ALIGNMENT`].
const DEFAULT_ALIGNMENT: u64 = 32;
const ALIGNMENT: &str = "general.alignment";

/// A parsed file.
#[derive(Clone, Debug)]
pub struct Gguf<'a> {
    bytes: &'a [u8],
    version: u32,
    values: BTreeMap<&'a str, Value<'a>>,
    tensors: BTreeMap<&'a str, TensorInfo>,
}

impl<'a> Gguf<'a> {
    /// Parses a whole file: metadata, and the types, shapes and offsets of all tensors, but not their data.
    ///
    /// # Errors
    /// [`GgufError`]; a truncated file names the key or the tensor that does not fit.
    pub fn parse(bytes: &'a [u8]) -> Result<Self, GgufError> {
        if !bytes.starts_with(MAGIC) {
            return Err(GgufError::Magic);
        }
        let mut cursor = Cursor::new(bytes, MAGIC.len());
        let header = |fault: error::Fault| fault.of("the header");
        let version = match cursor.u32().map_err(header)? {
            version @ (2 | 3) => version,
            version if (1..=3).contains(&version.swap_bytes()) => return Err(GgufError::BigEndian),
            version => return Err(GgufError::Version(version)),
        };
        let (tensor_count, key_count) = (cursor.u64().map_err(header)?, cursor.u64().map_err(header)?);
        let mut values = BTreeMap::new();
        for at in 0..key_count {
            let key = cursor.name().map_err(|fault| fault.of(format!("key {at} of {key_count}")))?;
            let value = cursor.typed_value().map_err(|fault| fault.of(format!("the key {}", shown(key))))?;
            put(&mut values, key, value, "the key")?;
        }
        let mut infos = BTreeMap::new();
        for at in 0..tensor_count {
            let name = cursor.name().map_err(|fault| fault.of(format!("tensor {at} of {tensor_count}")))?;
            let info =
                TensorInfo::read(&mut cursor).map_err(|fault| fault.of(format!("the tensor {}", shown(name))))?;
            put(&mut infos, name, info, "the tensor")?;
        }
        let mut file = Gguf { bytes, version, values, tensors: infos };
        let alignment = file.alignment()?;
        let data = (cursor.at() as u64).next_multiple_of(alignment);
        for (name, info) in &mut file.tensors {
            info.place(data, alignment, bytes.len())
                .map_err(|fault| fault.of(format!("the tensor {}", shown(name))))?;
        }
        Ok(file)
    }

    fn alignment(&self) -> Result<u64, GgufError> {
        let Some(value) = self.value(ALIGNMENT) else { return Ok(DEFAULT_ALIGNMENT) };
        let fits = |n: &u64| n.is_power_of_two() && *n <= 1 << 30;
        value.as_u64().filter(fits).ok_or_else(|| wrong(ALIGNMENT, value, "a power of two up to 2^30"))
    }

    /// The version, 2 or 3. The versions differ only in the byte orders that they allow.
    pub fn version(&self) -> u32 {
        self.version
    }

    /// The value of a key.
    pub fn value(&self, key: &str) -> Option<Value<'a>> {
        self.values.get(key).copied()
    }

    /// The keys, ascending.
    pub fn keys(&self) -> impl Iterator<Item = &'a str> {
        self.values.keys().copied()
    }

    /// The names of the tensors, ascending.
    pub fn names(&self) -> impl Iterator<Item = &'a str> {
        self.tensors.keys().copied()
    }

    /// Whether there is a tensor of this name.
    pub fn has(&self, name: &str) -> bool {
        self.tensors.contains_key(name)
    }

    /// Converts the value of a key by `read`; `None` for a missing key.
    ///
    /// # Errors
    /// [`GgufError::Key`] if `read` returns `None`. `expected` describes the supported values in this error.
    pub fn read<T>(
        &self,
        key: &str,
        expected: &str,
        read: impl FnOnce(Value<'a>) -> Option<T>,
    ) -> Result<Option<T>, GgufError> {
        self.value(key).map(|value| read(value).ok_or_else(|| wrong(key, value, expected))).transpose()
    }

    /// Converts the value of a key that must exist, as [`Gguf::read`] does.
    ///
    /// # Errors
    /// [`GgufError::MissingKey`], and those of [`Gguf::read`].
    pub fn require<T>(
        &self,
        key: &str,
        expected: &str,
        read: impl FnOnce(Value<'a>) -> Option<T>,
    ) -> Result<T, GgufError> {
        self.read(key, expected, read)?.ok_or_else(|| GgufError::MissingKey(key.into()))
    }

    /// The value of `general.architecture`.
    ///
    /// # Errors
    /// A missing key, or another value than a text.
    pub fn architecture(&self) -> Result<&'a str, GgufError> {
        self.require("general.architecture", "a text", |value| value.as_str())
    }
}

fn wrong(key: &str, value: Value<'_>, expected: &str) -> GgufError {
    GgufError::Key { key: key.into(), found: value.to_string(), expected: expected.into() }
}

fn put<'a, T>(map: &mut BTreeMap<&'a str, T>, name: &'a str, value: T, part: &str) -> Result<(), GgufError> {
    match map.entry(name) {
        Entry::Vacant(entry) => {
            entry.insert(value);
            Ok(())
        }
        Entry::Occupied(_) => {
            Err(GgufError::Invalid { part: format!("{part} {}", shown(name)), reason: "exists twice".into() })
        }
    }
}

/// The first 100 characters of a name, for messages. Control characters are escaped.
fn shown(name: &str) -> String {
    name.chars().take(100).flat_map(char::escape_debug).collect()
}

#[cfg(test)]
mod tests;
