//! Names of tensors: llama.cpp's in files, Hugging Face's in [`Model::new`](crate::Model::new).

use super::Gguf;
use super::error::GgufError;
use crate::config::{Family, ModelConfig};
use std::collections::BTreeSet;

/// Names of tensors outside of layers: Hugging Face's, then llama.cpp's. A suffix follows both: `.weight` or `.bias`.
const MODEL: [(&str, &str); 3] =
    [("model.embed_tokens", "token_embd"), ("model.norm", "output_norm"), ("lm_head", "output")];
/// Names of tensors of a layer, after the prefixes `model.layers.N.` and `blk.N.`.
const LAYER: [(&str, &str); 11] = [
    ("input_layernorm", "attn_norm"),
    ("self_attn.q_proj", "attn_q"),
    ("self_attn.k_proj", "attn_k"),
    ("self_attn.v_proj", "attn_v"),
    ("self_attn.o_proj", "attn_output"),
    ("self_attn.q_norm", "attn_q_norm"),
    ("self_attn.k_norm", "attn_k_norm"),
    ("post_attention_layernorm", "ffn_norm"),
    ("mlp.gate_proj", "ffn_gate"),
    ("mlp.up_proj", "ffn_up"),
    ("mlp.down_proj", "ffn_down"),
];
/// The parts that only qwen3 has.
const HEAD_NORMS: [&str; 2] = ["attn_q_norm", "attn_k_norm"];
/// The tensor of rotary factors, which [`ModelConfig::from_gguf`] reads.
pub(super) const ROPE_FACTORS: &str = "rope_freqs.weight";

/// The parts of a layer with a bias if [`ModelConfig::attention_bias`] is set.
pub(super) const ATTENTION: [&str; 4] = ["attn_q", "attn_k", "attn_v", "attn_output"];
/// The parts of a layer with a bias if [`ModelConfig::mlp_bias`] is set.
pub(super) const FEED_FORWARD: [&str; 3] = ["ffn_gate", "ffn_up", "ffn_down"];

/// Converts Hugging Face's name of a tensor to the name in a GGUF file; `None` if the llama and qwen3 architectures do
/// not have the tensor.
pub fn gguf_name(hugging_face: &str) -> Option<String> {
    let (part, suffix) = hugging_face.rsplit_once('.')?;
    let of = |names: &[(&str, &'static str)], part| names.iter().find(|(name, _)| *name == part).map(|(_, name)| *name);
    match part.strip_prefix("model.layers.") {
        Some(rest) => {
            let (layer, part) = rest.split_once('.')?;
            Some(format!("blk.{layer}.{}.{suffix}", of(&LAYER, part)?))
        }
        None => Some(format!("{}.{suffix}", of(&MODEL, part)?)),
    }
}

/// The names of all tensors except the head, as pairs: Hugging Face's name, then the name in the file.
///
/// # Errors
/// [`GgufError::MissingTensor`], and [`GgufError::UnusedTensor`] for a tensor of another architecture.
pub fn tensor_names(file: &Gguf<'_>, config: &ModelConfig) -> Result<Vec<(String, String)>, GgufError> {
    let mut names = Vec::new();
    let mut put = |hugging_face: String, name: String| match file.has(&name) {
        true => {
            names.push((hugging_face, name));
            Ok(())
        }
        false => Err(GgufError::MissingTensor(name)),
    };
    for (hugging_face, name) in &MODEL[..2] {
        put(format!("{hugging_face}.weight"), format!("{name}.weight"))?;
    }
    for layer in 0..config.layers {
        for (hugging_face, name) in &LAYER {
            if HEAD_NORMS.contains(name) && config.family != Family::Qwen3 {
                continue;
            }
            let biased =
                (config.attention_bias && ATTENTION.contains(name)) || (config.mlp_bias && FEED_FORWARD.contains(name));
            let (hugging_face, name) = (format!("model.layers.{layer}.{hugging_face}"), format!("blk.{layer}.{name}"));
            put(format!("{hugging_face}.weight"), format!("{name}.weight"))?;
            if biased {
                put(format!("{hugging_face}.bias"), format!("{name}.bias"))?;
            }
        }
    }
    let mut used: BTreeSet<&str> = names.iter().map(|(_, name)| name.as_str()).collect();
    used.extend([ROPE_FACTORS, "output.weight"]);
    match file.names().find(|name| !used.contains(name)) {
        Some(tensor) => {
            Err(GgufError::UnusedTensor { tensor: super::shown(tensor), architecture: file.architecture()?.into() })
        }
        None => Ok(names),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_of_both_worlds_correspond() {
        for (hugging_face, name) in [
            ("model.embed_tokens.weight", "token_embd.weight"),
            ("lm_head.weight", "output.weight"),
            ("model.layers.17.self_attn.o_proj.bias", "blk.17.attn_output.bias"),
            ("model.layers.0.post_attention_layernorm.weight", "blk.0.ffn_norm.weight"),
        ] {
            assert_eq!(gguf_name(hugging_face).as_deref(), Some(name));
        }
        for other in ["model.layers.0.weight", "model.layers.0.mlp.router.weight", "weight", ""] {
            assert_eq!(gguf_name(other), None, "{other}");
        }
    }
}
