//! A safetensors file: the header, and every tensor that it names for each role.
#![no_main]

use flash_sampling_cli::input::safetensors::Header;
use flash_sampling_cli::input::tensor::Role;
use libfuzzer_sys::fuzz_target;

fuzz_target!(|bytes: &[u8]| {
    let Ok(header) = Header::parse(bytes) else { return };
    for name in [None, Some("w"), Some("lm_head.weight")] {
        let Ok(found) = header.locate(name) else { continue };
        assert!(found.range.start <= found.range.end && found.range.end <= bytes.len());
        for role in [Role::Weight, Role::Hidden, Role::Bias] {
            if let Ok((rows, cols)) = role.rows_cols(&found.name, &found.shape) {
                assert_eq!(rows * cols * found.dtype.size(), found.range.len());
            }
        }
    }
});
