//! Types, shapes and byte ranges of tensors.

use super::cursor::Cursor;
use super::error::Fault;
use super::{Gguf, GgufError, shown};
use core::ops::Range;
use flash_sampling::DType;

/// ggml allows four dimensions.
const MAX_DIMS: u32 = 4;

/// A tensor of a file.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct GgufTensor {
    /// Element type.
    pub dtype: DType,
    /// Shape, slowest dimension first as elsewhere in this project; the file has the reverse order. The last dimension is
    /// a whole number of blocks.
    pub shape: Vec<usize>,
    /// The range of the tensor's bytes in the file, in row-major order.
    pub range: Range<usize>,
}

/// The record of a tensor.
#[derive(Clone, Debug)]
pub(super) struct TensorInfo {
    kind: u32,
    /// Fastest dimension first.
    dims: Vec<u64>,
    /// Offset in bytes: from the start of the data, but after [`TensorInfo::place`] from the start of the file.
    offset: u64,
    /// Size in bytes; 0 for an unsupported type.
    size: u64,
}

/// The element type that a number means in ggml.
fn dtype(kind: u32) -> Option<DType> {
    Some(match kind {
        0 => DType::F32,
        1 => DType::F16,
        2 => DType::Q4_0,
        8 => DType::Q8_0,
        12 => DType::Q4_K,
        13 => DType::Q5_K,
        14 => DType::Q6_K,
        20 => DType::IQ4_NL,
        39 => DType::MXFP4,
        30 => DType::BF16,
        _ => return None,
    })
}

/// ggml's name of an unsupported type.
fn name(kind: u32) -> String {
    let name = match kind {
        3 => "Q4_1",
        6 => "Q5_0",
        7 => "Q5_1",
        9 => "Q8_1",
        10 => "Q2_K",
        11 => "Q3_K",
        15 => "Q8_K",
        16 => "IQ2_XXS",
        17 => "IQ2_XS",
        18 => "IQ3_XXS",
        19 => "IQ1_S",
        21 => "IQ3_S",
        22 => "IQ2_S",
        23 => "IQ4_XS",
        24 => "I8",
        25 => "I16",
        26 => "I32",
        27 => "I64",
        28 => "F64",
        29 => "IQ1_M",
        34 => "TQ1_0",
        35 => "TQ2_0",
        40 => "NVFP4",
        41 => "Q1_0",
        _ => return format!("number {kind}, which ggml does not define"),
    };
    name.into()
}

impl TensorInfo {
    /// Reads the rest of a record, after the name.
    pub(super) fn read(cursor: &mut Cursor<'_>) -> Result<Self, Fault> {
        let count = cursor.u32()?;
        if count > MAX_DIMS {
            return Err(Fault::Invalid(format!("has {count} dimensions; at most {MAX_DIMS} are possible")));
        }
        let dims = (0..count).map(|_| cursor.u64()).collect::<Result<_, _>>()?;
        Ok(TensorInfo { kind: cursor.u32()?, dims, offset: cursor.u64()?, size: 0 })
    }

    /// Computes the size, and checks that the tensor lies within a file of `length` bytes whose data begins at `data`.
    pub(super) fn place(&mut self, data: u64, alignment: u64, length: usize) -> Result<(), Fault> {
        if !self.offset.is_multiple_of(alignment) {
            return Err(Fault::Invalid(format!("has offset {}, not a multiple of {alignment}", self.offset)));
        }
        if let Some(dtype) = dtype(self.kind) {
            let (elements, bytes) = (dtype.block_elements() as u64, dtype.block_bytes() as u64);
            let columns = self.dims.first().copied().unwrap_or(1);
            if !columns.is_multiple_of(elements) {
                let name = dtype.name();
                return Err(Fault::Invalid(format!(
                    "has {columns} columns, no whole number of blocks of {elements} ({name})"
                )));
            }
            let count = self.dims.iter().try_fold(1u64, |product, dim| product.checked_mul(*dim));
            let size = count.and_then(|count| (count / elements).checked_mul(bytes));
            self.size = size.ok_or_else(|| Fault::Invalid(format!("has shape {:?}, which overflows", self.dims)))?;
        }
        let end = self.offset.checked_add(data).and_then(|start| start.checked_add(self.size));
        match end.filter(|end| *end <= length as u64) {
            Some(end) => self.offset = end - self.size,
            None => {
                let left = (length as u64).saturating_sub(data).saturating_sub(self.offset);
                return Err(Fault::Short { needed: self.size, left });
            }
        }
        Ok(())
    }
}

impl Gguf<'_> {
    /// Finds a tensor by its name.
    ///
    /// # Errors
    /// [`GgufError::MissingTensor`], or [`GgufError::DType`], which names the unsupported type.
    pub fn tensor(&self, tensor: &str) -> Result<GgufTensor, GgufError> {
        let info = self.tensors.get(tensor).ok_or_else(|| GgufError::MissingTensor(shown(tensor)))?;
        let dtype =
            dtype(info.kind).ok_or_else(|| GgufError::DType { tensor: shown(tensor), found: name(info.kind) })?;
        // The end of the bytes is at most the length of the file, which is a usize.
        let shape = info.dims.iter().rev().map(|dim| *dim as usize).collect();
        Ok(GgufTensor { dtype, shape, range: info.offset as usize..(info.offset + info.size) as usize })
    }

    /// The bytes of a tensor of this file.
    ///
    /// # Panics
    /// If the tensor is of another file.
    pub fn bytes(&self, tensor: &GgufTensor) -> &[u8] {
        &self.bytes[tensor.range.clone()]
    }
}
