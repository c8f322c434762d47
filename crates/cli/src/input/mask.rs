//! Bitmaps of allowed tokens.

use crate::input::npy::NpyHeader;
use crate::input::{LoadError, Problem, tensor};
use crate::output::line;
use std::path::Path;

/// Masks of some rows: least significant bit first, 1 = allowed.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Masks {
    words: Vec<u32>,
    /// Words per row.
    width: usize,
    /// Whether every row has the same mask.
    shared: bool,
}

impl Masks {
    /// Reads the masks of `rows` rows from a `.npy` file.
    ///
    /// # Errors
    /// An invalid file, or masks of another shape.
    pub fn open(path: &Path, rows: usize, vocab_size: usize) -> Result<Self, LoadError> {
        Masks::parse(&tensor::map(path)?, rows, vocab_size).map_err(|problem| problem.at(path))
    }

    /// Parses a `.npy` file of 32-bit words, shape `[words]` or `[1, words]` (one mask for all rows) or
    /// `[rows, words]`. Signed words are accepted, since grammar libraries store bitmaps in tensor types without
    /// unsigned integers.
    ///
    /// # Errors
    /// [`Problem`]: the format, the type, the shape, or fewer bits than tokens.
    pub fn parse(bytes: &[u8], rows: usize, vocab_size: usize) -> Result<Self, Problem> {
        let header = NpyHeader::parse(bytes)?;
        let types = [("<u4", 4, ()), ("<i4", 4, ())];
        let ((), data) = header.data_as(bytes, &types, "little-endian uint32 (<u4)")?;
        let (shared, width) = match header.shape[..] {
            [words] => (true, words),
            [mask_rows, words] if mask_rows == rows => (false, words),
            [1, words] => (true, words),
            _ => {
                return Err(Problem::Shape {
                    tensor: "the mask".into(),
                    found: header.shape,
                    expected: format!("[words] or [{rows}, words]"),
                });
            }
        };
        let tokens = width.saturating_mul(32);
        if tokens < vocab_size {
            let words = line::count(width, "word");
            let message = format!("the mask has {words} a row, for {tokens} tokens; the vocabulary has {vocab_size}");
            return Err(Problem::Unusable(message));
        }
        let words = data.as_chunks::<4>().0.iter().map(|word| u32::from_le_bytes(*word)).collect();
        Ok(Masks { words, width, shared })
    }

    /// The mask of a row.
    ///
    /// # Panics
    /// If the row is out of range.
    pub fn row(&self, row: usize) -> &[u32] {
        let at = if self.shared { 0 } else { row * self.width };
        &self.words[at..at + self.width]
    }
}
