//! The shapes of real models, with random weights.

use candle_core::{DType, Device, Result, Tensor, bail};
use candle_nn::{Activation, VarBuilder};
use candle_transformers::models::qwen3::{Config, Model};
use std::collections::HashMap;

/// The sizes that differ between the models of a family.
pub(crate) struct Shape {
    hidden: usize,
    intermediate: usize,
    layers: usize,
    heads: usize,
    head_dim: usize,
    vocab: usize,
    /// Whether the LM head is the embedding.
    tied: bool,
}

/// The shape of Qwen3 by its size; `tiny` is not a real model.
pub(crate) fn of(name: &str) -> Result<Shape> {
    let (head_dim, vocab) = (128, 151_936);
    Ok(match name {
        "0.6b" => Shape { hidden: 1024, intermediate: 3072, layers: 28, heads: 16, head_dim, vocab, tied: true },
        "1.7b" => Shape { hidden: 2048, intermediate: 6144, layers: 28, heads: 16, head_dim, vocab, tied: true },
        "8b" => Shape { hidden: 4096, intermediate: 12_288, layers: 36, heads: 32, head_dim, vocab, tied: false },
        "tiny" => Shape { hidden: 64, intermediate: 128, layers: 2, heads: 16, head_dim: 8, vocab: 500, tied: true },
        _ => bail!("\"{name}\" is none of 0.6b, 1.7b, 8b, tiny and stories"),
    })
}

/// A model of this shape, and the weight of its LM head `[vocab, hidden]`.
pub(crate) fn random(shape: &Shape, positions: usize, dtype: DType, device: &Device) -> Result<(Model, Tensor)> {
    let Shape { hidden, intermediate, layers, heads, head_dim, vocab, tied } = *shape;
    let kv_heads = 8;
    let config = Config {
        vocab_size: vocab,
        hidden_size: hidden,
        intermediate_size: intermediate,
        num_hidden_layers: layers,
        num_attention_heads: heads,
        head_dim,
        attention_bias: false,
        num_key_value_heads: kv_heads,
        max_position_embeddings: positions,
        sliding_window: None,
        max_window_layers: layers,
        tie_word_embeddings: tied,
        rope_theta: 1e6,
        rms_norm_eps: 1e-6,
        use_sliding_window: false,
        hidden_act: Activation::Silu,
    };
    let matrix = |rows: usize, cols: usize| -> Result<Tensor> {
        // Large enough that every layer changes the hidden states, and that logits spread as in a real model.
        let deviation = 2.0 / (cols as f32).sqrt();
        if device.is_cpu() {
            // The CPU draws them one by one, so one part is repeated.
            let part = Tensor::randn(0f32, deviation, 1 << 20, device)?.to_vec1::<f32>()?;
            let values: Vec<f32> = part.iter().copied().cycle().take(rows * cols).collect();
            return Tensor::from_vec(values, (rows, cols), device)?.to_dtype(dtype);
        }
        Tensor::randn(0f32, deviation, (rows, cols), device)?.to_dtype(dtype)
    };
    let ones = |len: usize| Tensor::ones(len, dtype, device);
    let mut tensors = HashMap::new();
    let embedding = matrix(vocab, hidden)?;
    tensors.insert("model.embed_tokens.weight".to_owned(), embedding.clone());
    tensors.insert("model.norm.weight".to_owned(), ones(hidden)?);
    for layer in 0..layers {
        let mut add =
            |name: &str, tensor: Tensor| tensors.insert(format!("model.layers.{layer}.{name}.weight"), tensor);
        add("self_attn.q_proj", matrix(heads * head_dim, hidden)?);
        add("self_attn.k_proj", matrix(kv_heads * head_dim, hidden)?);
        add("self_attn.v_proj", matrix(kv_heads * head_dim, hidden)?);
        add("self_attn.o_proj", matrix(hidden, heads * head_dim)?);
        add("self_attn.q_norm", ones(head_dim)?);
        add("self_attn.k_norm", ones(head_dim)?);
        add("mlp.gate_proj", matrix(intermediate, hidden)?);
        add("mlp.up_proj", matrix(intermediate, hidden)?);
        add("mlp.down_proj", matrix(hidden, intermediate)?);
        add("input_layernorm", ones(hidden)?);
        add("post_attention_layernorm", ones(hidden)?);
    }
    let model = Model::new(&config, VarBuilder::from_tensors(tensors, dtype, device))?;
    Ok((model, if tied { embedding } else { matrix(vocab, hidden)? }))
}
