//! Reads the configuration of a model from the metadata.

use super::names::{ATTENTION, FEED_FORWARD, ROPE_FACTORS};
use super::{Gguf, GgufError, Value, wrong};
use crate::config::{Family, ModelConfig, attention_scale};
use crate::rotary::{Pairing, Scaling};
use flash_sampling::DType;

/// Keys of unsupported features, without the prefix of the architecture, and the value that disables the feature.
const UNSUPPORTED: [(&str, f64); 14] = [
    ("expert_count", 0.0),
    ("attention.sliding_window", 0.0),
    ("attention.causal", 1.0),
    ("attention.clamp_kqv", 0.0),
    ("attention.max_alibi_bias", 0.0),
    ("attention.scale", 0.0),
    ("attention.temperature_length", 0.0),
    ("attn_logit_softcapping", 0.0),
    ("embedding_scale", 1.0),
    ("residual_scale", 1.0),
    ("nextn_predict_layers", 0.0),
    ("rope.scaling.attn_factor", 1.0),
    ("rope.scaling.yarn_log_multiplier", 0.0),
    ("use_parallel_residual", 0.0),
];

/// Keys of one architecture.
struct Keys<'f, 'a> {
    file: &'f Gguf<'a>,
    architecture: &'a str,
}

impl<'a> Keys<'_, 'a> {
    fn name(&self, key: &str) -> String {
        format!("{}.{key}", self.architecture)
    }

    fn find(&self, key: &str) -> Option<Value<'a>> {
        self.file.value(&self.name(key))
    }

    /// Reads a size of at least one. `otherwise` is the default of a missing key.
    fn size(&self, key: &str, otherwise: Option<usize>) -> Result<usize, GgufError> {
        let read = |value: Value<'_>| value.as_u64().filter(|n| (1..1 << 32).contains(n)).map(|n| n as usize);
        let found = self.file.read(&self.name(key), "a size", read)?.or(otherwise);
        found.ok_or_else(|| GgufError::MissingKey(self.name(key)))
    }

    fn positive(&self, key: &str) -> Result<Option<f64>, GgufError> {
        let read = |value: Value<'_>| value.as_f64().filter(|x| (*x as f32).is_finite() && *x as f32 > 0.0);
        self.file.read(&self.name(key), "a number above 0", read)
    }

    fn unsupported(&self, key: &str, value: Value<'_>) -> GgufError {
        GgufError::Unsupported { key: self.name(key), found: value.to_string() }
    }
}

impl ModelConfig {
    /// Reads the configuration of the architectures `llama` and `qwen3`. The rows of query and key weights in a llama
    /// file have llama.cpp's order, and [`ModelConfig::rope_pairing`] accounts for this order.
    ///
    /// # Errors
    /// [`GgufError`], which names the key or the tensor: another architecture, a missing or impossible size, and
    /// unsupported features (experts, sliding windows, other rotary scalings).
    pub fn from_gguf(file: &Gguf<'_>) -> Result<Self, GgufError> {
        let family = |value: Value<'_>| match value.as_str()? {
            "llama" => Some(Family::Llama),
            "qwen3" => Some(Family::Qwen3),
            _ => None,
        };
        let family = file.require("general.architecture", "llama or qwen3", family)?;
        if let Some(count) = file.value("split.count").filter(|count| count.as_u64().is_none_or(|count| count > 1)) {
            return Err(GgufError::Unsupported { key: "split.count".into(), found: count.to_string() });
        }
        let keys = Keys { file, architecture: file.architecture()? };
        for (key, neutral) in UNSUPPORTED {
            let number = |value: Value<'_>| value.as_f64().or(value.as_bool().map(|flag| f64::from(u8::from(flag))));
            if let Some(value) = keys.find(key).filter(|value| number(*value) != Some(neutral)) {
                return Err(keys.unsupported(key, value));
            }
        }
        let hidden = keys.size("embedding_length", None)?;
        let layers = keys.size("block_count", None)?;
        if layers > file.names().count() {
            // Bounds the list of tensor names, whose length is proportional to the number of layers.
            return Err(wrong(&keys.name("block_count"), Value::Unsigned(layers as u64), "fewer layers than tensors"));
        }
        let heads = keys.size("attention.head_count", None)?;
        let kv_heads = keys.size("attention.head_count_kv", Some(heads))?;
        if heads % kv_heads != 0 {
            let key = keys.name("attention.head_count_kv");
            return Err(wrong(&key, Value::Unsigned(kv_heads as u64), &format!("a divisor of head_count {heads}")));
        }
        let head_dim = keys.size("attention.key_length", Some((hidden / heads).max(1)))?;
        if head_dim % 2 != 0 {
            let key = keys.name("attention.key_length");
            return Err(wrong(&key, Value::Unsigned(head_dim as u64), "an even number"));
        }
        for key in ["attention.value_length", "rope.dimension_count"] {
            let width = format!("{head_dim}, the width of a head");
            let is_width = |value: Value<'_>| (value.as_u64() == Some(head_dim as u64)).then_some(());
            file.read(&keys.name(key), &width, is_width)?;
        }
        let biased = |parts: &[&str]| {
            let mut stems = file.names().filter_map(|name| name.strip_suffix(".bias"));
            stems.any(|stem| stem.rsplit('.').next().is_some_and(|part| parts.contains(&part)))
        };
        Ok(ModelConfig {
            family,
            hidden,
            intermediate: keys.size("feed_forward_length", None)?,
            layers,
            heads,
            kv_heads,
            head_dim,
            attention_scale: attention_scale(head_dim),
            attention_cap: None,
            windows: Vec::new(),
            norm_eps: keys
                .positive("attention.layer_norm_rms_epsilon")?
                .ok_or_else(|| GgufError::MissingKey(keys.name("attention.layer_norm_rms_epsilon")))?
                as f32,
            rope_theta: keys.positive("rope.freq_base")?.unwrap_or(10_000.0),
            rope_scaling: scaling(&keys, head_dim)?,
            rope_pairing: if family == Family::Llama { Pairing::Neighbours } else { Pairing::Halves },
            max_positions: keys.size("context_length", None)?,
            attention_bias: biased(&ATTENTION),
            mlp_bias: biased(&FEED_FORWARD),
            bos: token(file, "bos")?,
            eos: ends(file)?,
        })
    }
}

