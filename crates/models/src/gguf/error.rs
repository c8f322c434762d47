//! Errors of GGUF files.

/// An error of a GGUF file, which names the key or the tensor.
#[derive(Clone, Debug, PartialEq, thiserror::Error)]
#[non_exhaustive]
pub enum GgufError {
    /// The file does not begin with `GGUF`.
    #[error("it does not begin with GGUF")]
    Magic,
    /// The file is from a big-endian machine.
    #[error("it is big-endian; only little-endian files are supported")]
    BigEndian,
    /// An unsupported version.
    #[error("it has version {0}; versions 2 and 3 are supported")]
    Version(u32),
    /// The file ends before one of its parts does.
    #[error("it is truncated or damaged: {part} needs {needed} more bytes, but the file has {left}")]
    Truncated {
        /// The key, the tensor or the header.
        part: String,
        /// Bytes that the part needs.
        needed: u64,
        /// Bytes from the start of the part to the end of the file.
        left: u64,
    },
    /// A part violates the format.
    #[error("{part} {reason}")]
    Invalid {
        /// The key or the tensor.
        part: String,
        /// The violation, as a predicate.
        reason: String,
    },
    /// The file has no such key.
    #[error("the key {0} is missing")]
    MissingKey(String),
    /// A key whose value is wrong or not supported.
    #[error("the key {key} is {found}, expected {expected}")]
    Key {
        /// The key.
        key: String,
        /// Its value.
        found: String,
        /// The supported values.
        expected: String,
    },
    /// A key of an unsupported feature.
    #[error("the key {key} is {found}, which is not supported")]
    Unsupported {
        /// The key.
        key: String,
        /// Its value.
        found: String,
    },
    /// The file has no such tensor.
    #[error("there is no tensor {0}")]
    MissingTensor(String),
    /// A tensor that the architecture does not have, so the model has another architecture.
    #[error("the tensor {tensor} is not part of the architecture {architecture}")]
    UnusedTensor {
        /// The tensor.
        tensor: String,
        /// `general.architecture`.
        architecture: String,
    },
    /// A tensor of an unsupported type.
    #[error("the tensor {tensor} has type {found}, which is not supported")]
    DType {
        /// The tensor.
        tensor: String,
        /// ggml's name of its type.
        found: String,
    },
}

/// An error in the bytes, before the name of their part is known.
#[derive(Clone, Debug, PartialEq)]
pub(super) enum Fault {
    Short { needed: u64, left: u64 },
    Invalid(String),
}

impl Fault {
    /// Converts to an error that names the part.
    pub(super) fn of(self, part: impl Into<String>) -> GgufError {
        let part = part.into();
        match self {
            Fault::Short { needed, left } => GgufError::Truncated { part, needed, left },
            Fault::Invalid(reason) => GgufError::Invalid { part, reason },
        }
    }
}
