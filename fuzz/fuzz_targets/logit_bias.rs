//! `--logit-bias`: the library accepts all accepted values.
#![no_main]

use flash_sampling_cli::input::TensorPath;
use flash_sampling_cli::input::logit_bias;
use libfuzzer_sys::fuzz_target;

fuzz_target!(|text: &str| {
    if let Ok(entries) = logit_bias::parse(text) {
        assert!(entries.values().all(|value| *value < f32::INFINITY));
    }
    let _ = TensorPath::parse(text);
});