/// Reads the scaling of the rotary frequencies: from keys, or for Llama 3.1 from a tensor.
fn scaling(keys: &Keys<'_, '_>, head_dim: usize) -> Result<Scaling, GgufError> {
    let kind = keys.find("rope.scaling.type");
    if let Some(kind) = kind.filter(|kind| !matches!(kind.as_str(), Some("none" | "linear"))) {
        return Err(keys.unsupported("rope.scaling.type", kind));
    }
    // Older files have the factor in the key `rope.scale_linear`, and no type.
    let factor = keys.positive("rope.scaling.factor")?.or(keys.positive("rope.scale_linear")?);
    let linear = match (kind.and_then(|kind| kind.as_str()), factor) {
        (Some("none"), _) | (None, None) => None,
        (_, Some(factor)) => Some(factor).filter(|factor| *factor != 1.0),
        (Some(_), None) => return Err(GgufError::MissingKey(keys.name("rope.scaling.factor"))),
    };
    match (linear, factors(keys.file, head_dim / 2)?) {
        (None, None) => Ok(Scaling::None),
        (Some(factor), None) => Ok(Scaling::Linear { factor }),
        (None, Some(factors)) => Ok(Scaling::Factors(factors)),
        (Some(factor), Some(_)) => Err(keys.unsupported("rope.scaling.factor", Value::Float(factor))),
    }
}

/// Reads the divisors of the rotary frequencies, one per pair; `None` for a file without them.
fn factors(file: &Gguf<'_>, pairs: usize) -> Result<Option<Vec<f32>>, GgufError> {
    if !file.has(ROPE_FACTORS) {
        return Ok(None);
    }
    let invalid = |reason: String| GgufError::Invalid { part: format!("the tensor {ROPE_FACTORS}"), reason };
    let found = file.tensor(ROPE_FACTORS)?;
    if (found.dtype, &found.shape[..]) != (DType::F32, &[pairs][..]) {
        let (dtype, shape) = (found.dtype.name(), &found.shape);
        return Err(invalid(format!("has type {dtype} and shape {shape:?}, expected f32 and [{pairs}]")));
    }
    let bytes = file.bytes(&found).as_chunks::<4>().0;
    let factors: Vec<f32> = bytes.iter().map(|bytes| f32::from_le_bytes(*bytes)).collect();
    match factors.iter().find(|factor| !(factor.is_finite() && **factor > 0.0)) {
        Some(factor) => Err(invalid(format!("has the factor {factor}"))),
        None => Ok(Some(factors)),
    }
}

/// Reads the number of a special token of the tokenizer.
fn token(file: &Gguf<'_>, name: &str) -> Result<Option<u32>, GgufError> {
    let read = |value: Value<'_>| value.as_u64().and_then(|id| u32::try_from(id).ok());
    file.read(&format!("tokenizer.ggml.{name}_token_id"), "a token", read)
}

/// Reads the tokens that end a sequence, a turn or a message.
fn ends(file: &Gguf<'_>) -> Result<Vec<u32>, GgufError> {
    let mut ends = Vec::new();
    for name in ["eos", "eot", "eom"] {
        if let Some(token) = token(file, name)?.filter(|token| !ends.contains(token)) {
            ends.push(token);
        }
    }
    Ok(ends)
}
