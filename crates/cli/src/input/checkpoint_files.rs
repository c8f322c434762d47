//! The files of a Hugging Face checkpoint: tensors by name, and small files.

use crate::input::bounded;
use crate::input::safetensors::Header;
use crate::input::scales::WeightFiles;
use crate::input::tensor::{self, Role, Tensor};
use crate::input::{LoadError, Problem};
use crate::output::line;
use flash_sampling_models::Quantization;
use flash_sampling_models::quantization::SCALE_BLOCK;
use memmap2::{Mmap, MmapMut};
use std::borrow::Cow;
use std::cell::{OnceCell, RefCell};
use std::collections::BTreeMap;
use std::io::ErrorKind;
use std::path::{Component, Path, PathBuf};
use std::sync::Arc;

/// The index of a checkpoint in several files.
const INDEX: &str = "model.safetensors.index.json";
/// The file of a checkpoint without an index.
const SINGLE: &str = "model.safetensors";

/// The file of each tensor.
pub type Index = BTreeMap<String, String>;

/// A safetensors file, mapped.
#[derive(Debug)]
struct Shard {
    map: Arc<Mmap>,
    header: Header,
}

impl Shard {
    fn new(path: &Path, map: Mmap) -> Result<Self, LoadError> {
        let header = Header::parse(&map).map_err(|problem| problem.at(path))?;
        Ok(Shard { map: Arc::new(map), header })
    }
}

/// A folder, or named files in memory.
#[derive(Debug)]
pub struct CheckpointFiles {
    folder: PathBuf,
    index: Index,
    /// Open files by name. The first read of a tensor in a file opens it.
    shards: RefCell<BTreeMap<String, Shard>>,
    /// Files in memory, of a checkpoint without a folder.
    texts: &'static [(&'static str, &'static [u8])],
    /// Rows and columns of the block of a scale, after the first read of the configuration.
    scale_block: OnceCell<[usize; 2]>,
}

impl CheckpointFiles {
    /// Opens a folder with `model.safetensors.index.json` or `model.safetensors`.
    ///
    /// # Errors
    /// The folder or both files are missing, or a file is invalid.
    pub fn open(folder: &Path) -> Result<Self, LoadError> {
        let refused = |reason: &str| Err(Problem::Unusable(reason.into()).at(folder));
        if !folder.is_dir() {
            let missing = "there is no such directory or GGUF file";
            return refused(if folder.exists() { "it is not a directory" } else { missing });
        }
        let (index, single) = (folder.join(INDEX), folder.join(SINGLE));
        if let Some(bytes) = read_if_there(&index)? {
            let index = parse_index(&bytes).map_err(|problem| problem.at(&index))?;
            return Ok(CheckpointFiles::with(folder, index, RefCell::default(), &[]));
        }
        if !single.exists() {
            return refused("the directory has neither model.safetensors nor model.safetensors.index.json");
        }
        Ok(CheckpointFiles::of_one(folder, Shard::new(&single, tensor::map(&single)?)?, &[]))
    }

    /// Files in memory: `name` is the folder in messages, `tensors` is a safetensors file.
    pub fn in_memory(
        name: &str,
        tensors: &[u8],
        texts: &'static [(&'static str, &'static [u8])],
    ) -> Result<Self, LoadError> {
        let folder = Path::new(name);
        let copy = || {
            let mut map = MmapMut::map_anon(tensors.len())?;
            map.copy_from_slice(tensors);
            map.make_read_only()
        };
        let map = copy().map_err(|error| Problem::from(error).at(folder))?;
        Ok(CheckpointFiles::of_one(folder, Shard::new(&folder.join(SINGLE), map)?, texts))
    }

    fn of_one(folder: &Path, shard: Shard, texts: &'static [(&'static str, &'static [u8])]) -> Self {
        let index = shard.header.names().into_iter().map(|name| (name, SINGLE.into())).collect();
        let shards = RefCell::new(BTreeMap::from([(SINGLE.into(), shard)]));
        CheckpointFiles::with(folder, index, shards, texts)
    }

    fn with(
        folder: &Path,
        index: Index,
        shards: RefCell<BTreeMap<String, Shard>>,
        texts: &'static [(&'static str, &'static [u8])],
    ) -> Self {
        CheckpointFiles { folder: folder.into(), index, shards, texts, scale_block: OnceCell::new() }
    }

    /// The folder.
    pub fn folder(&self) -> &Path {
        &self.folder
    }

    /// The path of a file of this name.
    pub fn path(&self, name: &str) -> PathBuf {
        self.folder.join(name)
    }

