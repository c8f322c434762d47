//! The tensors, configuration and tokenizer of a checkpoint, or of the built-in model.

use super::tokenizer::TextTokenizer;
use crate::args::HeadOverrides;
use crate::error::CommandError;
use crate::input::LoadError;
use crate::input::checkpoint::Checkpoint;
use crate::input::checkpoint_files::CheckpointFiles;
use crate::input::gguf::GgufFile;
use crate::input::loaded_head::LoadedHead;
use crate::input::tensor::{Role, Tensor};
use crate::output::line;
use flash_sampling::{CpuError, Head, Isa};
use flash_sampling_models::gguf::{self, GgufError};
use flash_sampling_models::{Model, ModelConfig, ModelError};
use std::collections::HashMap;
use std::path::{Path, PathBuf};

macro_rules! stories {
    ($name:literal) => {
        include_bytes!(concat!(env!("CARGO_MANIFEST_DIR"), "/models/stories/", $name))
    };
}

/// The folder of the built-in model in messages.
const BUILT_IN: &str = "models/stories (built in)";

fn built_in() -> Result<CheckpointFiles, LoadError> {
    let texts: &'static [(&'static str, &'static [u8])] = &[
        ("config.json", stories!("config.json")),
        ("generation_config.json", stories!("generation_config.json")),
        ("tokenizer.json", stories!("tokenizer.json")),
    ];
    CheckpointFiles::in_memory(BUILT_IN, stories!("model.safetensors"), texts)
}

/// The file of the configuration and, of two in a folder, of the end-of-sequence tokens.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Origin {
    Config,
    GenerationConfig,
    Gguf,
}

/// A checkpoint with all tensors mapped.
#[derive(Debug)]
pub(super) struct Weights {
    /// The folder, or the GGUF file.
    path: PathBuf,
    config: ModelConfig,
    origin: Origin,
    /// By Hugging Face's names.
    tensors: HashMap<String, Tensor>,
    pub(super) head: LoadedHead,
    pub(super) tokenizer: TextTokenizer,
}

impl Weights {
    /// Opens a folder, a GGUF file, or the built-in model.
    pub(super) fn open(path: Option<&Path>) -> Result<Self, CommandError> {
        match path {
            Some(path) if path.is_file() => Weights::of_gguf(&GgufFile::open(path)?),
            Some(folder) => Weights::of_files(&CheckpointFiles::open(folder)?),
            None => Weights::of_files(&built_in()?),
        }
    }

    fn of_files(files: &CheckpointFiles) -> Result<Self, CommandError> {
        let failed = |source| CommandError::Model { folder: files.folder().into(), source };
        let mut config = ModelConfig::parse(&files.required("config.json")?).map_err(failed)?;
        let eos = config.eos.clone();
        if let Some(bytes) = files.text("generation_config.json")? {
            config = config.with_generation_config(&bytes).map_err(failed)?;
        }
        let origin = if config.eos == eos { Origin::Config } else { Origin::GenerationConfig };
        let head = LoadedHead::of_checkpoint(Checkpoint::of(files)?, HeadOverrides::default());
        let head = head.map_err(CommandError::Usage)?;
        let mut tensors = HashMap::new();
        for name in files.index().keys() {
            if name.starts_with("model.") && (name.ends_with(".weight") || name.ends_with(".bias")) {
                let tensor = files.tensor(name, Role::Layer)?;
                tensors.insert(name.clone(), tensor);
            }
        }
        tracing::debug!("{config:?}");
        let (path, tokenizer) = (files.folder().into(), TextTokenizer::of_files(files)?);
        Ok(Weights { path, config, origin, tensors, head, tokenizer })
    }

    fn of_gguf(file: &GgufFile) -> Result<Self, CommandError> {
        let path = file.path().to_owned();
        let failed = |error: GgufError| CommandError::Model { folder: path.clone(), source: error.into() };
        let parsed = file.parse()?;
        let config = ModelConfig::from_gguf(&parsed).map_err(failed)?;
        let head = LoadedHead::of_checkpoint(file.head(&parsed)?, HeadOverrides::default());
        let head = head.map_err(CommandError::Usage)?;
        let mut tensors = HashMap::new();
        for (hugging_face, name) in gguf::tensor_names(&parsed, &config).map_err(failed)? {
            tensors.insert(hugging_face, file.tensor(&parsed, &name, Role::Layer)?);
        }
        tracing::debug!("{config:?}");
        let tokenizer = TextTokenizer::of_gguf(file.path(), &parsed).map_err(failed)?;
        Ok(Weights { path, config, origin: Origin::Gguf, tensors, head, tokenizer })
    }

    /// The layers.
    pub(super) fn model(&self, isa: Option<Isa>) -> Result<Model<'_>, CommandError> {
        let tensor = |name: &str| match self.tensors.get(name) {
            Some(tensor) => Ok(Some(tensor.matrix().map_err(CpuError::from)?)),
            None => Ok(None),
        };
        Model::new(self.config.clone(), isa, tensor).map_err(|source| self.failed(source))
    }

    /// The head, without tokens that the tokenizer lacks or that a model with `embeddings` tokens cannot read as input.
    pub(super) fn sampled_head(&self, embeddings: usize) -> Result<Head<'_>, CommandError> {
        let head = self.head.head()?;
        Ok(head.with_vocab_size(self.tokenizer.tokens.min(embeddings).clamp(1, head.vocab_size() as usize))?)
    }

    /// Checks that the end-of-sequence tokens are in the vocabulary.
    pub(super) fn check_eos(&self, vocab_size: u32) -> Result<(), CommandError> {
        let Some(token) = self.config.eos.iter().find(|token| **token >= vocab_size) else { return Ok(()) };
        let message = line::unknown_token("eos_token_id", *token, vocab_size);
        Err(self.failed(match self.origin {
            Origin::Config => ModelError::Config(message),
            Origin::GenerationConfig => ModelError::GenerationConfig(message),
            Origin::Gguf => {
                let keys = "one of the keys tokenizer.ggml.eos_token_id, eot_token_id and eom_token_id";
                let reason = format!("names token {token}, but the vocabulary has size {vocab_size}");
                GgufError::Invalid { part: keys.into(), reason }.into()
            }
        }))
    }

    /// An error of the model with its path, and with the names of its tensors.
    pub(super) fn failed(&self, source: ModelError) -> CommandError {
        let name = |name: String| match self.origin {
            Origin::Gguf => gguf::gguf_name(&name).unwrap_or(name),
            _ => name,
        };
        let source = match source {
            ModelError::Missing(tensor) => ModelError::Missing(name(tensor)),
            ModelError::Shape { tensor, found, expected } => {
                ModelError::Shape { tensor: name(tensor), found, expected }
            }
            source => source,
        };
        CommandError::Model { folder: self.path.clone(), source }
    }
}
