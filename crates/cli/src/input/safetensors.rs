//! The header of a safetensors file.

use crate::input::Problem;
use crate::input::scales::SUFFIXES;
use crate::output::line;
use flash_sampling::DType;
use safetensors::tensor::Metadata;
use safetensors::{Dtype, SafeTensors};
use std::ops::Range;

/// A tensor of any type.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Stored<'a> {
    /// Element type.
    pub dtype: Dtype,
    /// Shape.
    pub shape: &'a [usize],
    /// The bytes from the start of the file, in C order.
    pub range: Range<usize>,
}

/// A tensor of a type that this project reads.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Located {
    /// Element type.
    pub dtype: DType,
    /// Shape.
    pub shape: Vec<usize>,
    /// The bytes from the start of the file, in C order.
    pub range: Range<usize>,
}

/// The parsed header of a file.
#[derive(Debug)]
pub struct Header {
    metadata: Metadata,
    /// Offset of the data in bytes.
    data: usize,
}

impl Header {
    /// Parses and validates the header at the start of `bytes`, which must be the whole file.
    ///
    /// # Errors
    /// [`Problem::Format`] or [`Problem::Truncated`], or [`Problem::Unusable`] for a file of another format.
    pub fn parse(bytes: &[u8]) -> Result<Self, Problem> {
        // The first 8 bytes are the length of the header. The header is a JSON object.
        if bytes.get(8).is_some_and(|byte| *byte != b'{') {
            let zip = if bytes.starts_with(b"PK\x03\x04") { " but a zip archive (.npz or PyTorch)" } else { "" };
            return Err(Problem::Unusable(format!("not a safetensors, GGUF or .npy file{zip}")));
        }
        let (header, metadata) = SafeTensors::read_metadata(bytes)?;
        Ok(Header { metadata, data: header + 8 })
    }

    /// The names of all tensors.
    pub fn names(&self) -> Vec<String> {
        self.metadata.offset_keys()
    }

    /// Whether there is a tensor `name`.
    pub fn has(&self, name: &str) -> bool {
        self.metadata.info(name).is_some()
    }

    /// The name of the only tensor. The tensors whose names are that of another tensor and `_scale` or `_scale_inv` do not
    /// count.
    ///
    /// # Errors
    /// [`Problem::Unusable`] without a tensor or with several tensors.
    pub fn only(&self) -> Result<String, Problem> {
        let is_scale = |key: &str| SUFFIXES.iter().any(|end| key.strip_suffix(end).is_some_and(|of| self.has(of)));
        let mut keys = self.metadata.offset_keys();
        keys.retain(|key| !is_scale(key));
        match keys.pop() {
            Some(only) if keys.is_empty() => Ok(only),
            _ => {
                let found = self.listing();
                Err(Problem::Unusable(format!("which tensor? Name one as FILE:TENSOR; it has {found}")))
            }
        }
    }

    /// The tensor `name` of any type.
    ///
    /// # Errors
    /// [`Problem::Unusable`] without the tensor.
    pub fn stored(&self, name: &str) -> Result<Stored<'_>, Problem> {
        let info = self.metadata.info(name);
        let info = info.ok_or_else(|| Problem::Unusable(format!("no tensor {name:?}; it has {}", self.listing())))?;
        // The metadata was checked against the length of the file.
        let range = self.data + info.data_offsets.0..self.data + info.data_offsets.1;
        Ok(Stored { dtype: info.dtype, shape: &info.shape, range })
    }

    /// The matrix or vector `name`.
    ///
    /// # Errors
    /// [`Problem::Unusable`] without the tensor, or [`Problem::DType`] for a type that is not a [`DType`].
    pub fn locate(&self, name: &str) -> Result<Located, Problem> {
        let Stored { dtype, shape, range } = self.stored(name)?;
        let dtype = match dtype {
            Dtype::BF16 => DType::BF16,
            Dtype::F16 => DType::F16,
            Dtype::F32 => DType::F32,
            Dtype::I8 => DType::I8,
            Dtype::F8_E4M3 => DType::F8_E4M3,
            other => {
                let (tensor, found) = (line::name(name), other.to_string());
                return Err(Problem::DType { tensor, found, expected: "bf16, f16, f32, f8_e4m3 or i8" });
            }
        };
        Ok(Located { dtype, shape: shape.to_vec(), range })
    }

    fn listing(&self) -> String {
        listing(&self.metadata.offset_keys())
    }
}

/// The number and the first names of tensors, for messages.
pub(super) fn listing(names: &[impl AsRef<str>]) -> String {
    let first =
        |count: usize| names[..count].iter().map(|name| line::name(name.as_ref())).collect::<Vec<_>>().join(", ");
    match names.len() {
        0 => "no tensors".into(),
        n @ 1..=4 => format!("{n}: {}", first(n)),
        n => format!("{n}: {}, ...", first(3)),
    }
}
