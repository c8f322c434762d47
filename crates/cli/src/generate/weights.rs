//! The tensors and configuration of a checkpoint, or of the built-in model.

use super::tokenizer::TextTokenizer;
use crate::args::HeadOverrides;
use crate::error::CommandError;
use crate::input::LoadError;
use crate::input::checkpoint::Checkpoint;
use crate::input::checkpoint_files::CheckpointFiles;
use crate::input::loaded_head::LoadedHead;
use crate::input::tensor::{Role, Tensor};
use crate::output::line;
use flash_sampling::{CpuError, Head, Isa};
use flash_sampling_models::{Model, ModelConfig, ModelError};
use std::collections::HashMap;
use std::path::Path;

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

/// All tensors of a checkpoint, mapped.
#[derive(Debug)]
pub(super) struct Weights {
    pub(super) files: CheckpointFiles,
    config: ModelConfig,
    /// Whether the end-of-sequence tokens are from `generation_config.json`.
    has_generation_eos: bool,
    tensors: HashMap<String, Tensor>,
    pub(super) head: LoadedHead,
}

impl Weights {
    /// Opens a folder, or the built-in model.
    pub(super) fn open(folder: Option<&Path>) -> Result<Self, CommandError> {
        let files = folder.map_or_else(built_in, CheckpointFiles::open)?;
        let failed = |source| CommandError::Model { folder: files.folder().into(), source };
        let mut config = ModelConfig::parse(&files.required("config.json")?).map_err(failed)?;
        let eos = config.eos.clone();
        if let Some(bytes) = files.text("generation_config.json")? {
            config = config.with_generation_config(&bytes).map_err(failed)?;
        }
        let has_generation_eos = config.eos != eos;
        let head = LoadedHead::of_checkpoint(Checkpoint::of(&files)?, HeadOverrides::default());
        let head = head.map_err(CommandError::Usage)?;
        let mut tensors = HashMap::new();
        for name in files.index().keys() {
            if name.starts_with("model.") && (name.ends_with(".weight") || name.ends_with(".bias")) {
                let tensor = files.tensor(name, Role::Layer)?;
                tensors.insert(name.clone(), tensor);
            }
        }
        tracing::debug!("{config:?}");
        Ok(Weights { files, config, has_generation_eos, tensors, head })
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
    pub(super) fn sampled_head(&self, tokenizer: &TextTokenizer, embeddings: usize) -> Result<Head<'_>, CommandError> {
        let head = self.head.head()?;
        Ok(head.with_vocab_size(tokenizer.tokens.min(embeddings).clamp(1, head.vocab_size() as usize))?)
    }

    /// Checks that the end-of-sequence tokens are in the vocabulary.
    pub(super) fn check_eos(&self, vocab_size: u32) -> Result<(), CommandError> {
        let Some(token) = self.config.eos.iter().find(|token| **token >= vocab_size) else { return Ok(()) };
        let message = line::unknown_token("eos_token_id", *token, vocab_size);
        let is_of = if self.has_generation_eos { ModelError::GenerationConfig } else { ModelError::Config };
        Err(self.failed(is_of(message)))
    }

    /// An error of the model with its folder.
    pub(super) fn failed(&self, source: ModelError) -> CommandError {
        CommandError::Model { folder: self.files.folder().into(), source }
    }
}
