//! `model.safetensors.index.json`: the shard of each tensor.

use crate::input::Problem;
use crate::output::line;
use std::collections::BTreeMap;
use std::path::{Component, Path};

/// The shard of each tensor.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Index(BTreeMap<String, String>);

impl Index {
    /// Parses `model.safetensors.index.json`.
    ///
    /// # Errors
    /// [`Problem::Format`]: not an index, or a file outside of its folder.
    pub fn parse(bytes: &[u8]) -> Result<Self, Problem> {
        #[derive(serde::Deserialize)]
        struct Json {
            weight_map: BTreeMap<String, String>,
        }
        let invalid = |reason| Problem::Format { format: "safetensors index", reason };
        let json: Json = serde_json::from_slice(bytes).map_err(|error| invalid(error.to_string()))?;
        // `components` drops parts of `a/` and `a/.`, so the name must equal the whole text.
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

    /// The file of a tensor.
    pub fn file(&self, tensor: &str) -> Option<&str> {
        self.0.get(tensor).map(String::as_str)
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