    /// A small file's bytes; `None` without such a file.
    pub fn text(&self, name: &str) -> Result<Option<Cow<'static, [u8]>>, LoadError> {
        if self.texts.is_empty() {
            return Ok(read_if_there(&self.path(name))?.map(Cow::Owned));
        }
        Ok(self.texts.iter().find(|(text, _)| *text == name).map(|(_, bytes)| Cow::Borrowed(*bytes)))
    }

    /// The bytes of a small file that must exist.
    ///
    /// # Errors
    /// The file is missing or cannot be read.
    pub fn required(&self, name: &str) -> Result<Cow<'static, [u8]>, LoadError> {
        let missing = || Problem::Unusable("there is no such file".into()).at(&self.path(name));
        self.text(name)?.ok_or_else(missing)
    }

    /// The file of each tensor.
    pub fn index(&self) -> &Index {
        &self.index
    }

    /// The tensor of a name, with its scales in any of the files.
    ///
    /// # Errors
    /// An invalid file, or a tensor that does not fit the role.
    pub fn tensor(&self, name: &str, role: Role) -> Result<Tensor, LoadError> {
        Tensor::of_files(self, name, role)
    }
}

impl WeightFiles for CheckpointFiles {
    fn place(&self) -> &Path {
        &self.folder
    }

    fn has(&self, name: &str) -> bool {
        self.index.contains_key(name)
    }

    fn scale_block(&self) -> Result<[usize; 2], LoadError> {
        if let Some(block) = self.scale_block.get() {
            return Ok(*block);
        }
        let config = self.text("config.json")?.map(|bytes| Quantization::parse(&bytes)).transpose();
        let config = config.map_err(|error| Problem::Unusable(error.to_string()).at(&self.folder))?;
        let block = config.flatten().and_then(|quantization| quantization.scale_block).unwrap_or(SCALE_BLOCK);
        Ok(*self.scale_block.get_or_init(|| block))
    }

    fn in_file<R>(
        &self,
        name: &str,
        work: impl FnOnce(&Arc<Mmap>, &Header) -> Result<R, Problem>,
    ) -> Result<R, LoadError> {
        let file = self.index.get(name).map(String::as_str).unwrap_or_default();
        let (path, mut shards) = (self.path(file), self.shards.borrow_mut());
        if !shards.contains_key(file) {
            shards.insert(file.into(), Shard::new(&path, tensor::map(&path)?)?);
        }
        let Shard { map, header } = &shards[file];
        work(map, header).map_err(|problem| problem.at(&path))
    }
}

/// Parses `model.safetensors.index.json`.
///
/// # Errors
/// [`Problem::Format`]: not an index, or a file outside of its folder.
pub fn parse_index(bytes: &[u8]) -> Result<Index, Problem> {
    #[derive(serde::Deserialize)]
    struct Json {
        weight_map: Index,
    }
    let invalid = |reason| Problem::Format { format: "safetensors index", reason };
    let json: Json = serde_json::from_slice(bytes).map_err(|error| invalid(error.to_string()))?;
    // `components` drops parts of `a/` and `a/.`, so the name must equal the whole text.
    let is_name = |file: &str| matches!(Path::new(file).components().collect::<Vec<_>>()[..], [Component::Normal(name)] if name == file);
    match json.weight_map.values().find(|file| !is_name(file)) {
        Some(file) => Err(invalid(format!("{:?} is not the name of a file in the same folder", line::name(file)))),
        None => Ok(json.weight_map),
    }
}

/// A small file's bytes; `None` without such a file.
fn read_if_there(path: &Path) -> Result<Option<Vec<u8>>, LoadError> {
    let limit = if path.ends_with("tokenizer.json") { bounded::TOKENIZER } else { bounded::PARAMETERS };
    match bounded::read(path, limit) {
        Ok(bytes) => Ok(Some(bytes)),
        Err(Problem::Io(error)) if error.kind() == ErrorKind::NotFound => Ok(None),
        Err(problem) => Err(problem.at(path)),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_index_stays_in_its_folder() {
        let index = parse_index(br#"{"metadata": {}, "weight_map": {"a": "x.safetensors"}}"#).unwrap();
        assert_eq!(index, Index::from([("a".into(), "x.safetensors".into())]));
        for file in ["../x", "/etc/x", "a/b", "a/", "a/.", "./a", "", "..", "."] {
            let text = format!(r#"{{"weight_map": {{"a": "{file}"}}}}"#);
            assert!(parse_index(text.as_bytes()).is_err(), "{file}");
        }
        assert!(parse_index(b"{}").is_err());
    }
}
