//! Matrices in memory-mapped files.

use crate::input::npy::{self, NpyHeader};
use crate::input::safetensors::{Header, listing};
use crate::input::scales::{WeightFiles, WeightScales};
use crate::input::{LoadError, Problem};
use crate::output::line;
use flash_sampling::{DType, HeadError, Matrix};
use flash_sampling_models::gguf::{self, Gguf, GgufError};
use flash_sampling_models::quantization::SCALE_BLOCK;
use memmap2::Mmap;
use std::fs::File;
use std::ops::Range;
use std::path::{Path, PathBuf};
use std::sync::Arc;

/// `FILE[:TENSOR]` of the command line.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TensorPath {
    /// The file.
    pub file: PathBuf,
    /// The tensor's name in the file.
    pub tensor: Option<String>,
}

impl TensorPath {
    /// Splits at the last colon, unless the whole text is an existing file.
    pub fn parse(text: &str) -> Self {
        match text.rsplit_once(':') {
            Some((file, tensor)) if !file.is_empty() && !tensor.is_empty() && !Path::new(text).exists() => {
                TensorPath { file: file.into(), tensor: Some(tensor.into()) }
            }
            _ => TensorPath { file: text.into(), tensor: None },
        }
    }
}

/// The role of a tensor, which decides its possible shapes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Role {
    /// An LM head, `[vocab, hidden]`.
    Weight,
    /// Hidden states, `[rows, hidden]`, or `[hidden]` for one row.
    Hidden,
    /// The bias of an LM head, `[vocab]`.
    Bias,
    /// A matrix of a layer, or a vector as a single row.
    Layer,
}

impl Role {
    /// The shape as rows and columns.
    pub fn rows_cols(self, tensor: &str, shape: &[usize]) -> Result<(usize, usize), Problem> {
        let expected = match (self, shape) {
            (Role::Weight | Role::Hidden | Role::Layer, &[rows, cols]) if rows > 0 && cols > 0 => {
                return Ok((rows, cols));
            }
            (Role::Hidden | Role::Bias | Role::Layer, &[cols]) if cols > 0 => return Ok((1, cols)),
            (Role::Weight, _) => "[vocab, hidden], neither zero",
            (Role::Hidden, _) => "[rows, hidden] or [hidden], neither zero",
            (Role::Layer, _) => "[rows, cols] or [cols], neither zero",
            (Role::Bias, _) => "[vocab], not zero",
        };
        Err(Problem::Shape { tensor: line::name(tensor), found: shape.to_vec(), expected: expected.into() })
    }
}

/// A matrix in a mapped file.
#[derive(Clone, Debug)]
pub struct Tensor {
    map: Arc<Mmap>,
    range: Range<usize>,
    dtype: DType,
    rows: usize,
    cols: usize,
    /// Scales of 8-bit elements.
    scales: Option<Arc<WeightScales>>,
}

/// A safetensors file without the other files of its folder.
struct SafetensorsFile<'p> {
    path: &'p Path,
    map: Arc<Mmap>,
    header: Header,
}

impl WeightFiles for SafetensorsFile<'_> {
    fn place(&self) -> &Path {
        self.path
    }

    fn has(&self, name: &str) -> bool {
        self.header.has(name)
    }

    fn scale_block(&self) -> Result<[usize; 2], LoadError> {
        Ok(SCALE_BLOCK)
    }

    fn in_file<R>(
        &self,
        _: &str,
        work: impl FnOnce(&Arc<Mmap>, &Header) -> Result<R, Problem>,
    ) -> Result<R, LoadError> {
        work(&self.map, &self.header).map_err(|problem| problem.at(self.path))
    }
}

/// Maps a file into memory.
pub fn map(path: &Path) -> Result<Mmap, LoadError> {
    let map = || {
        let file = File::open(path)?;
        if file.metadata()?.is_dir() {
            return Err(std::io::ErrorKind::IsADirectory.into());
        }
        // SAFETY: the map is read-only and private to this process, and every bit pattern is a valid byte. If another
        // process truncates the file, a signal ends this process; if it rewrites the file, the floats change.
        unsafe { Mmap::map(&file) }
    };
    map().map_err(|error| Problem::from(error).at(path))
}

impl Tensor {
    /// The matrix of a safetensors, GGUF or `.npy` file. Its values are not read yet. Without a name, the weight in a GGUF
    /// file is the model's head.
    ///
    /// # Errors
    /// An invalid file, or a tensor that does not fit the role.
    pub fn open(path: &TensorPath, role: Role) -> Result<Self, LoadError> {
        let map = Arc::new(map(&path.file)?);
        let is_npy = map.starts_with(npy::MAGIC) || path.file.extension().is_some_and(|e| e == "npy");
        let name = path.tensor.as_deref();
        let is_gguf = map.starts_with(gguf::MAGIC) || path.file.extension().is_some_and(|e| e == "gguf");
        let at_path = |problem: Problem| problem.at(&path.file);
        if is_npy {
            return Tensor::from_npy(&map, name, role).map_err(at_path);
        }
        if is_gguf {
            let tensor = Gguf::parse(&map).map_err(Problem::from);
            return tensor.and_then(|file| Tensor::in_gguf(&map, &file, name, role)).map_err(at_path);
        }
        let header = Header::parse(&map).map_err(at_path)?;
        let name = name.map_or_else(|| header.only(), |name| Ok(name.into())).map_err(at_path)?;
        Tensor::of_files(&SafetensorsFile { path: &path.file, map, header }, &name, role)
    }

