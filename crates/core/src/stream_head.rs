//! A head with a streamed weight, which need not fit in memory.

use crate::error::{HeadError, SampleError};
use crate::head::Head;
use crate::matrix::{DType, Matrix};
use std::io;

/// A head without its weight, for streamed weights.
#[derive(Clone, Copy, Debug)]
pub struct StreamHead<'a> {
    /// Rows of the weight.
    pub vocab: usize,
    /// Columns of the weight.
    pub hidden: usize,
    /// Element type of the weight.
    pub dtype: DType,
    /// Tokens that can be drawn; at most `vocab`.
    pub vocab_size: usize,
    /// See [`Head::with_bias`]; one entry per weight row.
    pub bias: Option<&'a [f32]>,
    /// See [`Head::with_soft_cap`].
    pub soft_cap: Option<f32>,
    /// See [`Head::with_scale`]; 1 = none.
    pub scale: f32,
}

impl<'a> StreamHead<'a> {
    /// A head of `[vocab, hidden]` without transforms.
    pub fn new(vocab: usize, hidden: usize, dtype: DType) -> Self {
        StreamHead { vocab, hidden, dtype, vocab_size: vocab, bias: None, soft_cap: None, scale: 1.0 }
    }

    /// Checks everything that does not depend on the weight.
    ///
    /// # Errors
    /// [`HeadError`]: the shape, the bias or the factors.
    pub fn check(&self) -> Result<(), HeadError> {
        if self.vocab_size > self.vocab {
            return Err(HeadError::VocabSize { vocab_size: self.vocab_size, most: self.vocab });
        }
        // A head without rows checks everything except the bias.
        let nothing = Matrix::from_bytes(&[], self.dtype, 0, self.hidden, self.hidden)?;
        StreamHead { bias: None, ..*self }.part(nothing, self.vocab)?;
        let Some(bias) = self.bias else { return Ok(()) };
        if bias.len() != self.vocab {
            return Err(HeadError::BiasLength { found: bias.len(), expected: self.vocab });
        }
        match bias.iter().position(|b| b.is_nan() || *b == f32::INFINITY) {
            Some(row) => Err(HeadError::BiasValue { row }),
            None => Ok(()),
        }
    }

    /// Bytes of a weight row.
    pub fn row_bytes(&self) -> usize {
        self.hidden / self.dtype.block_elements() * self.dtype.block_bytes()
    }

    /// The head of a block of weight rows that begins at row `start`.
    ///
    /// # Errors
    /// The errors of [`StreamHead::check`].
    pub fn part<'h>(&'h self, weight: Matrix<'h>, start: usize) -> Result<Head<'h>, HeadError> {
        let rows = start..start + weight.rows();
        let mut head = Head::shard(weight, start, self.vocab_size)?.with_scale(self.scale)?;
        if let Some(cap) = self.soft_cap {
            head = head.with_soft_cap(cap)?;
        }
        if let Some(bias) = self.bias {
            let expected = self.vocab;
            head = head.with_bias(bias.get(rows).ok_or(HeadError::BiasLength { found: bias.len(), expected })?)?;
        }
        Ok(head)
    }
}

/// The reason why a streamed call has no result.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum StreamError {
    /// The reader failed, or ended before the last weight row.
    #[error("the weight's rows from token {token} on could not be read")]
    Read {
        /// First token of the unread block.
        token: usize,
        /// The reader's error.
        #[source]
        source: io::Error,
    },
    /// The call is invalid or failed; see [`PerturbedArgmax::sample`](crate::PerturbedArgmax::sample).
    #[error(transparent)]
    Call(#[from] SampleError),
}
