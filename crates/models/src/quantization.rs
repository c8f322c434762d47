//! The form of 8-bit weights, from the key `quantization_config` of `config.json`.

use crate::config::{find, wrong};
use crate::error::ModelError;
use serde_json::Value;

/// Names of the key. Early versions of `compressed-tensors` have the second name.
const KEYS: [&str; 2] = ["quantization_config", "compression_config"];
/// Formats of `compressed-tensors` that store a weight as one tensor of 8-bit elements.
const FORMATS: [&str; 3] = ["float-quantized", "int-quantized", "naive-quantized"];

/// Rows and columns of the block of a scale without a configuration, as in DeepSeek's and Qwen3's checkpoints.
pub const SCALE_BLOCK: [usize; 2] = [128, 128];

/// Rows and columns of the block of a scale, from the shape of the scales of a weight `[rows, cols]`: a scale for the
/// weight, for a row, or for a block of the given size.
///
/// # Errors
/// Another shape. The text lists the possible shapes.
pub fn scale_block(
    shape: &[usize],
    [rows, cols]: [usize; 2],
    [block_rows, block_cols]: [usize; 2],
) -> Result<[usize; 2], String> {
    let blocks = [rows.div_ceil(block_rows), cols.div_ceil(block_cols)];
    match *shape {
        [] | [1] | [1, 1] => Ok([rows, cols]),
        [n] | [n, 1] if n == rows => Ok([1, cols]),
        [n, m] if [n, m] == blocks => Ok([block_rows, block_cols]),
        _ => {
            let of_blocks = format!("{blocks:?} for blocks of {block_rows} x {block_cols}");
            Err(format!("[], [1], [{rows}], [{rows}, 1], or {of_blocks}"))
        }
    }
}

/// 8-bit weights with scales, in `F8_E4M3` or `I8`. The tensors themselves give the type of each weight.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Quantization {
    /// Rows and columns of the block of a scale. `None` if no key names them: a scale for each row or for each weight, or
    /// blocks of the usual size.
    pub scale_block: Option<[usize; 2]>,
}

impl Quantization {
    /// Parses `config.json`; `None` for weights that are not quantised. The key is at the top level or in `text_config`
    /// (multimodal models).
    ///
    /// # Errors
    /// [`ModelError::Config`]: not JSON, or a method other than `fp8` (e4m3) and `compressed-tensors` with symmetric 8-bit
    /// weights. The message names the key.
    pub fn parse(bytes: &[u8]) -> Result<Option<Self>, ModelError> {
        let json = serde_json::from_slice(bytes).map_err(|error| ModelError::Config(error.to_string()))?;
        Quantization::of(&json)
    }

    /// [`Quantization::parse`] for a parsed file.
    pub(crate) fn of(json: &Value) -> Result<Option<Self>, ModelError> {
        let places = [Some(json), find(json, "text_config")];
        let mut keys = places.into_iter().flatten().flat_map(|place| KEYS.map(|key| Some((key, find(place, key)?))));
        let Some((key, config)) = keys.find_map(|found| found) else { return Ok(None) };
        let parsed = match find(config, "quant_method").map(|method| (method, method.as_str())) {
            Some((_, Some("fp8"))) => fp8(config),
            Some((_, Some("compressed-tensors"))) => compressed_tensors(config),
            Some((method, _)) => {
                let supported = "fp8 and compressed-tensors are supported";
                Err(ModelError::Config(format!("quant_method is {method}; {supported}")))
            }
            None => Err(ModelError::Config("quant_method is missing".into())),
        };
        let inside = |error| match error {
            ModelError::Config(reason) => ModelError::Config(format!("{key}: {reason}")),
            error => error,
        };
        parsed.map(Some).map_err(inside)
    }
}

/// A key whose value is missing or one of `supported`.
fn one_of(json: &Value, key: &str, supported: &[&str]) -> Result<(), ModelError> {
    let is_supported = |value: &Value| value.as_str().is_some_and(|value| supported.contains(&value));
    find(json, key).filter(|value| !is_supported(value)).map_or(Ok(()), |value| Err(wrong(key, value)))
}

