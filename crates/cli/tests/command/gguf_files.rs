//! GGUF files, built or changed by the tests.

use crate::common::checkpoint;
use flash_sampling::{DType, Matrix};
use flash_sampling_models::gguf::{Gguf, Value};

/// ggml's numbers of types.
pub(crate) const F32: u32 = 0;

/// A file of `tests/checkpoints/gguf`, which `tools/checkpoints/gguf_file.py` made.
pub(crate) fn fixture(name: &str) -> String {
    checkpoint(&format!("gguf/{name}"))
}

/// Keys and tensors in the order of the file.
#[derive(Clone, Debug, Default)]
pub(crate) struct GgufBuilder {
    keys: Vec<(String, Vec<u8>)>,
    tensors: Vec<BuiltTensor>,
}

#[derive(Clone, Debug)]
struct BuiltTensor {
    name: String,
    /// Slowest dimension first.
    shape: Vec<usize>,
    kind: u32,
    bytes: Vec<u8>,
}

fn string(text: &[u8]) -> Vec<u8> {
    [&(text.len() as u64).to_le_bytes()[..], text].concat()
}

/// The type of a value and its bytes, with the widest numbers.
fn encoded(value: Value<'_>) -> (u32, Vec<u8>) {
    match value {
        Value::Unsigned(n) => (10, n.to_le_bytes().to_vec()),
        Value::Signed(n) => (11, n.to_le_bytes().to_vec()),
        Value::Float(x) => (12, x.to_le_bytes().to_vec()),
        Value::Bool(value) => (7, vec![u8::from(value)]),
        Value::Text(text) => (8, string(text)),
        Value::Array(array) => {
            let elements: Vec<_> = array.iter().map(encoded).collect();
            let kind = elements.first().map_or(8, |(kind, _)| *kind);
            let head = [&kind.to_le_bytes()[..], &(elements.len() as u64).to_le_bytes()].concat();
            (9, elements.into_iter().fold(head, |bytes, (_, element)| [bytes, element].concat()))
        }
    }
}

/// An array of texts, as its bytes after the type.
fn texts<S: AsRef<str>>(texts: &[S]) -> Vec<u8> {
    let head = [&8u32.to_le_bytes()[..], &(texts.len() as u64).to_le_bytes()].concat();
    texts.iter().fold(head, |bytes, text| [bytes, string(text.as_ref().as_bytes())].concat())
}

fn kind_of(dtype: DType) -> u32 {
    match dtype {
        DType::F32 => F32,
        DType::F16 => 1,
        DType::BF16 => 30,
        DType::Q4_0 => 2,
        DType::Q8_0 => 8,
        DType::Q4_K => 12,
        DType::Q5_K => 13,
        DType::Q6_K => 14,
        DType::IQ4_NL => 20,
        DType::MXFP4 => 39,
        other => panic!("GGUF has no {other:?}"),
    }
}

impl GgufBuilder {
    /// The content of a file.
    pub(crate) fn of(bytes: &[u8]) -> Self {
        let file = Gguf::parse(bytes).unwrap();
        let mut built = GgufBuilder::default();
        for key in file.keys() {
            built = built.key(key, file.value(key).unwrap());
        }
        for name in file.names() {
            let tensor = file.tensor(name).unwrap();
            built = built.tensor(name, &tensor.shape, kind_of(tensor.dtype), file.bytes(&tensor).to_vec());
        }
        built
    }

    fn put(mut self, key: &str, kind: u32, bytes: Vec<u8>) -> Self {
        let value = [kind.to_le_bytes().to_vec(), bytes].concat();
        match self.keys.iter_mut().find(|(other, _)| other == key) {
            Some((_, old)) => *old = value,
            None => self.keys.push((key.into(), value)),
        }
        self
    }

    /// Sets a key.
    pub(crate) fn key(self, key: &str, value: Value<'_>) -> Self {
        let (kind, bytes) = encoded(value);
        self.put(key, kind, bytes)
    }

    pub(crate) fn uint(self, key: &str, n: u32) -> Self {
        self.put(key, 4, n.to_le_bytes().to_vec())
    }

    pub(crate) fn float(self, key: &str, x: f32) -> Self {
        self.put(key, 6, x.to_le_bytes().to_vec())
    }

    pub(crate) fn text(self, key: &str, text: &str) -> Self {
        self.key(key, Value::Text(text.as_bytes()))
    }

    pub(crate) fn texts<S: AsRef<str>>(self, key: &str, list: &[S]) -> Self {
        self.put(key, 9, texts(list))
    }

    pub(crate) fn ints(self, key: &str, list: &[i32]) -> Self {
        let head = [&5u32.to_le_bytes()[..], &(list.len() as u64).to_le_bytes()].concat();
        self.put(key, 9, list.iter().fold(head, |bytes, n| [bytes, n.to_le_bytes().to_vec()].concat()))
    }

    /// Removes a key or a tensor.
    pub(crate) fn without(mut self, name: &str) -> Self {
        self.keys.retain(|(key, _)| key != name);
        self.tensors.retain(|tensor| tensor.name != name);
        self
    }

