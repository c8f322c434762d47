//! The parameters of the LM head in a checkpoint's `config.json`.

use crate::input::Problem;
use crate::output::line;
pub use flash_sampling_models::gguf::Scale;
use serde_json::Value;

/// The parameters of the head; `None` for a missing key.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct HeadConfig {
    /// Tokens of the vocabulary; further rows of the weight are padding.
    pub vocab_size: Option<usize>,
    /// Whether the input embedding is the head.
    pub tied: Option<bool>,
    /// `final_logit_softcapping` (Gemma 2): logits become `cap * tanh(l / cap)`.
    pub soft_cap: Option<f32>,
    /// The factor of the logits, and its key. Unclear: a value that is not a positive number (MPT allows the name of a
    /// formula), or two keys.
    pub scale: Option<(&'static str, Scale)>,
}

/// Keys that scale the logits, and whether their value is a divisor.
const SCALE_KEYS: [(&str, bool); 3] = [
    ("logit_scale", false),        // Cohere, MPT
    ("lm_head_multiplier", false), // Falcon H1
    ("logits_scaling", true),      // Granite
];

fn invalid(reason: String) -> Problem {
    Problem::Format { format: "config.json", reason }
}

/// The value of a key, if there is one.
fn read<T>(key: &str, value: Option<&Value>, parse: impl Fn(&Value) -> Option<T>) -> Result<Option<T>, Problem> {
    let parse = |value| parse(value).ok_or_else(|| invalid(format!("{key} is {}", line::name(&value.to_string()))));
    value.map(parse).transpose()
}

impl HeadConfig {
    /// Parses `config.json`. Keys are at the top level or in `text_config` (multimodal models).
    ///
    /// # Errors
    /// [`Problem::Format`]: not a JSON object, or a key with an invalid value.
    pub fn parse(bytes: &[u8]) -> Result<Self, Problem> {
        let json: Value = serde_json::from_slice(bytes).map_err(|error| invalid(error.to_string()))?;
        if !json.is_object() {
            return Err(invalid("it is not an object".into()));
        }
        let find = |key: &str| json.get(key).or_else(|| json.get("text_config")?.get(key)).filter(|v| !v.is_null());
        let positive = |value: &Value| value.as_f64().map(|f| f as f32).filter(|f| f.is_finite() && *f > 0.0);
        let size = |value: &Value| value.as_u64().and_then(|n| usize::try_from(n).ok()).filter(|n| *n > 0);
        let vocab_size = read("vocab_size", find("vocab_size"), size)?;
        let tied = read("tie_word_embeddings", find("tie_word_embeddings"), Value::as_bool)?;
        let soft_cap = read("final_logit_softcapping", find("final_logit_softcapping"), positive)?;
        let mut scale = None;
        for (key, divides) in SCALE_KEYS {
            let Some(value) = find(key) else { continue };
            let factor = positive(value).map(|f| if divides { 1.0 / f } else { f });
            let clear = factor.filter(|_| scale.is_none());
            scale = Some((key, clear.map_or(Scale::Unclear, Scale::Factor)));
        }
        Ok(HeadConfig { vocab_size, tied, soft_cap, scale })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parse(text: &str) -> HeadConfig {
        HeadConfig::parse(text.as_bytes()).unwrap()
    }

    #[test]
    fn keys_of_known_models_are_read() {
        assert_eq!(parse("{}"), HeadConfig::default());
        let gemma = parse(r#"{"text_config": {"vocab_size": 262208, "final_logit_softcapping": 30.0}}"#);
        assert_eq!((gemma.vocab_size, gemma.soft_cap), (Some(262_208), Some(30.0)));
        let cohere = parse(r#"{"logit_scale": 0.0625, "tie_word_embeddings": true, "final_logit_softcapping": null}"#);
        assert_eq!((cohere.scale, cohere.tied), (Some(("logit_scale", Scale::Factor(0.0625))), Some(true)));
        assert_eq!(parse(r#"{"logits_scaling": 8}"#).scale, Some(("logits_scaling", Scale::Factor(0.125))));
    }

    #[test]
    fn unclear_values_are_not_guessed() {
        assert_eq!(parse(r#"{"logit_scale": "inv_sqrt_d_model"}"#).scale, Some(("logit_scale", Scale::Unclear)));
        let both = parse(r#"{"logit_scale": 2, "logits_scaling": 8}"#);
        assert_eq!(both.scale, Some(("logits_scaling", Scale::Unclear)));
        for text in ["[]", "{", r#"{"vocab_size": -1}"#, r#"{"tie_word_embeddings": 1}"#] {
            assert!(HeadConfig::parse(text.as_bytes()).is_err(), "{text}");
        }
    }
}
