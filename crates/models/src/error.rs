//! Errors of checkpoints and calls.

use crate::gguf::GgufError;
use flash_sampling::CpuError;

/// An error of a checkpoint or a call.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ModelError {
    /// `config.json` does not describe a model of these families.
    #[error("config.json: {0}")]
    Config(String),
    /// `generation_config.json` is not JSON, or has invalid tokens.
    #[error("generation_config.json: {0}")]
    GenerationConfig(String),
    /// A GGUF file that has no model of these families.
    #[error(transparent)]
    Gguf(#[from] GgufError),
    /// The checkpoint has no tensor of this name.
    #[error("the checkpoint has no tensor {0}")]
    Missing(String),
    /// The shape of a tensor differs from the configuration.
    #[error("{tensor} has shape {found:?}, but the configuration makes it {expected:?}")]
    Shape {
        /// The tensor.
        tensor: String,
        /// Its rows and columns; a vector has one row.
        found: [usize; 2],
        /// The expected rows and columns.
        expected: [usize; 2],
    },
    /// A sequence would become longer than the model's positions.
    #[error("a sequence of {length} tokens, but the model has {limit} position{}", if *limit == 1 { "" } else { "s" })]
    TooLong {
        /// The length with the new tokens.
        length: usize,
        /// The model's positions.
        limit: usize,
    },
    /// A token without an embedding.
    #[error("token {token}, but the vocabulary has size {vocab_size}")]
    Token {
        /// The token.
        token: u32,
        /// Rows of the embedding.
        vocab_size: usize,
    },
    /// An error of the matmul.
    #[error(transparent)]
    Cpu(#[from] CpuError),
}