    /// Sets a tensor.
    pub(crate) fn tensor(mut self, name: &str, shape: &[usize], kind: u32, bytes: Vec<u8>) -> Self {
        self.tensors.retain(|tensor| tensor.name != name);
        self.tensors.push(BuiltTensor { name: name.into(), shape: shape.to_vec(), kind, bytes });
        self
    }

    /// A tensor whose row i is the row `order(i)`.
    pub(crate) fn reordered(mut self, name: &str, order: impl Fn(usize) -> usize) -> Self {
        let tensor = self.tensors.iter_mut().find(|tensor| tensor.name == name).unwrap();
        let width = tensor.bytes.len() / tensor.shape[0];
        let rows = (0..tensor.shape[0]).map(|row| &tensor.bytes[order(row) * width..][..width]);
        tensor.bytes = rows.collect::<Vec<_>>().concat();
        self
    }

    /// All tensors in float32.
    pub(crate) fn expanded(&self) -> Self {
        let bytes = self.build();
        let file = Gguf::parse(&bytes).unwrap();
        let mut expanded = self.clone();
        for name in file.names() {
            let tensor = file.tensor(name).unwrap();
            let cols = *tensor.shape.last().unwrap();
            let rows = tensor.shape.iter().product::<usize>() / cols;
            let matrix = Matrix::from_bytes(file.bytes(&tensor), tensor.dtype, rows, cols, cols).unwrap();
            let (mut row, mut wide) = (vec![0.0; cols], Vec::new());
            for at in 0..rows {
                matrix.row_to_f32(at, &mut row);
                wide.extend(row.iter().flat_map(|x| x.to_le_bytes()));
            }
            expanded = expanded.tensor(name, &tensor.shape, F32, wide);
        }
        expanded
    }

    /// The file.
    pub(crate) fn build(&self) -> Vec<u8> {
        let counts = [self.tensors.len() as u64, self.keys.len() as u64].map(u64::to_le_bytes).concat();
        let mut bytes = [&b"GGUF\x03\0\0\0"[..], &counts].concat();
        for (key, value) in &self.keys {
            bytes.extend([string(key.as_bytes()), value.clone()].concat());
        }
        let mut data = Vec::new();
        for tensor in &self.tensors {
            bytes.extend([string(tensor.name.as_bytes()), (tensor.shape.len() as u32).to_le_bytes().to_vec()].concat());
            bytes.extend(tensor.shape.iter().rev().flat_map(|dim| (*dim as u64).to_le_bytes()));
            bytes.extend([&tensor.kind.to_le_bytes()[..], &(data.len() as u64).to_le_bytes()].concat());
            data.extend(&tensor.bytes);
            data.resize(data.len().next_multiple_of(32), 0);
        }
        bytes.resize(bytes.len().next_multiple_of(32), 0);
        bytes.extend(data);
        bytes
    }
}

/// Random bytes, by a linear congruential generator.
pub(crate) fn random_bytes(n: usize, seed: u64) -> Vec<u8> {
    let mut state = seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1;
    let mut next = || {
        state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (state >> 56) as u8
    };
    (0..n).map(|_| next()).collect()
}

/// A matrix `[rows, cols]` of type `dtype` with random codes. Scales give weights of about `size`.
pub(crate) fn random_matrix(dtype: DType, rows: usize, cols: usize, size: f32, seed: u64) -> (u32, Vec<u8>) {
    let count = rows * cols / dtype.block_elements();
    let mut bytes = random_bytes(count * dtype.block_bytes(), seed);
    let half = |x: f32| half::f16::from_f32(x).to_le_bytes();
    for (at, block) in bytes.chunks_exact_mut(dtype.block_bytes()).enumerate() {
        // A scale for each block, and the root mean square of the codes beside it.
        let size = size * (0.75 + (at % 7) as f32 / 12.0);
        match dtype {
            DType::F32 => block.copy_from_slice(&(size * f32::from(block[0] as i8) / 74.0).to_le_bytes()),
            DType::F16 => block.copy_from_slice(&half(size * f32::from(block[0] as i8) / 74.0)),
            DType::BF16 => {
                let wide = size * f32::from(block[0] as i8) / 74.0;
                block.copy_from_slice(&half::bf16::from_f32(wide).to_le_bytes());
            }
            DType::Q8_0 => block[..2].copy_from_slice(&half(size / 74.0)),
            DType::Q4_0 => block[..2].copy_from_slice(&half(size / 4.6)),
            DType::IQ4_NL => block[..2].copy_from_slice(&half(size / 65.0)),
            DType::MXFP4 => block[0] = (127.0 + (size / 2.9).log2().round()) as u8,
            DType::Q4_K | DType::Q5_K => {
                let middle = if dtype == DType::Q4_K { 7.5 } else { 15.5 };
                block[..2].copy_from_slice(&half(size / 37.0 / middle * 2.0));
                block[2..4].copy_from_slice(&half(size / 37.0 * 2.0));
            }
            DType::Q6_K => block[208..].copy_from_slice(&half(size / 1360.0)),
            other => panic!("GGUF has no {other:?}"),
        }
    }
    (kind_of(dtype), bytes)
}
