//! What can be wrong with a file.

use crate::output::line;
use safetensors::SafeTensorError;
use std::path::{Path, PathBuf};

/// A file and what is wrong with it.
#[derive(Debug, thiserror::Error)]
#[error("{}: {problem}", path.display())]
pub struct LoadError {
    /// The file (or folder).
    pub path: PathBuf,
    /// What is wrong.
    pub problem: Problem,
}

/// What is wrong with a file.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Problem {
    /// The system cannot open or map it.
    #[error("{0}")]
    Io(std::io::Error),
    /// It is larger than such a file may be.
    #[error("the file is larger than the limit of {limit} MiB")]
    TooLarge {
        /// The limit, in MiB.
        limit: u64,
    },
    /// Its bytes do not follow the format.
    #[error("not a valid {format} file: {reason}")]
    Format {
        /// The format that was expected.
        format: &'static str,
        /// What breaks it.
        reason: String,
    },
    /// It ends before its data do, or does not end with them.
    #[error("the file is truncated or damaged: {0}")]
    Truncated(String),
    /// None of the tensors looked for is there.
    #[error("no tensor {wanted}; it holds {found}")]
    MissingTensor {
        /// What was looked for.
        wanted: String,
        /// What there is.
        found: String,
    },
    /// No tensor was named, and there is not exactly one.
    #[error("which tensor? Name one as FILE:TENSOR; it holds {found}")]
    WhichTensor {
        /// What there is.
        found: String,
    },
    /// The element type is not one that can be used here.
    #[error("{tensor} has dtype {found}, expected {expected}")]
    DType {
        /// The tensor.
        tensor: String,
        /// Its type.
        found: String,
        /// The types that can be used.
        expected: &'static str,
    },
    /// The shape is not one that can be used here.
    #[error("{tensor} has shape {found:?}, expected {expected}")]
    Shape {
        /// The tensor.
        tensor: String,
        /// Its shape.
        found: Vec<usize>,
        /// The shapes that can be used.
        expected: String,
    },
    /// A mask that leaves tokens undecided.
    #[error("the mask has {} a row, for {tokens} tokens; the vocabulary has {vocab_size}", line::count(*words, "word"))]
    MaskTooShort {
        /// Words of a row.
        words: usize,
        /// Tokens that they decide.
        tokens: usize,
        /// Tokens there are.
        vocab_size: usize,
    },
    /// The checkpoint's parts contradict one another, or leave open what to do.
    #[error("{0}")]
    Checkpoint(String),
}

impl Problem {
    /// Names the file.
    pub fn at(self, path: &Path) -> LoadError {
        LoadError { path: path.to_path_buf(), problem: self }
    }
}

impl From<std::io::Error> for Problem {
    fn from(error: std::io::Error) -> Self {
        Problem::Io(error)
    }
}

impl From<SafeTensorError> for Problem {
    fn from(error: SafeTensorError) -> Self {
        match error {
            SafeTensorError::HeaderTooSmall
            | SafeTensorError::InvalidHeaderLength
            | SafeTensorError::MetadataIncompleteBuffer => Problem::Truncated(error.to_string()),
            error => Problem::Format { format: "safetensors", reason: error.to_string() },
        }
    }
}
