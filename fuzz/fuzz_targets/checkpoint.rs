//! `model.safetensors.index.json`, `config.json` and `generation_config.json`.
#![no_main]

use flash_sampling_cli::input::checkpoint_files::parse_index;
use flash_sampling_cli::input::config::{HeadConfig, Scale};
use flash_sampling_models::{ModelConfig, Quantization};
use libfuzzer_sys::fuzz_target;

fuzz_target!(|bytes: &[u8]| {
    if let Ok(index) = parse_index(bytes)
        && let Some(file) = index.get("lm_head.weight")
    {
        assert!(!file.contains('/') && *file != "..");
    }
    if let Ok(config) = HeadConfig::parse(bytes) {
        assert!(config.vocab_size != Some(0) && config.soft_cap.is_none_or(|cap| cap > 0.0));
        assert!(!matches!(config.scale, Some((_, Scale::Factor(factor))) if factor.is_nan() || factor <= 0.0));
    }
    if let Ok(Some(Quantization { scale_block: Some(block) })) = Quantization::parse(bytes) {
        assert!(!block.contains(&0));
    }
    if let Ok(config) = ModelConfig::parse(bytes) {
        assert!(config.hidden > 0 && config.head_dim.is_multiple_of(2) && config.heads.is_multiple_of(config.kv_heads));
        assert!(config.rope_theta > 0.0 && config.norm_eps >= 0.0);
        assert!(config.attention_scale.is_normal() && config.attention_cap.is_none_or(|cap| cap > 0.0));
        assert!(config.window(0) != Some(0) && config.windows.len() <= config.layers.max(2));
        let _ = config.with_generation_config(bytes);
    }
});
