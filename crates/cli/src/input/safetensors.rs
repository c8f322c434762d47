//! The header of a safetensors file.

use crate::input::Problem;
use crate::output::line;
use flash_sampling::DType;
use safetensors::tensor::Metadata;
use safetensors::{Dtype, SafeTensors};
use std::ops::Range;

/// A tensor of a file: type, shape and byte range.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Located {
    /// Its name.
    pub name: String,
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
    /// [`Problem::Format`] or [`Problem::Truncated`].
    pub fn parse(bytes: &[u8]) -> Result<Self, Problem> {
        let (header, metadata) = SafeTensors::read_metadata(bytes)?;
        Ok(Header { metadata, data: header + 8 })
    }

    /// The names of all tensors.
    pub fn names(&self) -> Vec<String> {
        self.metadata.offset_keys()
    }

    /// The tensor `name`. Without a name, the only tensor.
    ///
    /// # Errors
    /// [`Problem::Unusable`] without the tensor, or [`Problem::DType`] for a type other than bf16, f16 or
    /// f32.
    pub fn locate(&self, name: Option<&str>) -> Result<Located, Problem> {
        let keys = self.metadata.offset_keys();
        let name = match (name, &keys[..]) {
            (Some(name), _) => name,
            (None, [only]) => only,
            (None, _) => {
                let found = self.listing();
                return Err(Problem::Unusable(format!("which tensor? Name one as FILE:TENSOR; it has {found}")));
            }
        };
        let info = self.metadata.info(name);
        let info = info.ok_or_else(|| Problem::Unusable(format!("no tensor {name:?}; it has {}", self.listing())))?;
        let dtype = match info.dtype {
            Dtype::BF16 => DType::BF16,
            Dtype::F16 => DType::F16,
            Dtype::F32 => DType::F32,
            other => {
                let (tensor, found) = (line::name(name), other.to_string());
                return Err(Problem::DType { tensor, found, expected: "bf16, f16 or f32" });
            }
        };
        // The metadata was checked against the length of the file.
        let range = self.data + info.data_offsets.0..self.data + info.data_offsets.1;
        Ok(Located { name: name.into(), dtype, shape: info.shape.clone(), range })
    }

    /// Number and first names of the tensors, for messages.
    fn listing(&self) -> String {
        let keys = self.metadata.offset_keys();
        let names = |keys: &[String]| keys.iter().map(|key| line::name(key)).collect::<Vec<_>>().join(", ");
        match keys.len() {
            0 => "no tensors".into(),
            n @ 1..=4 => format!("{n}: {}", names(&keys)),
            n => format!("{n}: {}, ...", names(&keys[..3])),
        }
    }
}
