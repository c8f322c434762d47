//! GGUF files: a model in one file, or tensors.
//!
//! [`flash_sampling_models::gguf`] reads the container and the configuration of a model. This module has the head and the
//! tokenizer.

mod byte_level;
mod sentence_piece;
mod tokenizer;

pub use tokenizer::{GgufTokenizer, tokenizer};

use crate::input::checkpoint::Checkpoint;
use crate::input::config::HeadConfig;
use crate::input::tensor::{self, Role, Tensor};
use crate::input::{LoadError, Problem};
use flash_sampling_models::gguf::{Gguf, GgufError, GgufHead, HEAD_BIAS, MAGIC};
use memmap2::Mmap;
use std::path::{Path, PathBuf};
use std::sync::Arc;

/// A mapped file.
#[derive(Debug)]
pub struct GgufFile {
    path: PathBuf,
    map: Arc<Mmap>,
}

impl GgufFile {
    /// Maps a file.
    ///
    /// # Errors
    /// A file that cannot be mapped, or without the first bytes of GGUF.
    pub fn open(path: &Path) -> Result<Self, LoadError> {
        let map = tensor::map(path)?;
        match map.starts_with(MAGIC) {
            true => Ok(GgufFile { path: path.into(), map: Arc::new(map) }),
            false => Err(Problem::Unusable("it is neither a directory nor a GGUF file".into()).at(path)),
        }
    }

    /// The file.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Metadata and records of tensors.
    ///
    /// # Errors
    /// An invalid file.
    pub fn parse(&self) -> Result<Gguf<'_>, LoadError> {
        Gguf::parse(&self.map).map_err(|error| Problem::from(error).at(&self.path))
    }

    /// The tensor of a name in the parsed file.
    ///
    /// # Errors
    /// A missing tensor, or a tensor that does not fit the role.
    pub fn tensor(&self, parsed: &Gguf<'_>, name: &str, role: Role) -> Result<Tensor, LoadError> {
        Tensor::in_gguf(&self.map, parsed, Some(name), role).map_err(|problem| problem.at(&self.path))
    }

    /// The head with its parameters.
    ///
    /// # Errors
    /// A file without a head, or a parameter that is not a number.
    pub fn head(&self, parsed: &Gguf<'_>) -> Result<Checkpoint, LoadError> {
        let at = |error: GgufError| Problem::from(error).at(&self.path);
        let name = parsed.head_name().map_err(at)?;
        let weight = self.tensor(parsed, name, Role::Weight)?;
        let bias = parsed.has(HEAD_BIAS).then(|| self.tensor(parsed, HEAD_BIAS, Role::Bias)).transpose()?;
        let GgufHead { vocab_size, soft_cap, scale } = parsed.head().map_err(at)?;
        let scale = scale.map(|scale| ("logit_scale", scale));
        let config = HeadConfig { vocab_size, tied: None, soft_cap, scale };
        Ok(Checkpoint { weight, name, bias, config, origin: "GGUF" })
    }
}