/// A key whose value is missing or equals `supported`.
fn equal(json: &Value, key: &str, supported: &Value) -> Result<(), ModelError> {
    find(json, key).filter(|value| *value != supported).map_or(Ok(()), |value| Err(wrong(key, value)))
}

/// A number of rows or columns.
fn length(value: &Value) -> Option<usize> {
    value.as_u64().filter(|n| (1..1 << 32).contains(n)).and_then(|n| usize::try_from(n).ok())
}

/// The rows and columns of a block: `[128, 128]` or `"128x128"`.
fn block(json: &Value, key: &str) -> Result<Option<[usize; 2]>, ModelError> {
    let Some(value) = find(json, key) else { return Ok(None) };
    let parts: Option<Vec<usize>> = match (value.as_array(), value.as_str()) {
        (Some(list), _) => list.iter().map(length).collect(),
        (None, Some(text)) => text.split('x').map(|part| part.parse().ok().filter(|n| *n > 0)).collect(),
        (None, None) => None,
    };
    parts.and_then(|parts| parts.try_into().ok()).map(Some).ok_or_else(|| wrong(key, value))
}

/// DeepSeek's and Qwen3's blocks, and one scale for each weight.
fn fp8(config: &Value) -> Result<Quantization, ModelError> {
    one_of(config, "fmt", &["e4m3", "float8_e4m3fn"])?;
    Ok(Quantization { scale_block: block(config, "weight_block_size")? })
}

fn compressed_tensors(config: &Value) -> Result<Quantization, ModelError> {
    one_of(config, "format", &FORMATS)?;
    if let Some(sparsity) = find(config, "sparsity_config") {
        one_of(sparsity, "format", &["dense"])?;
    }
    // Rotations of the hidden states.
    let is_empty = |value: &Value| value.as_object().is_some_and(serde_json::Map::is_empty);
    if let Some(value) = find(config, "transform_config").filter(|value| !is_empty(value)) {
        return Err(wrong("transform_config", value));
    }
    let mut quantization = Quantization::default();
    for group in find(config, "config_groups").and_then(Value::as_object).into_iter().flatten().map(|(_, group)| group)
    {
        one_of(group, "format", &FORMATS)?;
        let Some(weights) = find(group, "weights") else { continue };
        let found = weights_block(weights)?;
        match (quantization.scale_block, found) {
            (Some(one), Some(other)) if one != other => {
                let message = format!("config_groups has blocks of {one:?} and of {other:?}, which is not supported");
                return Err(ModelError::Config(message));
            }
            (old, found) => quantization.scale_block = old.or(found),
        }
    }
    Ok(quantization)
}

