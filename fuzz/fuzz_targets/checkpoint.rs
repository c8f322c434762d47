//! `model.safetensors.index.json` and `config.json`.
#![no_main]

use flash_sampling_cli::load::checkpoint::Index;
use flash_sampling_cli::load::config::{HeadConfig, Scale};
use libfuzzer_sys::fuzz_target;

fuzz_target!(|bytes: &[u8]| {
    if let Ok(index) = Index::parse(bytes)
        && let Some(file) = index.file("lm_head.weight")
    {
        assert!(!file.contains('/') && file != "..");
    }
    if let Ok(config) = HeadConfig::parse(bytes) {
        assert!(config.vocab_size != Some(0) && config.soft_cap.is_none_or(|cap| cap > 0.0));
        assert!(!matches!(config.scale, Some((_, Scale::Factor(factor))) if factor.is_nan() || factor <= 0.0));
    }
});
