//! Bitmaps of allowed tokens.

use crate::load::npy::NpyHeader;
use crate::load::{LoadError, Problem, tensor};
use std::path::Path;

/// Masks of `rows` rows: least significant bit first, 1 = allowed.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Masks {
    words: Vec<u32>,
    /// Words of a row.
    width: usize,
    /// Whether every row has the same mask.
    shared: bool,
}

impl Masks {
    /// The mask, for all rows, that allows these tokens.
    ///
    /// # Errors
    /// The first token beyond the vocabulary.
    pub fn of_tokens(tokens: &[u32], vocab_size: u32) -> Result<Self, u32> {
        let width = vocab_size.div_ceil(32) as usize;
        let mut words = vec![0; width];
        for &token in tokens {
            if token >= vocab_size {
                return Err(token);
            }
            words[(token >> 5) as usize] |= 1 << (token & 31);
        }
        Ok(Masks { words, width, shared: true })
    }

    /// Reads the masks of `rows` rows from a `.npy` file.
    ///
    /// # Errors
    /// What is wrong with the file, or with the masks for these rows and this vocabulary.
    pub fn open(path: &Path, rows: usize, vocab_size: usize) -> Result<Self, LoadError> {
        Masks::parse(&tensor::map(path)?, rows, vocab_size).map_err(|problem| problem.at(path))
    }

    /// Parses a `.npy` file of 32-bit words, shape `[words]` or `[1, words]` (one mask for all rows) or
    /// `[rows, words]`. Signed words are taken by their bits: that is how grammar libraries hold bitmaps in tensor types
    /// without unsigned integers.
    ///
    /// # Errors
    /// [`Problem`]: the format, the type, the shape, or fewer bits than tokens. A token that the mask does not speak of
    /// is more likely a mistake than a wish.
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
            return Err(Problem::MaskTooShort { words: width, tokens, vocab_size });
        }
        let words = data.as_chunks::<4>().0.iter().map(|word| u32::from_le_bytes(*word)).collect();
        Ok(Masks { words, width, shared })
    }

    /// The mask of a row; panics when it is out of range, like a slice.
    pub fn row(&self, row: usize) -> &[u32] {
        let at = if self.shared { 0 } else { row * self.width };
        &self.words[at..at + self.width]
    }
}
