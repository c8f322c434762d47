//! What can be wrong with a checkpoint or a call.

use flash_sampling::CpuError;

/// Why a model cannot be made, or cannot go on.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ModelError {
    /// `config.json` does not describe a model of these families.
    #[error("config.json: {0}")]
    Config(String),
    /// `generation_config.json` is no JSON, or names no tokens.
    #[error("generation_config.json: {0}")]
    GenerationConfig(String),
    /// The checkpoint has no tensor of this name.
    #[error("the checkpoint has no tensor {0}")]
    Missing(String),
    /// A tensor has another shape than `config.json` says.
    #[error("{tensor} has shape {found:?}, but config.json makes it {expected:?}")]
    Shape {
        /// The tensor.
        tensor: String,
        /// Its rows and columns; a vector has one row.
        found: [usize; 2],
        /// What they should be.
        expected: [usize; 2],
    },
    /// A sequence would become longer than the model's positions.
    #[error("a sequence of {length} tokens, but the model has {limit} position{}", if *limit == 1 { "" } else { "s" })]
    TooLong {
        /// Its length with the new tokens.
        length: usize,
        /// `max_position_embeddings`.
        limit: usize,
    },
    /// A token that has no embedding.
    #[error("token {token}, but the model has {vocab_size}")]
    Token {
        /// The token.
        token: u32,
        /// Rows of the embedding.
        vocab_size: usize,
    },
    /// The matmul refuses.
    #[error(transparent)]
    Cpu(#[from] CpuError),
}
