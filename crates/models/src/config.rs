//! The configuration of a model, from `config.json`.

use crate::error::ModelError;
use crate::gemma2::Gemma2;
use crate::quantization::Quantization;
use crate::rotary::{Pairing, Scaling};
use serde_json::Value;

/// The architecture, named by `model_type`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Family {
    /// `llama`.
    Llama,
    /// `qwen3`: Llama with queries and keys normalised per head.
    Qwen3,
    /// `gemma2`: Llama with norms also after attention and after the feed-forward layers, an embedding multiplied by a
    /// factor, GELU, and attention with capped scores and sliding windows.
    Gemma2,
}

impl Family {
    /// The activation of the feed-forward layers, as `transformers` names it.
    fn activation(self) -> &'static str {
        match self {
            Family::Llama | Family::Qwen3 => "silu",
            Family::Gemma2 => "gelu_pytorch_tanh",
        }
    }
}

/// Sizes and constants of a model.
#[derive(Clone, Debug, PartialEq)]
pub struct ModelConfig {
    /// The architecture.
    pub family: Family,
    /// Width of the hidden states.
    pub hidden: usize,
    /// Width of the feed-forward layers.
    pub intermediate: usize,
    /// Number of layers.
    pub layers: usize,
    /// Query heads.
    pub heads: usize,
    /// Key and value heads, each shared by `heads / kv_heads` query heads.
    pub kv_heads: usize,
    /// Width of a head; even.
    pub head_dim: usize,
    /// The factor that multiplies the dot products of queries and keys.
    pub attention_scale: f32,
    /// The cap of attention scores, which become `cap * tanh(score / cap)`; `None` for no cap.
    pub attention_cap: Option<f32>,
    /// The windows of the layers: how many of the latest tokens a query attends to, its own included; `None` for all
    /// tokens. Layer i uses entry `i % windows.len()`. If the list is empty, every query attends to all tokens.
    pub windows: Vec<Option<usize>>,
    /// The constant that a norm adds to the mean square before the square root.
    pub norm_eps: f32,
    /// Base of the rotary frequencies.
    pub rope_theta: f64,
    /// Scaling of the rotary frequencies.
    pub rope_scaling: Scaling,
    /// The pairs of elements that the rotary embedding rotates.
    pub rope_pairing: Pairing,
    /// The maximum length of a sequence, in tokens.
    pub max_positions: usize,
    /// Whether queries, keys, values and the attention's output have a bias.
    pub attention_bias: bool,
    /// Whether the feed-forward layers have a bias.
    pub mlp_bias: bool,
    /// The token that begins a sequence.
    pub bos: Option<u32>,
    /// The tokens that end a sequence.
    pub eos: Vec<u32>,
}

/// Returns the value of a key, or `None` if the value is absent or `null`.
pub(crate) fn find<'v>(json: &'v Value, key: &str) -> Option<&'v Value> {
    json.get(key).filter(|value| !value.is_null())
}

pub(crate) fn wrong(key: &str, value: &Value) -> ModelError {
    ModelError::Config(format!("{key} is {value}, which is not supported"))
}

/// Returns the size of a key, which is at least 1, or `otherwise` if the key is absent.
pub(crate) fn size(json: &Value, key: &str, otherwise: Option<usize>) -> Result<usize, ModelError> {
    match find(json, key) {
        Some(value) => value.as_u64().filter(|n| (1..1 << 32).contains(n)).map(|n| n as usize).ok_or(wrong(key, value)),
        None => otherwise.ok_or_else(|| ModelError::Config(format!("{key} is missing"))),
    }
}

pub(crate) fn positive(json: &Value, key: &str, otherwise: Option<f64>) -> Result<f64, ModelError> {
    match find(json, key) {
        Some(value) => value.as_f64().filter(|x| (*x as f32).is_finite() && *x as f32 > 0.0).ok_or(wrong(key, value)),
        None => otherwise.ok_or_else(|| ModelError::Config(format!("{key} is missing"))),
    }
}

pub(crate) fn flag(json: &Value, key: &str) -> Result<bool, ModelError> {
    find(json, key).map_or(Ok(false), |value| value.as_bool().ok_or(wrong(key, value)))
}