/// The block of a scale, from the object `weights` of a group.
fn weights_block(weights: &Value) -> Result<Option<[usize; 2]>, ModelError> {
    equal(weights, "num_bits", &8.into())?;
    one_of(weights, "type", &["int", "float"])?;
    equal(weights, "symmetric", &true.into())?;
    equal(weights, "dynamic", &false.into())?;
    one_of(weights, "actorder", &["weight", "static"])?;
    one_of(weights, "strategy", &["tensor", "channel", "group", "block"])?;
    // -1 stands for whole rows.
    match find(weights, "group_size").filter(|value| value.as_i64() != Some(-1)) {
        Some(value) => length(value).map(|cols| Some([1, cols])).ok_or_else(|| wrong("group_size", value)),
        None => block(weights, "block_structure"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parse(config: &str) -> Result<Option<Quantization>, ModelError> {
        Quantization::parse(format!(r#"{{"quantization_config": {config}}}"#).as_bytes())
    }

    fn compressed(format: &str, weights: &str) -> Result<Option<Quantization>, ModelError> {
        parse(&format!(
            r#"{{"quant_method": "compressed-tensors", "format": "{format}", "ignore": ["lm_head"], "sparsity_config": {{}},
                "transform_config": {{}}, "config_groups": {{"group_0": {{"targets": ["Linear"], "weights": {weights},
                "input_activations": {{"num_bits": 8, "dynamic": true, "strategy": "token"}}}}}}}}"#
        ))
    }

    #[test]
    fn the_forms_of_known_checkpoints_are_read() {
        let of = |scale_block| Some(Quantization { scale_block });
        let blocks =
            r#"{"quant_method": "fp8", "activation_scheme": "dynamic", "fmt": "e4m3", "weight_block_size": [128, 64]}"#;
        assert_eq!(parse(blocks).unwrap(), of(Some([128, 64])));
        assert_eq!(parse(r#"{"quant_method": "fp8", "activation_scheme": "static"}"#).unwrap(), of(None));
        let channel = |kind| {
            format!(
                r#"{{"num_bits": 8, "type": "{kind}", "symmetric": true, "strategy": "channel", "group_size": null}}"#
            )
        };
        assert_eq!(compressed("float-quantized", &channel("float")).unwrap(), of(None));
        assert_eq!(compressed("int-quantized", &channel("int")).unwrap(), of(None));
        for structure in [r#""128x32""#, "[128, 32]"] {
            let weights =
                format!(r#"{{"num_bits": 8, "type": "float", "strategy": "block", "block_structure": {structure}}}"#);
            assert_eq!(compressed("float-quantized", &weights).unwrap(), of(Some([128, 32])));
        }
        let group = r#"{"num_bits": 8, "type": "int", "strategy": "group", "group_size": 32, "actorder": "static"}"#;
        assert_eq!(compressed("int-quantized", group).unwrap(), of(Some([1, 32])));
        assert_eq!(Quantization::parse(b"{}").unwrap(), None);
        assert_eq!(Quantization::parse(br#"{"quantization_config": null}"#).unwrap(), None);
        for (outer, key) in [("text_config", "quantization_config"), ("unused", "compression_config")] {
            let config = r#"{"quant_method": "fp8"}"#;
            let json = format!(r#"{{"{outer}": {{"{key}": {config}}}, "compression_config": {config}}}"#);
            assert_eq!(Quantization::parse(json.as_bytes()).unwrap(), of(None), "{outer}");
        }
    }

    #[test]
    fn other_forms_are_refused_by_name() {
        let refused = |found: Result<_, ModelError>, says: &str| {
            let message = found.unwrap_err().to_string();
            assert!(message.starts_with("config.json: quantization_config: ") && message.contains(says), "{message}");
        };
        for method in ["awq", "gptq", "bitsandbytes", "mxfp4", "modelopt"] {
            let says = format!("quant_method is \"{method}\"; fp8 and compressed-tensors are supported");
            refused(parse(&format!(r#"{{"quant_method": "{method}"}}"#)), &says);
        }
        refused(parse("7"), "quant_method is missing");
        refused(parse(r#"{"quant_method": 7}"#), "quant_method is 7");
        refused(parse(r#"{"quant_method": "fp8", "fmt": "e5m2"}"#), "fmt is \"e5m2\"");
        for size in ["[128]", "[128, 0]", "[1, 2, 3]", "[1.5, 2]", "128", r#""128x""#] {
            refused(
                parse(&format!(r#"{{"quant_method": "fp8", "weight_block_size": {size}}}"#)),
                "weight_block_size is",
            );
        }
        refused(compressed("pack-quantized", "null"), "format is \"pack-quantized\"");
        for (key, value) in [
            ("num_bits", "4"),
            ("type", "\"nf\""),
            ("symmetric", "false"),
            ("dynamic", "true"),
            ("actorder", "\"group\""),
            ("strategy", "\"tensor_group\""),
            ("group_size", "0"),
            ("block_structure", "[0,1]"),
        ] {
            refused(compressed("int-quantized", &format!(r#"{{"{key}": {value}}}"#)), &format!("{key} is {value}"));
        }
        let with = |more: &str| parse(&format!(r#"{{"quant_method": "compressed-tensors", {more}}}"#));
        refused(with(r#""transform_config": {"config_groups": {}}"#), "transform_config is");
        refused(with(r#""sparsity_config": {"format": "sparse-24-bitmask"}"#), "format is \"sparse-24-bitmask\"");
        refused(with(r#""config_groups": {"a": {"format": "nvfp4-pack-quantized"}}"#), "format is \"nvfp4");
        let groups = r#""config_groups": {"a": {"weights": {"group_size": 32}}, "b": {"weights": {"group_size": 64}}}"#;
        refused(with(groups), "blocks of [1, 32] and of [1, 64]");
    }
}
