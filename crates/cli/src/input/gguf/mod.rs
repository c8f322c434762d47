//! GGUF files: a model in one file, or tensors.
//!
//! [`flash_sampling_models::gguf`] reads the container and the configuration of a model. This module has the head and the
//! tokenizer.

mod byte_level;
mod sentence_piece;
mod tokenizer;

pub use tokenizer::{GgufTokenizer, tokenizer};

use crate::input::checkpoint::Checkpoint;
use crate::input::config::{HeadConfig, Scale};
use crate::input::tensor::{self, Role, Tensor};
use crate::input::{LoadError, Problem};
use flash_sampling_models::gguf::{Gguf, GgufError, MAGIC, Value};
use memmap2::Mmap;
use std::path::{Path, PathBuf};
use std::sync::Arc;

/// The head of a model, and the embedding, which is the head of a model without the first.
pub const HEADS: [&str; 2] = ["output.weight", "token_embd.weight"];

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
        let missing = || GgufError::MissingTensor(HEADS.join(" and no tensor "));
        let at = |error: GgufError| Problem::from(error).at(&self.path);
        let name = HEADS.into_iter().find(|name| parsed.has(name)).ok_or_else(|| at(missing()))?;
        let weight = self.tensor(parsed, name, Role::Weight)?;
        let config = head_config(parsed).map_err(at)?;
        Ok(Checkpoint { weight, name, bias: None, config, origin: "GGUF" })
    }
}

/// The head's parameters under the keys of the architecture.
fn head_config(file: &Gguf<'_>) -> Result<HeadConfig, GgufError> {
    let architecture = file.architecture()?;
    let key = |name: &str| format!("{architecture}.{name}");
    let size = |value: Value<'_>| value.as_u64().and_then(|n| usize::try_from(n).ok()).filter(|n| *n > 0);
    let positive = |value: Value<'_>| value.as_f64().map(|x| x as f32).filter(|x| x.is_finite() && *x > 0.0);
    let vocab_size = file.read(&key("vocab_size"), "a size", size)?;
    let soft_cap = file.read(&key("final_logit_softcapping"), "a number above 0", positive)?;
    let scale = file.read(&key("logit_scale"), "a number above 0", positive)?.map(|scale| match architecture {
        "command-r" | "cohere2" => Scale::Factor(scale),
        "granite" | "granitemoe" | "granitehybrid" => Scale::Factor(1.0 / scale),
        _ => Scale::Unclear,
    });
    Ok(HeadConfig { vocab_size, tied: None, soft_cap, scale: scale.map(|scale| ("logit_scale", scale)) })
}