/// Returns the tokens of a key whose value is a token or a list of tokens.
fn tokens(json: &Value, key: &str) -> Result<Vec<u32>, ModelError> {
    let Some(value) = find(json, key) else { return Ok(Vec::new()) };
    let list = value.as_array().map_or(std::slice::from_ref(value), Vec::as_slice);
    let token = |v: &Value| v.as_u64().and_then(|n| u32::try_from(n).ok()).ok_or(wrong(key, value));
    list.iter().map(token).collect()
}

impl ModelConfig {
    /// Parses `config.json`.
    ///
    /// # Errors
    /// [`ModelError::Config`] with the name of the key, if the architecture is not a [`Family`], a size is absent or
    /// out of range, or a feature is not supported: another activation or rotary scaling, sliding windows except in
    /// Gemma 2, and weights that [`Quantization`] refuses.
    pub fn parse(bytes: &[u8]) -> Result<Self, ModelError> {
        let json: Value = serde_json::from_slice(bytes).map_err(|error| ModelError::Config(error.to_string()))?;
        let family = match find(&json, "model_type").and_then(Value::as_str) {
            Some("llama") => Family::Llama,
            Some("qwen3") => Family::Qwen3,
            Some("gemma2") => Family::Gemma2,
            Some(other) => {
                let message = format!("model_type is \"{other}\"; llama, qwen3 and gemma2 can be run");
                return Err(ModelError::Config(message));
            }
            None => return Err(ModelError::Config("model_type is missing".into())),
        };
        refuse_unsupported(&json, family)?;
        let hidden = size(&json, "hidden_size", None)?;
        let heads = size(&json, "num_attention_heads", None)?;
        let kv_heads = size(&json, "num_key_value_heads", Some(heads))?;
        let head_dim = match family {
            Family::Llama => (hidden / heads).max(1),
            Family::Qwen3 => 128,
            Family::Gemma2 => 256,
        };
        let head_dim = size(&json, "head_dim", Some(head_dim))?;
        if heads % kv_heads != 0 {
            let message = format!("num_attention_heads {heads} is no multiple of num_key_value_heads {kv_heads}");
            return Err(ModelError::Config(message));
        }
        if head_dim % 2 != 0 {
            return Err(ModelError::Config(format!("head_dim {head_dim} is odd")));
        }
        // transformers 5 writes the object `rope_parameters`. Earlier versions write `rope_theta` at the top level and
        // the object `rope_scaling`.
        for key in ["rope_parameters", "rope_scaling"] {
            if let Some(value) = find(&json, key).filter(|value| !value.is_object()) {
                return Err(wrong(key, value));
            }
            let parts = find(&json, key).and_then(Value::as_object).into_iter().flatten();
            if let Some((kind, _)) = parts.into_iter().find(|(_, value)| value.is_object()) {
                let message = format!("{key} has other parameters for {kind}, which is not supported");
                return Err(ModelError::Config(message));
            }
        }
        if let (Some(new), Some(old)) = (find(&json, "rope_parameters"), find(&json, "rope_scaling"))
            && new != old
        {
            let message = "rope_parameters and rope_scaling differ: only one of them can be meant";
            return Err(ModelError::Config(message.into()));
        }
        let rope_key = if find(&json, "rope_parameters").is_some() { "rope_parameters" } else { "rope_scaling" };
        let rope = find(&json, rope_key).unwrap_or(&Value::Null);
        let at_the_top = positive(&json, "rope_theta", Some(10_000.0))?;
        let theta = positive(rope, "rope_theta", Some(at_the_top))?;
        if theta != at_the_top && find(&json, "rope_theta").is_some() {
            let message = format!("rope_theta is {at_the_top} at the top, but {theta} in {rope_key}");
            return Err(ModelError::Config(message));
        }
        let layers = size(&json, "num_hidden_layers", None)?;
        let gemma2 = (family == Family::Gemma2).then(|| Gemma2::parse(&json, layers)).transpose()?;
        let attention_scale = gemma2.as_ref().map_or(attention_scale(head_dim), |keys| keys.attention_scale);
        Ok(ModelConfig {
            family,
            hidden,
            intermediate: size(&json, "intermediate_size", None)?,
            layers,
            heads,
            kv_heads,
            head_dim,
            attention_scale,
            attention_cap: gemma2.as_ref().and_then(|keys| keys.attention_cap),
            windows: gemma2.map_or(Vec::new(), |keys| keys.windows),
            norm_eps: positive(&json, "rms_norm_eps", Some(1e-6))? as f32,
            rope_theta: theta,
            rope_scaling: scaling(rope)?,
            rope_pairing: Pairing::Halves,
            max_positions: size(&json, "max_position_embeddings", None)?,
            attention_bias: flag(&json, "attention_bias")?,
            mlp_bias: flag(&json, "mlp_bias")?,
            bos: tokens(&json, "bos_token_id")?.first().copied(),
            eos: tokens(&json, "eos_token_id")?,
        })
    }

