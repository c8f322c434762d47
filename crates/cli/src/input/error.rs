//! Errors of input files.

use flash_sampling::ShadowFileError;
use flash_sampling_models::gguf::GgufError;
use safetensors::SafeTensorError;
use std::path::{Path, PathBuf};

/// An error of a file, with its path.
#[derive(Debug, thiserror::Error)]
#[error("{}: {problem}", path.display())]
pub struct LoadError {
    /// The file (or folder).
    pub path: PathBuf,
    /// The error.
    pub problem: Problem,
}

/// An error of a file.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Problem {
    /// The system cannot open or map it.
    #[error("{0}")]
    Io(std::io::Error),
    /// The file exceeds its size limit.
    #[error("the file is larger than the limit of {limit} MiB")]
    TooLarge {
        /// The limit, in MiB.
        limit: u64,
    },
    /// The bytes do not follow the format.
    #[error("not a valid {format} file: {reason}")]
    Format {
        /// The expected format.
        format: &'static str,
        /// What violates it.
        reason: String,
    },
    /// A GGUF file without the required content.
    #[error("not a usable GGUF file: {0}")]
    Gguf(#[from] GgufError),
    /// A file that is not the shadow of the weight.
    #[error("{0}; `flash-sampling shadow` writes a new file")]
    Shadow(#[from] ShadowFileError),
    /// The file is shorter or longer than its header says.
    #[error("the file is truncated or damaged: {0}")]
    Truncated(String),
    /// An unsupported element type.
    #[error("{tensor} has dtype {found}, expected {expected}")]
    DType {
        /// The tensor.
        tensor: String,
        /// Its type.
        found: String,
        /// The supported types.
        expected: &'static str,
    },
    /// An unsupported shape.
    #[error("{tensor} has shape {found:?}, expected {expected}")]
    Shape {
        /// The tensor.
        tensor: String,
        /// Its shape.
        found: Vec<usize>,
        /// The supported shapes.
        expected: String,
    },
    /// A missing tensor or file, or parts that contradict each other.
    #[error("{0}")]
    Unusable(String),
}

impl Problem {
    /// Adds the path of the file.
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
