//! Text to tokens and back.

use crate::error::CommandError;
use crate::input::Problem;
use crate::input::checkpoint_files::CheckpointFiles;
use crate::input::gguf::{self, GgufTokenizer};
use flash_sampling_models::ModelConfig;
use flash_sampling_models::gguf::{Gguf, GgufError};
use std::path::{Path, PathBuf};
use tokenizers::Tokenizer;

#[derive(Debug)]
pub(super) struct TextTokenizer {
    tokenizer: Tokenizer,
    path: PathBuf,
    /// One more than its largest token in use. Later rows of the head are padding.
    pub(super) tokens: usize,
}

impl TextTokenizer {
    /// `tokenizer.json`.
    pub(super) fn of_files(files: &CheckpointFiles) -> Result<Self, CommandError> {
        let (path, bytes) = (files.path("tokenizer.json"), files.required("tokenizer.json")?);
        let tokenizer = Tokenizer::from_bytes(&bytes).map_err(|error| invalid(&error).at(&path))?;
        let tokens = tokenizer.get_vocab(true).into_values().max().map_or(0, |token| token as usize + 1);
        tracing::debug!("the tokenizer has {tokens} tokens");
        Ok(TextTokenizer { tokenizer, path, tokens })
    }

    /// The tokenizer in the metadata.
    pub(super) fn of_gguf(path: &Path, file: &Gguf<'_>) -> Result<Self, GgufError> {
        let GgufTokenizer { tokenizer, tokens } = gguf::tokenizer(file)?;
        tracing::debug!("the tokenizer has {tokens} tokens");
        Ok(TextTokenizer { tokenizer, path: path.into(), tokens })
    }

    fn failed(&self, error: tokenizers::Error) -> CommandError {
        invalid(&error).at(&self.path).into()
    }

    /// The tokens of a prompt, with the tokenizer's prefix. An empty prompt is the beginning-of-sequence token.
    pub(super) fn encode(&self, prompt: &str, config: &ModelConfig) -> Result<Vec<u32>, CommandError> {
        let encoding = self.tokenizer.encode(prompt, true).map_err(|error| self.failed(error))?;
        match (encoding.get_ids(), config.bos.or(config.eos.first().copied())) {
            ([], Some(begin)) => Ok(vec![begin]),
            ([], None) => Err(CommandError::usage("the model has no beginning-of-sequence token: give a --prompt")),
            (ids, _) => Ok(ids.to_vec()),
        }
    }

    /// The text of tokens, without special tokens.
    pub(super) fn decode(&self, tokens: &[u32]) -> Result<String, CommandError> {
        self.tokenizer.decode(tokens, true).map_err(|error| self.failed(error))
    }

    /// Whether two tokenizers have the same tokens.
    pub(super) fn has_tokens_of(&self, other: &TextTokenizer) -> bool {
        self.tokenizer.get_vocab(true) == other.tokenizer.get_vocab(true)
    }

    /// The text that a token adds after other tokens. Special tokens are written by name.
    pub(super) fn piece(&self, before: &[u32], token: u32) -> Result<String, CommandError> {
        let decode = |tokens: &[u32]| self.tokenizer.decode(tokens, false).map_err(|error| self.failed(error));
        // A character has at most four bytes, so at most four tokens.
        let context = &before[before.len().saturating_sub(4)..];
        match decode(&[context, &[token]].concat())?.strip_prefix(&decode(context)?) {
            Some(piece) => Ok(piece.into()),
            None => decode(&[token]),
        }
    }
}

fn invalid(error: &tokenizers::Error) -> Problem {
    Problem::Format { format: "tokenizer", reason: error.to_string() }
}
