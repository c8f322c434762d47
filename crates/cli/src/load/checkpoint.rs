//! A Hugging Face checkpoint folder.

use crate::load::config::HeadConfig;
use crate::load::files::Files;
use crate::load::tensor::{Role, Tensor};
use crate::load::{LoadError, Problem};
use crate::output::line;
use std::collections::BTreeMap;
use std::path::{Component, Path};

/// Names of the head, in the order they are looked for.
const HEADS: [&str; 6] = [
    "lm_head.weight",
    "language_model.lm_head.weight",
    "model.lm_head.weight",
    "output.weight",
    "embed_out.weight",
    "transformer.output_layer.weight",
];
/// Names of the input embedding, in the order they are looked for.
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
    /// The name it goes by.
    pub name: &'static str,
    /// The head's bias, `[vocab]`.
    pub bias: Option<Tensor>,
    /// What `config.json` says; the default without one.
    pub config: HeadConfig,
}

/// Which file holds which tensor.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Index(BTreeMap<String, String>);

impl Index {
    /// Parses `model.safetensors.index.json`.
    ///
    /// # Errors
    /// [`Problem::Format`] when it is no such index, or names a file outside of its folder.
    pub fn parse(bytes: &[u8]) -> Result<Self, Problem> {
        #[derive(serde::Deserialize)]
        struct Json {
            weight_map: BTreeMap<String, String>,
        }
        let invalid = |reason| Problem::Format { format: "safetensors index", reason };
        let json: Json = serde_json::from_slice(bytes).map_err(|error| invalid(error.to_string()))?;
        // What a path leaves out, as in `a/` and `a/.`, is no part of a name.
        let is_name = |file: &str| matches!(Path::new(file).components().collect::<Vec<_>>()[..], [Component::Normal(name)] if name == file);
        match json.weight_map.values().find(|file| !is_name(file)) {
            Some(file) => Err(invalid(format!("{:?} is not the name of a file in the same folder", line::name(file)))),
            None => Ok(Index(json.weight_map)),
        }
    }

    /// The names of all tensors.
    pub fn names(&self) -> Vec<String> {
        self.0.keys().cloned().collect()
    }

    /// The file that holds a tensor.
    pub fn file(&self, tensor: &str) -> Option<&str> {
        self.0.get(tensor).map(String::as_str)
    }
}

impl Checkpoint {
    /// Finds the head of a checkpoint: `lm_head.weight` or one of its other names, or the input embedding where the two
    /// are tied. `config.json` decides that; without its word, the embedding stands in when there is no head.
    ///
    /// # Errors
    /// What is wrong with the folder or one of its files.
    pub fn open(folder: &Path) -> Result<Self, LoadError> {
        Checkpoint::of(&Files::open(folder)?)
    }

    /// [`Checkpoint::open`] for a folder whose files are open.
    ///
    /// # Errors
    /// The same.
    pub fn of(files: &Files) -> Result<Self, LoadError> {
        let config = match files.text("config.json")? {
            Some(bytes) => HeadConfig::parse(&bytes).map_err(|problem| problem.at(&files.path("config.json")))?,
            None => HeadConfig::default(),
        };
        let first = |names: &[&'static str]| names.iter().copied().find(|name| files.contains(name));
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
            Problem::MissingTensor {
                wanted: wanted.into(),
                found: "others (`sample` and `bench` take --weight FILE:TENSOR)".into(),
            }
            .at(files.folder())
        })?;
        let weight = files.tensor(name, Role::Weight)?;
        let bias = HEADS.iter().map(|head| head.replace(".weight", ".bias")).find(|bias| files.contains(bias));
        let bias = bias.map(|bias| files.tensor(&bias, Role::Bias)).transpose()?;
        Ok(Checkpoint { weight, name, bias, config })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_index_stays_in_its_folder() {
        let index = Index::parse(br#"{"metadata": {}, "weight_map": {"a": "x.safetensors"}}"#).unwrap();
        assert_eq!(index.file("a"), Some("x.safetensors"));
        assert_eq!(index.file("b"), None);
        for file in ["../x", "/etc/x", "a/b", "a/", "a/.", "./a", "", "..", "."] {
            let text = format!(r#"{{"weight_map": {{"a": "{file}"}}}}"#);
            assert!(Index::parse(text.as_bytes()).is_err(), "{file}");
        }
        assert!(Index::parse(b"{}").is_err());
    }
}
