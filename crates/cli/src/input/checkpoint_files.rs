//! The files of a Hugging Face checkpoint: tensors by name, and small files.

use crate::input::bounded;
use crate::input::index::Index;
use crate::input::safetensors::Header;
use crate::input::tensor::{self, Role, Tensor};
use crate::input::{LoadError, Problem};
use memmap2::{Mmap, MmapMut};
use std::borrow::Cow;
use std::cell::RefCell;
use std::collections::BTreeMap;
use std::io::ErrorKind;
use std::path::{Path, PathBuf};
use std::sync::Arc;

/// A safetensors file, mapped.
#[derive(Debug)]
struct Shard {
    path: PathBuf,
    map: Arc<Mmap>,
    header: Header,
}

impl Shard {
    fn open(path: PathBuf) -> Result<Self, LoadError> {
        let map = tensor::map(&path)?;
        Shard::new(path, map)
    }

    fn new(path: PathBuf, map: Mmap) -> Result<Self, LoadError> {
        let header = Header::parse(&map).map_err(|problem| problem.at(&path))?;
        Ok(Shard { path, map: Arc::new(map), header })
    }

    fn tensor(&self, name: &str, role: Role) -> Result<Tensor, LoadError> {
        Tensor::located(&self.map, &self.header, Some(name), role).map_err(|problem| problem.at(&self.path))
    }
}

/// The tensors of a checkpoint.
#[derive(Debug)]
enum Tensors {
    Single(Shard),
    /// Shards with an index. A shard is opened when the first of its tensors is.
    Sharded {
        index: Index,
        open: RefCell<BTreeMap<String, Shard>>,
    },
}

/// A folder, or named files in memory.
#[derive(Debug)]
pub struct CheckpointFiles {
    folder: PathBuf,
    tensors: Tensors,
    /// Files in memory, of a checkpoint without a folder.
    texts: &'static [(&'static str, &'static [u8])],
}

impl CheckpointFiles {
    /// Opens a folder with `model.safetensors.index.json` or `model.safetensors`.
    ///
    /// # Errors
    /// The folder or both files are missing, or a file is invalid.
    pub fn open(folder: &Path) -> Result<Self, LoadError> {
        let refused = |reason: &str| Err(Problem::Checkpoint(reason.into()).at(folder));
        if !folder.is_dir() {
            return refused(if folder.exists() { "it is not a directory" } else { "there is no such directory" });
        }
        let index = folder.join("model.safetensors.index.json");
        let tensors = if let Some(bytes) = read_if_there(&index)? {
            let index = Index::parse(&bytes).map_err(|problem| problem.at(&index))?;
            Tensors::Sharded { index, open: RefCell::default() }
        } else {
            let path = folder.join("model.safetensors");
            if !path.exists() {
                return refused("the directory has neither model.safetensors nor model.safetensors.index.json");
            }
            Tensors::Single(Shard::open(path)?)
        };
        Ok(CheckpointFiles { folder: folder.into(), tensors, texts: &[] })
    }

    /// Files in memory: `name` is the folder in messages, `tensors` is a safetensors file.
    ///
    /// # Errors
    /// As [`CheckpointFiles::open`].
    pub fn in_memory(
        name: &str,
        tensors: &[u8],
        texts: &'static [(&'static str, &'static [u8])],
    ) -> Result<Self, LoadError> {
        let folder = PathBuf::from(name);
        let copy = || {
            let mut map = MmapMut::map_anon(tensors.len())?;
            map.copy_from_slice(tensors);
            map.make_read_only()
        };
        let map = copy().map_err(|error| Problem::from(error).at(&folder))?;
        let tensors = Tensors::Single(Shard::new(folder.join("model.safetensors"), map)?);
        Ok(CheckpointFiles { folder, tensors, texts })
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
    ///
    /// # Errors
    /// The file cannot be read.
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
        let missing = || Problem::Checkpoint("there is no such file".into()).at(&self.path(name));
        self.text(name)?.ok_or_else(missing)
    }

    /// Whether there is a tensor of this name.
    pub fn contains(&self, name: &str) -> bool {
        match &self.tensors {
            Tensors::Single(shard) => shard.header.contains(name),
            Tensors::Sharded { index, .. } => index.file(name).is_some(),
        }
    }

    /// The names of all tensors.
    pub fn names(&self) -> Vec<String> {
        match &self.tensors {
            Tensors::Single(shard) => shard.header.names(),
            Tensors::Sharded { index, .. } => index.names(),
        }
    }

    /// The tensor of a name.
    ///
    /// # Errors
    /// An invalid file, or a tensor that does not fit the role.
    pub fn tensor(&self, name: &str, role: Role) -> Result<Tensor, LoadError> {
        match &self.tensors {
            Tensors::Single(shard) => shard.tensor(name, role),
            Tensors::Sharded { index, open } => {
                let file = index.file(name).unwrap_or_default();
                let mut open = open.borrow_mut();
                if !open.contains_key(file) {
                    open.insert(file.into(), Shard::open(self.path(file))?);
                }
                open[file].tensor(name, role)
            }
        }
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
