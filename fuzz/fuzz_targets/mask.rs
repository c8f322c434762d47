//! A file of masks: every requested row has a mask with a bit for every token.
#![no_main]

use flash_sampling_cli::input::mask::Masks;
use libfuzzer_sys::fuzz_target;

fuzz_target!(|bytes: &[u8]| {
    for (rows, vocab_size) in [(1, 1), (3, 64), (2, 33)] {
        if let Ok(masks) = Masks::parse(bytes, rows, vocab_size) {
            (0..rows).for_each(|row| assert!(masks.row(row).len() * 32 >= vocab_size));
        }
    }
});
