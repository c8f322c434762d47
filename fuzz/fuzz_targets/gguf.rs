//! A GGUF file: the container, the configuration of a model, its tensors, and its tokenizer.
#![no_main]

use flash_sampling::Matrix;
use flash_sampling_cli::input::gguf::tokenizer;
use flash_sampling_cli::input::tensor::Role;
use flash_sampling_models::ModelConfig;
use flash_sampling_models::gguf::{Gguf, Value, tensor_names};
use libfuzzer_sys::fuzz_target;

/// Visits a value and all values in it, which no number in the file may multiply.
fn count(value: Value<'_>) -> usize {
    value.as_array().map_or(1, |array| {
        let inner: Vec<_> = array.iter().map(count).collect();
        assert_eq!(inner.len(), array.len());
        1 + inner.iter().sum::<usize>()
    })
}

fuzz_target!(|bytes: &[u8]| {
    let Ok(file) = Gguf::parse(bytes) else { return };
    for key in file.keys() {
        assert!(count(file.value(key).unwrap()) <= bytes.len());
        let _ = file.value(key).unwrap().to_string();
    }
    for name in file.names() {
        let Ok(found) = file.tensor(name) else { continue };
        assert_eq!(file.bytes(&found).len(), found.range.len());
        for role in [Role::Weight, Role::Layer] {
            if let Ok((rows, cols)) = role.rows_cols(name, &found.shape) {
                let matrix = Matrix::from_bytes(file.bytes(&found), found.dtype, rows, cols, cols);
                assert_eq!(matrix.map(|matrix| matrix.bytes().len()).ok(), Some(found.range.len()));
            }
        }
    }
    if let Ok(config) = ModelConfig::from_gguf(&file) {
        assert!(config.hidden > 0 && config.head_dim.is_multiple_of(2) && config.heads.is_multiple_of(config.kv_heads));
        assert!(config.layers <= bytes.len() && config.rope_theta > 0.0 && config.norm_eps >= 0.0);
        let _ = tensor_names(&file, &config);
    }
    if let Ok(found) = tokenizer(&file) {
        let tokens = found.tokenizer.encode("Once there was\u{1f98a} 12<s>", true);
        let Ok(tokens) = tokens else { return };
        assert!(tokens.get_ids().iter().all(|token| (*token as usize) < found.tokens));
        let _ = found.tokenizer.decode(tokens.get_ids(), false);
    }
});
