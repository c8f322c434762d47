//! The keys of `config.json` that only Gemma 2 has.

use crate::config::{find, flag, positive, size, wrong};
use crate::error::ModelError;
use serde_json::Value;

/// The keys of the caps. `null` means no cap. `transformers` applies a default cap if a key is absent, so an absent key
/// is an error here.
const CAPS: [&str; 2] = ["attn_logit_softcapping", "final_logit_softcapping"];

/// The scale, the cap and the windows of Gemma 2's attention.
#[derive(Debug)]
pub(crate) struct Gemma2 {
    pub(crate) attention_scale: f32,
    pub(crate) attention_cap: Option<f32>,
    /// The windows, in the form of [`ModelConfig::windows`](crate::ModelConfig::windows).
    pub(crate) windows: Vec<Option<usize>>,
}

impl Gemma2 {
    /// Reads these keys for a model with `layers` layers.
    ///
    /// # Errors
    /// [`ModelError::Config`] with the name of the key, if a key is absent, a value is out of range, or a feature is
    /// not supported.
    pub(crate) fn parse(json: &Value, layers: usize) -> Result<Self, ModelError> {
        for key in ["use_bidirectional_attention", "mlp_bias"] {
            if flag(json, key)? {
                return Err(ModelError::Config(format!("{key} is true, which is not supported for gemma2")));
            }
        }
        if let Some(key) = CAPS.into_iter().find(|key| json.get(key).is_none()) {
            return Err(ModelError::Config(format!("{key} is missing; null means no cap")));
        }
        let [attention_cap, _] = CAPS;
        let attention_cap = find(json, attention_cap).map(|_| positive(json, attention_cap, None)).transpose()?;
        let scalar = positive(json, "query_pre_attn_scalar", None)?;
        Ok(Gemma2 {
            attention_scale: scalar.sqrt().recip() as f32,
            attention_cap: attention_cap.map(|cap| cap as f32),
            windows: windows(json, layers)?,
        })
    }
}

/// Returns the windows of the layers. Without `layer_types`, the layers 0, 2, 4 and so on have a window.
fn windows(json: &Value, layers: usize) -> Result<Vec<Option<usize>>, ModelError> {
    let window = || size(json, "sliding_window", None).map(Some);
    let Some(types) = find(json, "layer_types") else { return Ok(vec![window()?, None]) };
    let list = types.as_array().ok_or_else(|| wrong("layer_types", types))?;
    if list.len() != layers {
        let message = format!("layer_types has {} entries, but num_hidden_layers is {layers}", list.len());
        return Err(ModelError::Config(message));
    }
    let of_type = |value: &Value| match value.as_str() {
        Some("sliding_attention") => window(),
        Some("full_attention") => Ok(None),
        _ => Err(wrong("layer_types", value)),
    };
    list.iter().map(of_type).collect()
}

#[cfg(test)]
mod tests {
    use crate::config::{Family, ModelConfig};
    use crate::error::ModelError;
    use serde_json::Value;

    /// The configuration of google/gemma-2-9b.
    const GEMMA2: &str = r#"{"model_type": "gemma2", "hidden_size": 3584, "intermediate_size": 14336, "head_dim": 256,
        "num_hidden_layers": 42, "num_attention_heads": 16, "num_key_value_heads": 8, "rms_norm_eps": 1e-06,
        "hidden_act": "gelu_pytorch_tanh", "hidden_activation": "gelu_pytorch_tanh", "attention_bias": false,
        "attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0, "query_pre_attn_scalar": 256,
        "sliding_window": 4096, "max_position_embeddings": 8192, "rope_theta": 10000.0, "bos_token_id": 2,
        "eos_token_id": 1}"#;

    /// Parses [`GEMMA2`] with `value` for `key`, or without `key` if `value` is empty.
    fn with(key: &str, value: &str) -> Result<ModelConfig, ModelError> {
        let mut json: Value = serde_json::from_str(GEMMA2).unwrap();
        match value {
            "" => drop(json.as_object_mut().unwrap().remove(key).unwrap()),
            value => json[key] = serde_json::from_str(value).unwrap(),
        }
        ModelConfig::parse(json.to_string().as_bytes())
    }

    #[test]
    fn layers_without_types_alternate_and_types_decide() {
        let config = ModelConfig::parse(GEMMA2.as_bytes()).unwrap();
        assert_eq!((config.family, config.head_dim), (Family::Gemma2, 256));
        assert_eq!((config.attention_scale, config.attention_cap), (0.0625, Some(50.0)));
        assert_eq!([0, 1, 2, 41].map(|layer| config.window(layer)), [Some(4096), None, Some(4096), None]);
        let types: Vec<&str> = (0..42).map(|i| ["full_attention", "sliding_attention"][i / 30]).collect();
        let config = with("layer_types", &serde_json::to_string(&types).unwrap()).unwrap();
        assert_eq!([0, 29, 30, 41].map(|layer| config.window(layer)), [None, None, Some(4096), Some(4096)]);
        assert_eq!(with("attn_logit_softcapping", "null").unwrap().attention_cap, None);
        assert_eq!(with("query_pre_attn_scalar", "144").unwrap().attention_scale, 1.0 / 12.0);
        assert_eq!(with("head_dim", "").unwrap().head_dim, 256);
    }

    #[test]
    fn unsupported_and_missing_keys_of_gemma_2_are_refused_by_name() {
        for (key, value) in [
            ("hidden_act", r#""silu""#),
            ("hidden_activation", r#""gelu""#),
            ("attn_logit_softcapping", ""),
            ("attn_logit_softcapping", "0"),
            ("final_logit_softcapping", ""),
            ("query_pre_attn_scalar", ""),
            ("query_pre_attn_scalar", "-1"),
            ("sliding_window", ""),
            ("sliding_window", "null"),
            ("sliding_window", "0"),
            ("layer_types", r#"["sliding_attention", "full_attention"]"#),
            ("layer_types", "7"),
            ("layer_types", &format!("[{}0]", r#""chunked_attention","#.repeat(41))),
            ("use_sliding_window", "true"),
            ("rope_parameters", r#"{"full_attention": {"rope_type": "default"}}"#),
            ("use_bidirectional_attention", "true"),
            ("mlp_bias", "true"),
        ] {
            let Err(ModelError::Config(message)) = with(key, value) else { panic!("{key} {value}") };
            assert!(message.contains(key), "{key} {value}: {message}");
        }
    }
}
