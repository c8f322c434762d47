//! A checkpoint, or the built-in model: weights, head, tokenizer.

use crate::args::HeadArgs;
use crate::error::CommandError;
use crate::interrupt::Interrupt;
use crate::load::checkpoint::Checkpoint;
use crate::load::files::Files;
use crate::load::tensor::{Role, Tensor};
use crate::load::{LoadError, Problem};
use crate::loaded_head::LoadedHead;
use crate::progress;
use crate::sampler::beyond;
use flash_sampling::{CpuError, Head, Isa};
use flash_sampling_models::{Model, ModelConfig, ModelError};
use std::collections::HashMap;
use std::path::{Path, PathBuf};
use tokenizers::Tokenizer;

macro_rules! stories {
    ($name:literal) => {
        include_bytes!(concat!(env!("CARGO_MANIFEST_DIR"), "/models/stories/", $name))
    };
}

/// The built-in model's name, in place of a folder.
const BUILT_IN: &str = "models/stories (built in)";

fn built_in() -> Result<Files, LoadError> {
    let texts: &'static [(&'static str, &'static [u8])] = &[
        ("config.json", stories!("config.json")),
        ("generation_config.json", stories!("generation_config.json")),
        ("tokenizer.json", stories!("tokenizer.json")),
    ];
    Files::in_memory(BUILT_IN, stories!("model.safetensors"), texts)
}

/// All tensors of a checkpoint, mapped.
#[derive(Debug)]
pub(super) struct Weights {
    files: Files,
    config: ModelConfig,
    /// Whether the tokens that end a sequence are those of `generation_config.json`.
    has_generation_eos: bool,
    tensors: HashMap<String, Tensor>,
    head: LoadedHead,
}

impl Weights {
    /// Opens a folder; without one, the built-in model.
    pub(super) fn open(folder: Option<&Path>) -> Result<Self, CommandError> {
        let files = folder.map_or_else(built_in, Files::open)?;
        let failed = |source| CommandError::Model { folder: files.folder().into(), source };
        let missing = || failed(ModelError::Config("it is not there".into()));
        let mut config = ModelConfig::parse(&files.text("config.json")?.ok_or_else(missing)?).map_err(failed)?;
        let eos = config.eos.clone();
        if let Some(bytes) = files.text("generation_config.json")? {
            config = config.with_generation_config(&bytes).map_err(failed)?;
        }
        let has_generation_eos = config.eos != eos;
        let head = LoadedHead::of_checkpoint(Checkpoint::of(&files)?, &HeadArgs::default())?;
        let mut tensors = HashMap::new();
        for name in files.names() {
            if name.starts_with("model.") && (name.ends_with(".weight") || name.ends_with(".bias")) {
                let tensor = files.tensor(&name, Role::Layer)?;
                tensors.insert(name, tensor);
            }
        }
        tracing::debug!("{config:?}");
        Ok(Weights { files, config, has_generation_eos, tensors, head })
    }

    /// Reads all pages once, so that the first tokens do not wait for the disk.
    pub(super) fn read(&self, interrupt: &Interrupt) -> Result<(), CommandError> {
        let all = || self.tensors.values().chain([&self.head.weight]).map(Tensor::bytes);
        let bar = progress::bar("loading", all().map(|bytes| bytes.len() as u64).sum());
        for part in all().flat_map(|bytes| bytes.chunks(1 << 22)) {
            interrupt.check()?;
            std::hint::black_box(part.iter().step_by(4096).fold(0u8, |sum, byte| sum ^ byte));
            bar.inc(part.len() as u64);
        }
        bar.finish_and_clear();
        Ok(())
    }

