//! The source of hidden states: candle-transformers' Qwen3, or this project's forward pass over a checkpoint.

use candle_core::{DType, Device, Error, Result, Tensor};
use candle_transformers::models::qwen3;
use flash_sampling::Matrix;
use flash_sampling_models::{Cache, Model, ModelConfig, Run};
use half::bf16;
use std::collections::HashMap;
use std::path::Path;

/// The layers of a model, with the keys and values of its sequences. A clone is independent.
#[derive(Clone)]
pub(crate) enum Layers<'m> {
    Candle(Box<qwen3::Model>),
    Ours(&'m Model<'m>, Vec<Cache>),
}

impl Layers<'_> {
    /// This number of empty sequences.
    pub(crate) fn begin(&self, sequences: usize) -> Self {
        match self {
            Layers::Candle(_) => self.clone(),
            Layers::Ours(model, _) => Layers::Ours(model, vec![Cache::new(model.config()); sequences]),
        }
    }

    /// Runs the next tokens of each sequence, `[sequences, length]`, after `position` earlier tokens. Returns the
    /// hidden states `[sequences, hidden]` after the last token of each.
    pub(crate) fn hidden(
        &mut self,
        tokens: &[u32],
        sequences: usize,
        position: usize,
        weight: &Tensor,
    ) -> Result<Tensor> {
        let length = tokens.len() / sequences;
        match self {
            Layers::Candle(model) => {
                let input = Tensor::from_slice(tokens, (sequences, length), weight.device())?;
                model.forward(&input, position)?.narrow(1, length - 1, 1)?.squeeze(1)
            }
            Layers::Ours(model, caches) => {
                let mut runs: Vec<_> = caches
                    .iter_mut()
                    .zip(tokens.chunks_exact(length))
                    .map(|(cache, tokens)| Run { cache, tokens })
                    .collect();
                let all = model.forward(&mut runs).map_err(Error::wrap)?;
                let width = model.config().hidden;
                let last = all.chunks_exact(width).skip(length - 1).step_by(length).flatten().copied().collect();
                Tensor::from_vec(last, (sequences, width), weight.device())?.to_dtype(weight.dtype())
            }
        }
    }
}

/// A checkpoint in one safetensors file: its configuration, and its tensors by name.
pub(crate) struct Checkpoint {
    config: ModelConfig,
    tensors: HashMap<String, (Vec<bf16>, [usize; 2])>,
}

impl Checkpoint {
    pub(crate) fn open(folder: &Path) -> Result<Self> {
        let config = ModelConfig::parse(&std::fs::read(folder.join("config.json"))?).map_err(Error::wrap)?;
        let mut tensors = HashMap::new();
        for (name, tensor) in candle_core::safetensors::load(folder.join("model.safetensors"), &Device::Cpu)? {
            let shape = if tensor.rank() == 1 { [1, tensor.dim(0)?] } else { tensor.dims2()?.into() };
            tensors.insert(name, (tensor.flatten_all()?.to_dtype(DType::BF16)?.to_vec1()?, shape));
        }
        Ok(Checkpoint { config, tensors })
    }

    /// Our model over these weights.
    pub(crate) fn model(&self) -> Result<Model<'_>> {
        let matrix = |name: &str| {
            self.tensors.get(name).and_then(|(values, [rows, cols])| Matrix::new(values.as_slice(), *rows, *cols).ok())
        };
        Model::new(self.config.clone(), None, |name| Ok(matrix(name))).map_err(Error::wrap)
    }

    /// The weight of the LM head `[vocab, hidden]`.
    pub(crate) fn head(&self, dtype: DType, device: &Device) -> Result<Tensor> {
        let stored = ["lm_head.weight", "model.embed_tokens.weight"].iter().find_map(|name| self.tensors.get(*name));
        let (values, [rows, cols]) = stored.ok_or_else(|| Error::Msg("the checkpoint has no embedding".into()))?;
        Tensor::from_slice(values, (*rows, *cols), device)?.to_dtype(dtype)
    }
}
