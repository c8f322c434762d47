//! 8-bit weights with scales, and checkpoints of them, made by the tests.

use crate::common::{Files, bf16_bytes, checkpoint, f32_bytes};
use half::f16;
use safetensors::SafeTensors;
use safetensors::tensor::Dtype;
use serde_json::{Value, json};
use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

/// A tensor of a file: name, type, shape, bytes.
pub(crate) type Stored = (String, Dtype, Vec<usize>, Vec<u8>);

/// The value of an e4m3, by its definition.
fn e4m3(bits: u8) -> f32 {
    let (exponent, fraction) = (i32::from(bits >> 3 & 15), f32::from(bits & 7) / 8.0);
    let size = if exponent == 0 { fraction * 2f32.powi(-6) } else { (1.0 + fraction) * 2f32.powi(exponent - 7) };
    if bits > 127 { -size } else { size }
}

fn element(dtype: Dtype, code: u8) -> f32 {
    if dtype == Dtype::I8 { f32::from(code as i8) } else { e4m3(code) }
}

/// A weight of 8 bits.
#[derive(Clone, Debug)]
pub(crate) struct EightBits {
    pub(crate) dtype: Dtype,
    pub(crate) shape: [usize; 2],
    pub(crate) codes: Vec<u8>,
    /// Rows and columns of the block of a scale.
    pub(crate) block: [usize; 2],
    pub(crate) scales: Vec<f32>,
}

impl EightBits {
    /// The weight that is nearest to `values`, with scales that `scale_type` holds.
    pub(crate) fn nearest(
        values: &[f32],
        shape: [usize; 2],
        dtype: Dtype,
        block: [usize; 2],
        scale_type: Dtype,
    ) -> Self {
        let blocks = [shape[0].div_ceil(block[0]), shape[1].div_ceil(block[1])];
        let mut weight = EightBits { dtype, shape, codes: Vec::new(), block, scales: vec![0.0; blocks[0] * blocks[1]] };
        for (at, value) in values.iter().enumerate() {
            let block = weight.block_of(at);
            weight.scales[block] = weight.scales[block].max(value.abs());
        }
        let most = if dtype == Dtype::I8 { 127.0 } else { 448.0 };
        for scale in &mut weight.scales {
            *scale = floats(&scale_bytes(scale_type, &[*scale / most]), scale_type)[0];
        }
        // No NaN: 0x7f and 0xff.
        let codes: Vec<u8> = (0..=255).filter(|code| dtype == Dtype::I8 || code & 0x7f != 0x7f).collect();
        let nearest = |wanted: f32| {
            let distance = |code: u8| (element(dtype, code) - wanted).abs();
            codes.iter().copied().min_by(|a, b| distance(*a).total_cmp(&distance(*b))).unwrap()
        };
        weight.codes =
            values.iter().enumerate().map(|(at, value)| nearest(value / weight.scales[weight.block_of(at)])).collect();
        weight
    }

    /// The block of the element `at`.
    fn block_of(&self, at: usize) -> usize {
        let ([_, cols], [rows, width]) = (self.shape, self.block);
        at / cols / rows * cols.div_ceil(width) + at % cols / width
    }

    /// The products, rounded to float32.
    pub(crate) fn expanded(&self) -> Vec<f32> {
        let scaled = |(at, code): (usize, &u8)| element(self.dtype, *code) * self.scales[self.block_of(at)];
        self.codes.iter().enumerate().map(scaled).collect()
    }

    /// The weight as a tensor.
    pub(crate) fn stored(&self, name: &str) -> Stored {
        (name.into(), self.dtype, self.shape.to_vec(), self.codes.clone())
    }
}

/// Scales as bytes of bf16, f16 or f32.
pub(crate) fn scale_bytes(dtype: Dtype, values: &[f32]) -> Vec<u8> {
    match dtype {
        Dtype::BF16 => bf16_bytes(values),
        Dtype::F16 => values.iter().flat_map(|x| f16::from_f32(*x).to_le_bytes()).collect(),
        Dtype::F32 => f32_bytes(values),
        other => panic!("no scales of {other:?}"),
    }
}

fn floats(bytes: &[u8], dtype: Dtype) -> Vec<f32> {
    let two = |bytes: &[u8]| [bytes[0], bytes[1]];
    match dtype {
        Dtype::BF16 => bytes.chunks(2).map(|x| half::bf16::from_le_bytes(two(x)).to_f32()).collect(),
        Dtype::F16 => bytes.chunks(2).map(|x| f16::from_le_bytes(two(x)).to_f32()).collect(),
        Dtype::F32 => bytes.chunks(4).map(|x| f32::from_le_bytes(x.try_into().unwrap())).collect(),
        other => panic!("no floats in {other:?}"),
    }
}

