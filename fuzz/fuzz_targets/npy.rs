//! A `.npy` file: the data that its header describes are within the file.
#![no_main]

use flash_sampling_cli::input::npy::NpyHeader;
use libfuzzer_sys::fuzz_target;

fuzz_target!(|bytes: &[u8]| {
    let Ok(header) = NpyHeader::parse(bytes) else { return };
    assert!(header.data <= bytes.len());
    if let Ok((size, data)) = header.data_as(bytes, &[("<f4", 4, 4usize), ("<f2", 2, 2)], "floats") {
        assert_eq!(data.len(), header.shape.iter().product::<usize>() * size);
    }
});
