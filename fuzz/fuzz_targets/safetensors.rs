//! A safetensors file: the header, and every tensor that it names for each role.
#![no_main]

use flash_sampling_cli::input::safetensors::Header;
use flash_sampling_cli::input::tensor::Role;
use libfuzzer_sys::fuzz_target;

fuzz_target!(|bytes: &[u8]| {
    let Ok(header) = Header::parse(bytes) else { return };
    let names = ["w", "lm_head.weight"].map(String::from).into_iter().chain(header.only());
    for name in names {
        let Ok(found) = header.locate(&name) else { continue };
        assert!(found.range.start <= found.range.end && found.range.end <= bytes.len());
        for role in [Role::Weight, Role::Hidden, Role::Bias] {
            if let Ok((rows, cols)) = role.rows_cols(&name, &found.shape) {
                assert_eq!(found.dtype.bytes(rows * cols), Some(found.range.len()));
            }
        }
    }
});
