//! The keys and values of a sequence, in every layer.

use crate::config::ModelConfig;

/// The keys and values of one sequence, in float32. A clone is independent.
#[derive(Clone, Debug)]
pub struct Cache {
    layers: Vec<KeyValues>,
    width: usize,
    len: usize,
}

/// Keys and values of one layer, `[tokens, kv_heads * head_dim]` each.
#[derive(Clone, Debug, Default)]
pub(crate) struct KeyValues {
    pub(crate) keys: Vec<f32>,
    pub(crate) values: Vec<f32>,
}

impl Cache {
    /// An empty sequence.
    pub fn new(config: &ModelConfig) -> Self {
        let layers = vec![KeyValues::default(); config.layers];
        Cache { layers, width: config.kv_heads * config.head_dim, len: 0 }
    }

    /// The number of tokens so far.
    pub fn len(&self) -> usize {
        self.len
    }

    /// Whether the sequence has no tokens.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// Drops all but the first `len` tokens.
    pub fn truncate(&mut self, len: usize) {
        self.len = self.len.min(len);
        let elements = self.len * self.width;
        for layer in &mut self.layers {
            layer.keys.truncate(elements);
            layer.values.truncate(elements);
        }
    }

    pub(crate) fn layer(&mut self, layer: usize) -> &mut KeyValues {
        &mut self.layers[layer]
    }

    /// Counts tokens whose keys and values were added to every layer.
    pub(crate) fn advance(&mut self, tokens: usize) {
        self.len += tokens;
    }
}