    /// The tensor `name` of safetensors files, with its scales.
    ///
    /// # Errors
    /// An invalid file, or a tensor that does not fit the role. Only weights and layers may have 8 bits.
    pub fn of_files(files: &impl WeightFiles, name: &str, role: Role) -> Result<Self, LoadError> {
        let mut tensor = files.in_file(name, |map, header| {
            let found = header.locate(name)?;
            Tensor::new(map, (found.dtype, found.range), name, &found.shape, role)
        })?;
        if tensor.dtype.is_scaled() {
            tensor.scales = Some(Arc::new(WeightScales::read(files, name, [tensor.rows, tensor.cols])?));
        }
        Ok(tensor)
    }

    /// The tensor `name` in a part of a map. Only weights and layers may have other types than floats.
    fn new(
        map: &Arc<Mmap>,
        (dtype, range): (DType, Range<usize>),
        name: &str,
        shape: &[usize],
        role: Role,
    ) -> Result<Self, Problem> {
        if matches!(role, Role::Hidden | Role::Bias) && !dtype.is_float() {
            let (tensor, found) = (line::name(name), dtype.name().into());
            return Err(Problem::DType { tensor, found, expected: "bf16, f16 or f32" });
        }
        let (rows, cols) = role.rows_cols(name, shape)?;
        Ok(Tensor { map: Arc::clone(map), range, dtype, rows, cols, scales: None })
    }

    /// The tensor `name` of a GGUF file. Without a name, the model's head for a weight, or the only tensor.
    ///
    /// # Errors
    /// A missing tensor, or a tensor that does not fit the role. Only weights and layers may have blocks.
    pub fn in_gguf(map: &Arc<Mmap>, file: &Gguf<'_>, name: Option<&str>, role: Role) -> Result<Self, Problem> {
        let head = file.head_name().ok().filter(|_| role == Role::Weight);
        let only = || file.names().next().filter(|_| file.names().count() == 1);
        let tensors = || listing(&file.names().collect::<Vec<_>>());
        let name = name
            .or(head)
            .or_else(only)
            .ok_or_else(|| Problem::Unusable(format!("which tensor? Name one as FILE:TENSOR; it has {}", tensors())))?;
        let found = file.tensor(name).map_err(|error| match error {
            GgufError::MissingTensor(_) => Problem::Unusable(format!("no tensor {name:?}; it has {}", tensors())),
            error => error.into(),
        })?;
        Tensor::new(map, (found.dtype, found.range), name, &found.shape, role)
    }

    /// The array of a `.npy` file.
    ///
    /// # Errors
    /// An invalid file, or an array that does not fit the role.
    pub fn from_npy(map: &Arc<Mmap>, name: Option<&str>, role: Role) -> Result<Self, Problem> {
        let header = NpyHeader::parse(map)?;
        if let Some(name) = name {
            return Err(Problem::Unusable(format!("no tensor {name:?}; it has one array without a name")));
        }
        let types = [("<f4", 4, DType::F32), ("<f2", 2, DType::F16)];
        let (dtype, bytes) = header.data_as(map, &types, "little-endian float32 (<f4) or float16 (<f2)")?;
        let range = header.data..header.data + bytes.len();
        Tensor::new(map, (dtype, range), "the array", &header.shape, role)
    }

    /// A matrix `[rows, cols]` at the start of a map.
    ///
    /// # Errors
    /// [`HeadError::Length`] or [`HeadError::Shape`] if the map is too short.
    pub fn from_map(map: Mmap, dtype: DType, rows: usize, cols: usize) -> Result<Self, HeadError> {
        let length = Matrix::from_bytes(&map, dtype, rows, cols, cols)?.bytes().len();
        Ok(Tensor { map: Arc::new(map), range: 0..length, dtype, rows, cols, scales: None })
    }

    /// The matrix.
    pub fn matrix(&self) -> Result<Matrix<'_>, HeadError> {
        let matrix = Matrix::from_bytes(&self.map[self.range.clone()], self.dtype, self.rows, self.cols, self.cols)?;
        match &self.scales {
            Some(scales) => matrix.with_scales(&scales.values, scales.block),
            None => Ok(matrix),
        }
    }

    /// Number of rows.
    pub fn rows(&self) -> usize {
        self.rows
    }

    /// Number of columns.
    pub fn cols(&self) -> usize {
        self.cols
    }

    /// Element type.
    pub fn dtype(&self) -> DType {
        self.dtype
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_last_colon_separates_the_tensor() {
        let split = |text: &str| {
            let path = TensorPath::parse(text);
            (path.file.to_string_lossy().into_owned(), path.tensor)
        };
        assert_eq!(split("a.safetensors"), ("a.safetensors".into(), None));
        assert_eq!(split("a.safetensors:lm_head.weight"), ("a.safetensors".into(), Some("lm_head.weight".into())));
        assert_eq!(split("d:a.npy:x"), ("d:a.npy".into(), Some("x".into())));
        assert_eq!(split("a:"), ("a:".into(), None));
    }

    #[test]
    fn shapes_follow_the_role() {
        assert_eq!(Role::Weight.rows_cols("w", &[3, 4]).unwrap(), (3, 4));
        assert_eq!(Role::Hidden.rows_cols("h", &[4]).unwrap(), (1, 4));
        for (role, shape) in [
            (Role::Weight, &[4][..]),
            (Role::Weight, &[0, 4]),
            (Role::Weight, &[1, 2, 3]),
            (Role::Hidden, &[0, 4]),
            (Role::Hidden, &[]),
            (Role::Bias, &[4, 1]),
        ] {
            assert!(role.rows_cols("t", shape).is_err(), "{role:?} {shape:?}");
        }
    }
}