    /// Returns how many of the latest tokens a query of a layer attends to, its own included; `None` for all tokens.
    pub fn window(&self, layer: usize) -> Option<usize> {
        self.windows.get(layer % self.windows.len().max(1)).copied().flatten()
    }

    /// Replaces `eos` by the `eos_token_id` of a `generation_config.json`, if the file has one. This list is often
    /// longer than the list in `config.json`.
    ///
    /// # Errors
    /// [`ModelError::GenerationConfig`] if `bytes` are not JSON, or if `eos_token_id` is not a token or a list of
    /// tokens.
    pub fn with_generation_config(mut self, bytes: &[u8]) -> Result<Self, ModelError> {
        let json = serde_json::from_slice(bytes).map_err(|error| ModelError::GenerationConfig(error.to_string()))?;
        let eos = tokens(&json, "eos_token_id").map_err(|error| match error {
            ModelError::Config(reason) => ModelError::GenerationConfig(reason),
            error => error,
        })?;
        if !eos.is_empty() {
            self.eos = eos;
        }
        Ok(self)
    }
}

/// Returns the factor of attention scores for families whose `config.json` has no key for this factor.
pub(crate) fn attention_scale(head_dim: usize) -> f32 {
    1.0 / (head_dim as f32).sqrt()
}

fn refuse_unsupported(json: &Value, family: Family) -> Result<(), ModelError> {
    for key in ["hidden_act", "hidden_activation"] {
        if let Some(value) = find(json, key).filter(|value| value.as_str() != Some(family.activation())) {
            return Err(wrong(key, value));
        }
    }
    if flag(json, "use_sliding_window")? {
        return Err(ModelError::Config("use_sliding_window is true, which is not supported".into()));
    }
    let full = |value: &Value| value.as_str() == Some("full_attention");
    let layer_types = find(json, "layer_types").and_then(Value::as_array).filter(|_| family != Family::Gemma2);
    if let Some(other) = layer_types.into_iter().flatten().find(|value| !full(value)) {
        return Err(wrong("layer_types", other));
    }
    Quantization::of(json)?;
    // `partial_rotary_factor` is at the top level, or among the other rotary parameters.
    let places = [Some(json), find(json, "rope_parameters"), find(json, "rope_scaling")];
    let partial = places.into_iter().flatten().filter_map(|place| find(place, "partial_rotary_factor"));
    match partial.into_iter().find(|value| value.as_f64() != Some(1.0)) {
        Some(value) => Err(wrong("partial_rotary_factor", value)),
        None => Ok(()),
    }
}