    /// The layers.
    pub(super) fn model(&self, isa: Option<Isa>) -> Result<Model<'_>, CommandError> {
        let tensor = |name: &str| match self.tensors.get(name) {
            Some(tensor) => Ok(Some(tensor.matrix().map_err(CpuError::from)?)),
            None => Ok(None),
        };
        Model::new(self.config.clone(), isa, tensor).map_err(|source| self.failed(source))
    }

    /// The head, without what the tokenizer does not know, and what a model of `embeddings` tokens could not read again.
    pub(super) fn head(&self, language: &Language, embeddings: usize) -> Result<Head<'_>, CommandError> {
        let head = self.head.head()?;
        Ok(head.with_vocab_size(language.tokens.min(embeddings).clamp(1, head.vocab_size() as usize))?)
    }

    /// Checks that the tokens that end a sequence are among those that can be drawn.
    pub(super) fn check_eos(&self, vocab_size: u32) -> Result<(), CommandError> {
        let Some(token) = self.config.eos.iter().find(|token| **token >= vocab_size) else { return Ok(()) };
        let message = beyond("eos_token_id", *token, vocab_size);
        let is_of = if self.has_generation_eos { ModelError::GenerationConfig } else { ModelError::Config };
        Err(self.failed(is_of(message)))
    }

    /// An error of the model, with its folder.
    pub(super) fn failed(&self, source: ModelError) -> CommandError {
        CommandError::Model { folder: self.files.folder().into(), source }
    }
}

/// A tokenizer.
#[derive(Debug)]
pub(super) struct Language {
    tokenizer: Tokenizer,
    path: PathBuf,
    /// One more than its largest token: what lies beyond it in the head is padding, and is not drawn.
    pub(super) tokens: usize,
}

impl Language {
    pub(super) fn open(weights: &Weights) -> Result<Self, CommandError> {
        let path = weights.files.path("tokenizer.json");
        let missing = || Problem::Checkpoint("it is not there".into()).at(&path);
        let bytes = weights.files.text("tokenizer.json")?.ok_or_else(missing)?;
        let tokenizer = Tokenizer::from_bytes(&bytes).map_err(|error| invalid(&error).at(&path))?;
        let tokens = tokenizer.get_vocab(true).into_values().max().map_or(0, |token| token as usize + 1);
        tracing::debug!("the tokenizer knows {tokens} tokens");
        Ok(Language { tokenizer, path, tokens })
    }

    fn failed(&self, error: tokenizers::Error) -> CommandError {
        invalid(&error).at(&self.path).into()
    }

    /// The tokens of a prompt, with what the tokenizer puts before one; of no text the token that begins a sequence.
    pub(super) fn encode(&self, prompt: &str, config: &ModelConfig) -> Result<Vec<u32>, CommandError> {
        let encoding = self.tokenizer.encode(prompt, true).map_err(|error| self.failed(error))?;
        match (encoding.get_ids(), config.bos.or(config.eos.first().copied())) {
            ([], Some(begin)) => Ok(vec![begin]),
            ([], None) => Err(CommandError::usage("the model has no token that begins a sequence: give a --prompt")),
            (ids, _) => Ok(ids.to_vec()),
        }
    }

    /// The text of tokens, without special ones.
    pub(super) fn decode(&self, tokens: &[u32]) -> Result<String, CommandError> {
        self.tokenizer.decode(tokens, true).map_err(|error| self.failed(error))
    }

    /// Whether two tokenizers have the same tokens.
    pub(super) fn has_tokens_of(&self, other: &Language) -> bool {
        self.tokenizer.get_vocab(true) == other.tokenizer.get_vocab(true)
    }

    /// The text that a token adds after others. A special token has its name.
    pub(super) fn piece(&self, before: &[u32], token: u32) -> Result<String, CommandError> {
        let decode = |tokens: &[u32]| self.tokenizer.decode(tokens, false).map_err(|error| self.failed(error));
        // A character has at most four bytes, so as many tokens.
        let context = &before[before.len().saturating_sub(4)..];
        match decode(&[context, &[token]].concat())?.strip_prefix(&decode(context)?) {
            Some(piece) => Ok(piece.into()),
            None => decode(&[token]),
        }
    }
}

fn invalid(error: &tokenizers::Error) -> Problem {
    Problem::Format { format: "tokenizer.json", reason: error.to_string() }
}
