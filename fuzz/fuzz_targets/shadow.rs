//! The shadow of a weight in a file.
#![no_main]

use flash_sampling::{Matrix, ShadowFile};
use libfuzzer_sys::fuzz_target;

fuzz_target!(|bytes: &[u8]| {
    let weight = Matrix::new(&[0.0f32, 1.0, -2.0, 0.5], 2, 2).expect("a valid shape");
    if let Ok(file) = ShadowFile::new(bytes, &weight) {
        let shadow = file.shadow();
        assert_eq!((shadow.rows(), shadow.cols(), shadow.codes().len()), (2, 2, 128));
    }
});