fn scaling(rope: &Value) -> Result<Scaling, ModelError> {
    let kind = ["rope_type", "type"].into_iter().find_map(|key| Some((key, find(rope, key)?)));
    match kind.map(|(key, value)| (key, value, value.as_str())) {
        None | Some((.., Some("default"))) => Ok(Scaling::None),
        Some((.., Some("linear"))) => Ok(Scaling::Linear { factor: positive(rope, "factor", None)? }),
        Some((.., Some("llama3"))) => {
            let low = positive(rope, "low_freq_factor", None)?;
            let high = positive(rope, "high_freq_factor", None)?;
            if high <= low {
                return Err(ModelError::Config(format!("high_freq_factor {high} is not above low_freq_factor {low}")));
            }
            let factor = positive(rope, "factor", None)?;
            Ok(Scaling::Llama3 {
                factor,
                low,
                high,
                original: positive(rope, "original_max_position_embeddings", None)?,
            })
        }
        Some((key, value, _)) => Err(wrong(key, value)),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const QWEN3: &str = r#"{"model_type": "qwen3", "hidden_size": 1024, "intermediate_size": 3072, "num_hidden_layers": 28,
        "num_attention_heads": 16, "num_key_value_heads": 8, "head_dim": 128, "rms_norm_eps": 1e-06, "hidden_act": "silu",
        "max_position_embeddings": 40960, "rope_theta": 1000000, "rope_scaling": null, "use_sliding_window": false,
        "sliding_window": null, "attention_bias": false, "bos_token_id": 151643, "eos_token_id": 151645}"#;

    fn with(key: &str, value: &str) -> Result<ModelConfig, ModelError> {
        let mut json: Value = serde_json::from_str(QWEN3).unwrap();
        json[key] = serde_json::from_str(value).unwrap();
        ModelConfig::parse(json.to_string().as_bytes())
    }

    #[test]
    fn both_places_of_theta_are_read() {
        let config = ModelConfig::parse(QWEN3.as_bytes()).unwrap();
        assert_eq!((config.family, config.layers, config.head_dim), (Family::Qwen3, 28, 128));
        assert_eq!((config.rope_theta, config.rope_scaling), (1e6, Scaling::None));
        let of_object = r#"{"rope_type": "default", "rope_theta": 500.5}"#;
        let nowhere_else = QWEN3.replace(r#""rope_theta": 1000000"#, &format!(r#""rope_parameters": {of_object}"#));
        assert_eq!(ModelConfig::parse(nowhere_else.as_bytes()).unwrap().rope_theta, 500.5);
        let error = with("rope_parameters", of_object).unwrap_err().to_string();
        assert!(error.contains("rope_theta is 1000000 at the top, but 500.5 in rope_parameters"), "{error}");
        let config = with("rope_parameters", r#"{"rope_theta": 1e6}"#).unwrap();
        assert_eq!(config.rope_theta, 1e6);
        let scaling = r#"{"rope_type": "llama3", "factor": 8, "low_freq_factor": 1, "high_freq_factor": 4,
            "original_max_position_embeddings": 8192}"#;
        let llama3 = Scaling::Llama3 { factor: 8.0, low: 1.0, high: 4.0, original: 8192.0 };
        let config = with("rope_scaling", scaling).unwrap();
        assert_eq!((config.rope_scaling, config.rope_theta), (llama3, 1e6));
    }

    #[test]
    fn ends_are_one_token_or_several() {
        let config = ModelConfig::parse(QWEN3.as_bytes()).unwrap();
        assert_eq!((config.bos, &config.eos[..]), (Some(151_643), &[151_645][..]));
        let config = config.with_generation_config(br#"{"eos_token_id": [151645, 151643]}"#).unwrap();
        assert_eq!(config.eos, [151_645, 151_643]);
        assert_eq!(config.clone().with_generation_config(b"{}").unwrap(), config);
    }

    #[test]
    fn unsupported_features_are_refused_by_name() {
        for (key, value) in [
            ("model_type", r#""mistral""#),
            ("hidden_size", "0"),
            ("hidden_size", "1e99"),
            ("num_hidden_layers", "-3"),
            ("num_key_value_heads", "7"),
            ("head_dim", "127"),
            ("hidden_act", r#""gelu""#),
            ("use_sliding_window", "true"),
            ("layer_types", r#"["full_attention", "sliding_attention"]"#),
            ("rope_scaling", r#"{"rope_type": "yarn", "factor": 4.0}"#),
            ("rope_scaling", r#"{"rope_type": "linear"}"#),
            (
                "rope_scaling",
                r#"{"rope_type": "llama3", "factor": 8, "low_freq_factor": 4, "high_freq_factor": 4,
                    "original_max_position_embeddings": 8192}"#,
            ),
            ("rope_parameters", "7"),
            ("rope_parameters", r#"["linear"]"#),
            ("rope_scaling", r#""linear""#),
            ("partial_rotary_factor", "0.5"),
            ("rope_parameters", r#"{"rope_type": "default", "partial_rotary_factor": 0.25}"#),
            ("rms_norm_eps", "0"),
            ("rms_norm_eps", "1e-60"),
            ("eos_token_id", r#""end""#),
            ("quantization_config", r#"{"bits": 4}"#),
            ("quantization_config", r#"{"quant_method": "awq"}"#),
        ] {
            assert!(matches!(with(key, value), Err(ModelError::Config(_))), "{key} {value}");
        }
        assert!(ModelConfig::parse(b"[]").is_err());
    }
}