/// How a checkpoint stores its weights.
#[derive(Clone, Debug)]
pub(crate) struct Form {
    /// The folder of the original in `tests/checkpoints`.
    pub(crate) of: &'static str,
    pub(crate) dtype: Dtype,
    /// Rows and columns of the block of a scale; 0 for all.
    pub(crate) block: [usize; 2],
    pub(crate) suffix: &'static str,
    pub(crate) scale_type: Dtype,
    /// The number of dimensions of the scales.
    pub(crate) dimensions: usize,
    /// The value of `quantization_config`.
    pub(crate) config: Value,
}

impl Form {
    /// Writes the checkpoint to `files` in two shards, scales in the second, and its float32 expansion to `expanded`.
    pub(crate) fn write(&self, files: &Files, expanded: &Files) {
        let folder = PathBuf::from(checkpoint(self.of));
        let (mut weights, mut scales, mut wide) = (Vec::new(), Vec::new(), Vec::new());
        for (name, dtype, shape, bytes) in tensors(&folder) {
            let values = floats(&bytes, dtype);
            let [rows, cols] = match shape[..] {
                [rows, cols] => [rows, cols],
                _ => {
                    wide.push((name.clone(), Dtype::F32, shape.clone(), f32_bytes(&values)));
                    weights.push((name, dtype, shape, bytes));
                    continue;
                }
            };
            let whole = |size, all| if size == 0 { all } else { size };
            let block = [whole(self.block[0], rows), whole(self.block[1], cols)];
            let weight = EightBits::nearest(&values, [rows, cols], self.dtype, block, self.scale_type);
            let blocks = [rows.div_ceil(block[0]), cols.div_ceil(block[1])];
            let bytes = scale_bytes(self.scale_type, &weight.scales);
            scales.push((format!("{name}{}", self.suffix), self.scale_type, blocks[..self.dimensions].to_vec(), bytes));
            let input_scale = name.replace(".weight", ".input_scale");
            scales.push((input_scale, Dtype::F32, vec![], f32_bytes(&[0.25])));
            weights.push(weight.stored(&name));
            wide.push((name, Dtype::F32, shape, f32_bytes(&weight.expanded())));
        }
        write_shards(files, &[weights, scales]);
        write_shards(expanded, &[wide]);
        let mut config: Value = serde_json::from_slice(&std::fs::read(folder.join("config.json")).unwrap()).unwrap();
        expanded.bytes("config.json", config.to_string().as_bytes());
        config["quantization_config"] = self.config.clone();
        files.bytes("config.json", config.to_string().as_bytes());
        for files in [files, expanded] {
            std::fs::copy(folder.join("tokenizer.json"), files.path("tokenizer.json")).unwrap();
        }
    }
}

/// All tensors of a folder.
fn tensors(folder: &Path) -> Vec<Stored> {
    let files = std::fs::read_dir(folder).unwrap().map(|entry| entry.unwrap().path());
    let shards = files.filter(|path| path.extension().is_some_and(|end| end == "safetensors"));
    let read = |path| {
        let bytes = std::fs::read(path).unwrap();
        let stored = |(name, view): (String, safetensors::tensor::TensorView<'_>)| {
            (name, view.dtype(), view.shape().to_vec(), view.data().to_vec())
        };
        SafeTensors::deserialize(&bytes).unwrap().tensors().into_iter().map(stored).collect::<Vec<_>>()
    };
    shards.flat_map(read).collect()
}

/// Writes `0.safetensors` and so on, and their index.
pub(crate) fn write_shards(files: &Files, shards: &[Vec<Stored>]) {
    let mut index = BTreeMap::new();
    for (at, shard) in shards.iter().enumerate() {
        let file = format!("{at}.safetensors");
        write(files, &file, shard);
        index.extend(shard.iter().map(|(name, ..)| (name.clone(), file.clone())));
    }
    files.bytes("model.safetensors.index.json", json!({ "weight_map": index }).to_string().as_bytes());
}

/// Writes a safetensors file, and returns its path.
pub(crate) fn write(files: &Files, name: &str, tensors: &[Stored]) -> String {
    let tensors: Vec<_> =
        tensors.iter().map(|(name, dtype, shape, bytes)| (&name[..], *dtype, &shape[..], bytes.clone())).collect();
    files.safetensors(name, &tensors)
}
