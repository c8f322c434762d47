//! The shadow of a weight in a file. `docs/shadow.md` describes the format.

use core::fmt;
use core::ops::Range;
use flash_sampling_core::backend::{code_stride, digest};
use flash_sampling_core::{DType, HeadError, Matrix, Shadow};
use safetensors::tensor::{Metadata, TensorInfo};
use safetensors::{Dtype, SafeTensorError, SafeTensors};
use std::collections::HashMap;
use std::io::{self, Write};

/// The parts of a shadow in a file.
const PARTS: [&str; 4] = ["codes", "scales", "errors", "norms"];
/// The data of a file begin at a multiple of this number of bytes, and so does each row of codes.
const ALIGNMENT: usize = 64;
/// The key of the digest of the parts in a file's metadata.
const DIGEST: &str = "digest";

/// The reason why a shadow file cannot be read or written.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ShadowFileError {
    /// The bytes are not a safetensors file.
    #[error("the file is truncated or not a shadow: {0}")]
    Format(#[from] SafeTensorError),
    /// The file is not a shadow: it lacks a part, or an entry of its metadata.
    #[error("the file is not a shadow: it has no {0}")]
    Missing(&'static str),
    /// The shadow is of another weight.
    #[error("the shadow of another weight: its {property} is {found}, but the head's is {expected}")]
    Weight {
        /// What differs: `weight_dtype`, `weight_shape` or `weight_digest`.
        property: &'static str,
        /// The value in the file.
        found: String,
        /// The value of the weight.
        expected: String,
    },
    /// A part has another type or shape than the weight requires.
    #[error("{part} is {found}, but must be {expected}")]
    Part {
        /// The part.
        part: &'static str,
        /// Its type and shape.
        found: String,
        /// The required type and shape.
        expected: String,
    },
    /// The parts do not have the digest of the file's metadata.
    #[error("the file is damaged: the digest of its parts is {found}, but must be {expected}")]
    Damaged {
        /// The digest of the parts.
        found: String,
        /// The digest in the file's metadata.
        expected: String,
    },
    /// The shadow and the weight have different shapes.
    #[error(transparent)]
    Head(#[from] HeadError),
    /// The file cannot be written.
    #[error(transparent)]
    Write(#[from] io::Error),
}

/// The shadow of a weight in the bytes of a file, such as a mapped file, a `Vec<u8>` or an `Arc<[u8]>`.
///
/// ```
/// use flash_sampling::{Head, Matrix, ShadowFile, make_shadow, write_shadow};
///
/// let floats: Vec<f32> = (0..1000 * 64).map(|i| (i as f32 * 0.7).sin()).collect();
/// let weight = Matrix::new(&floats, 1000, 64)?; // [vocab, hidden]
/// let mut bytes = Vec::new(); // a file
/// write_shadow(&make_shadow(&weight)?.shadow(), &weight, &mut bytes)?;
///
/// let file = ShadowFile::new(bytes, &weight)?;
/// let head = Head::new(weight)?.with_shadow(file.shadow())?;
/// # assert_eq!(head.shadow().map(|shadow| shadow.rows()), Some(1000));
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
pub struct ShadowFile<B> {
    bytes: B,
    codes: Range<usize>,
    cols: usize,
    /// Scales, errors and norms.
    numbers: [Vec<f32>; 3],
}

impl<B: AsRef<[u8]>> ShadowFile<B> {
    /// Reads the shadow of `weight`, and checks that it belongs to `weight`.
    ///
    /// The check reads all parts and the weight once; with the feature `cpu`, on all threads. The codes stay in
    /// `bytes`.
    ///
    /// # Errors
    /// [`ShadowFileError`] if the bytes are not a shadow, are damaged, or are the shadow of another weight.
    pub fn new(bytes: B, weight: &Matrix<'_>) -> Result<Self, ShadowFileError> {
        let file = bytes.as_ref();
        let (header, metadata) = SafeTensors::read_metadata(file)?;
        let entry = |key| metadata.metadata().as_ref().and_then(|entries| entries.get(key));
        let check = |property, expected: String| match entry(property) {
            None => Err(ShadowFileError::Missing(property)),
            Some(found) if *found == expected => Ok(()),
            Some(found) => Err(ShadowFileError::Weight { property, found: found.clone(), expected }),
        };
        let (rows, cols) = (weight.rows(), weight.cols());
        check("weight_dtype", weight.dtype().name().into())?;
        check("weight_shape", format!("{:?}", [rows, cols]))?;
        let mut ranges = [0..0, 0..0, 0..0, 0..0];
        for (range, (part, (dtype, shape))) in ranges.iter_mut().zip(PARTS.into_iter().zip(layout(rows, cols))) {
            let info = metadata.info(part).ok_or(ShadowFileError::Missing(part))?;
            if (info.dtype, &info.shape) != (dtype, &shape) {
                let [found, expected] = [(info.dtype, &info.shape), (dtype, &shape)].map(|(d, s)| format!("{d} {s:?}"));
                return Err(ShadowFileError::Part { part, found, expected });
            }
            // `read_metadata` has checked the offsets against the type, the shape and the length of the file.
            let data = header + size_of::<u64>();
            *range = data + info.data_offsets.0..data + info.data_offsets.1;
        }
        let [codes, scales, errors, norms] = ranges;
        let numbers = [scales, errors, norms].map(|range| &file[range]);
        let found = text(digest_of_parts(&file[codes.clone()], code_stride(cols), numbers)?);
        let expected = entry(DIGEST).ok_or(ShadowFileError::Missing(DIGEST))?;
        if found != *expected {
            return Err(ShadowFileError::Damaged { found, expected: expected.clone() });
        }
        check("weight_digest", text(digest_of_matrix(weight)))?;
        let floats = |bytes: &[u8]| bytes.as_chunks().0.iter().map(|&number| f32::from_le_bytes(number)).collect();
        let numbers = numbers.map(floats);
        Ok(ShadowFile { codes, cols, numbers, bytes })
    }

    /// The shadow.
    pub fn shadow(&self) -> Shadow<'_> {
        let codes = bytemuck::cast_slice(&self.bytes.as_ref()[self.codes.clone()]);
        let [scales, errors, norms] = &self.numbers;
        Shadow::new(codes, self.cols, [scales, errors, norms]).expect("`new` has checked the lengths")
    }
}

impl<B> fmt::Debug for ShadowFile<B> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "ShadowFile([{}, {}])", self.numbers[0].len(), self.cols)
    }
}

