//! The words of a mass histogram from another rank: accepted words can be merged and written again.
#![no_main]

use flash_sampling::backend::MassHistogram;
use libfuzzer_sys::fuzz_target;

fuzz_target!(|bytes: &[u8]| {
    // Sparse: the top edge's bits, then (bin, mass) pairs; all other bins are empty.
    let (Some((top, rest)), mut words) = (bytes.split_first_chunk::<4>(), vec![0u64; MassHistogram::WORDS]) else {
        return;
    };
    words[0] = u64::from(u32::from_le_bytes(*top));
    for pair in rest.as_chunks::<8>().0 {
        let word = u64::from_le_bytes(*pair);
        words[1 + (word >> 48) as usize % (MassHistogram::WORDS - 1)] = word & ((1 << 48) - 1);
    }
    let Some(histogram) = MassHistogram::from_words(&words) else { return };
    let (mut merged, mut again) = (MassHistogram::default(), Vec::new());
    merged.merge(&histogram);
    merged.merge(&MassHistogram::default());
    histogram.to_words(&mut again);
    assert_eq!(words, again);
    assert!(!merged.log_z().is_nan() && !histogram.log_z().is_nan());
});
