//! The LM head of a checkpoint: a folder in Hugging Face's layout, or a GGUF file.

use crate::input::checkpoint_files::CheckpointFiles;
use crate::input::config::HeadConfig;
use crate::input::gguf::GgufFile;
use crate::input::tensor::{Role, Tensor};
use crate::input::{LoadError, Problem};
use std::path::Path;

/// Names of the head, by priority.
const HEADS: [&str; 6] = [
    "lm_head.weight",
    "language_model.lm_head.weight",
    "model.lm_head.weight",
    "output.weight",
    "embed_out.weight",
    "transformer.output_layer.weight",
];
/// Names of the input embedding, by priority.
const EMBEDDINGS: [&str; 12] = [
    "model.embed_tokens.weight",
    "model.language_model.embed_tokens.weight",
    "language_model.model.embed_tokens.weight",
    "language_model.embed_tokens.weight",
    "embed_tokens.weight",
    "transformer.wte.weight",
    "wte.weight",
    "model.decoder.embed_tokens.weight",
    "transformer.word_embeddings.weight",
    "backbone.embeddings.weight",
    "model.tok_embeddings.weight",
    "tok_embeddings.weight",
];

/// The LM head of a checkpoint.
#[derive(Debug)]
pub struct Checkpoint {
    /// The head's weight, `[vocab, hidden]`.
    pub weight: Tensor,
    /// The name of that tensor.
    pub name: &'static str,
    /// The head's bias, `[vocab]`.
    pub bias: Option<Tensor>,
    /// The head's parameters in `config.json`, or in the keys of a GGUF file; the default without that file.
    pub config: HeadConfig,
    /// The place of the parameters in messages.
    pub origin: &'static str,
}

impl Checkpoint {
    /// Opens a checkpoint. In a folder, the head is `lm_head.weight` or one of its other names. If `tie_word_embeddings` of
    /// `config.json` is true, the head is the input embedding. Without that key, the embedding is the fallback.
    ///
    /// # Errors
    /// A missing or invalid file, or no head.
    pub fn open(path: &Path) -> Result<Self, LoadError> {
        if path.is_file() {
            let file = GgufFile::open(path)?;
            return file.head(&file.parse()?);
        }
        Checkpoint::of(&CheckpointFiles::open(path)?)
    }

    /// [`Checkpoint::open`] for files that are open.
    pub fn of(files: &CheckpointFiles) -> Result<Self, LoadError> {
        let config = match files.text("config.json")? {
            Some(bytes) => HeadConfig::parse(&bytes).map_err(|problem| problem.at(&files.path("config.json")))?,
            None => HeadConfig::default(),
        };
        let first = |names: &[&'static str]| names.iter().copied().find(|name| files.index().contains_key(*name));
        let name = match config.tied {
            Some(true) => first(&EMBEDDINGS).or_else(|| first(&HEADS)),
            Some(false) => first(&HEADS),
            None => first(&HEADS).or_else(|| first(&EMBEDDINGS)),
        };
        let name = name.ok_or_else(|| {
            let wanted = match config.tied {
                Some(false) => "lm_head.weight (config.json says that the embedding is not tied)",
                _ => "lm_head.weight, model.embed_tokens.weight or one of their other names",
            };
            Problem::Unusable(format!("no tensor {wanted}; it has others (`sample` takes --weight FILE:TENSOR)"))
                .at(files.folder())
        })?;
        let weight = files.tensor(name, Role::Weight)?;
        let bias =
            HEADS.iter().map(|head| head.replace(".weight", ".bias")).find(|bias| files.index().contains_key(bias));
        let bias = bias.map(|bias| files.tensor(&bias, Role::Bias)).transpose()?;
        Ok(Checkpoint { weight, name, bias, config, origin: "config.json" })
    }
}