/// Writes the shadow of `weight` as a file for [`ShadowFile`]. Reads the weight once, for its digest.
///
/// # Errors
/// [`ShadowFileError::Head`] if the shadow and the weight have different shapes, or the weight's type has no shadow;
/// [`ShadowFileError::Write`] if `out` has an error.
pub fn write_shadow(shadow: &Shadow<'_>, weight: &Matrix<'_>, out: &mut dyn Write) -> Result<(), ShadowFileError> {
    /// Bytes of codes per write, so that `out` can show the progress.
    const WRITE: usize = 1 << 20;
    let (rows, cols) = (weight.rows(), weight.cols());
    if [shadow.rows(), shadow.cols()] != [rows, cols] {
        return Err(HeadError::ShadowShape { shadow: [shadow.rows(), shadow.cols()], weight: [rows, cols] }.into());
    }
    if !weight.dtype().is_float() {
        return Err(HeadError::ShadowType { dtype: weight.dtype() }.into());
    }
    let codes: &[u8] = bytemuck::cast_slice(shadow.codes());
    let numbers = [shadow.scales(), shadow.errors(), shadow.norms()]
        .map(|numbers| numbers.iter().flat_map(|number| number.to_le_bytes()).collect::<Vec<u8>>());
    let entries = HashMap::from([
        ("weight_dtype", weight.dtype().name().into()),
        ("weight_shape", format!("{:?}", [rows, cols])),
        ("weight_digest", text(digest_of_matrix(weight))),
        (DIGEST, text(digest_of_parts(codes, code_stride(cols), numbers.each_ref().map(Vec::as_slice))?)),
    ]);
    let mut end = 0;
    let tensors = PARTS.into_iter().zip(layout(rows, cols)).map(|(part, (dtype, shape))| {
        let start = end;
        end += shape.iter().product::<usize>() * dtype.bitsize() / 8;
        (part.to_owned(), TensorInfo { dtype, shape, data_offsets: (start, end) })
    });
    let entries = entries.into_iter().map(|(key, value)| (key.to_owned(), value)).collect();
    let metadata = Metadata::new(Some(entries), tensors.collect())?;
    // The keys of a `Value` are sorted, so equal shadows give equal files.
    let mut header =
        serde_json::to_value(&metadata).and_then(|header| serde_json::to_vec(&header)).map_err(io::Error::from)?;
    let length = size_of::<u64>();
    header.resize((length + header.len()).next_multiple_of(ALIGNMENT) - length, b' ');
    out.write_all(&(header.len() as u64).to_le_bytes())?;
    out.write_all(&header)?;
    codes.chunks(WRITE).try_for_each(|codes| out.write_all(codes))?;
    Ok(numbers.iter().try_for_each(|numbers| out.write_all(numbers))?)
}

/// Types and shapes of [`PARTS`].
fn layout(rows: usize, cols: usize) -> [(Dtype, Vec<usize>); 4] {
    let numbers = || (Dtype::F32, vec![rows]);
    [(Dtype::I8, vec![rows, code_stride(cols)]), numbers(), numbers(), numbers()]
}

/// The digest of codes, scales, errors and norms as bytes.
fn digest_of_parts(codes: &[u8], stride: usize, numbers: [&[u8]; 3]) -> Result<u64, HeadError> {
    let codes = Matrix::from_bytes(codes, DType::I8, codes.len() / stride, stride, stride)?;
    Ok(digest::of_words([digest_of_matrix(&codes)].into_iter().chain(numbers.map(digest::of_bytes))))
}

fn digest_of_matrix(matrix: &Matrix<'_>) -> u64 {
    #[cfg(feature = "cpu")]
    return flash_sampling_cpu::digest_of_matrix(matrix);
    #[cfg(not(feature = "cpu"))]
    digest::of_matrix(matrix)
}

/// A digest as text.
fn text(digest: u64) -> String {
    format!("{digest:016x}")
}
