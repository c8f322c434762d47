//! Quantised weights with random codes.

use super::mix;
use flash_sampling::{DType, f16};

/// The standard deviation of the codes times their scale, and the mean of the codes, for uniform random bytes.
fn spread(dtype: DType) -> (f32, f32) {
    match dtype {
        DType::Q8_0 => (73.9, 0.0),
        DType::Q4_0 => (4.61, 0.0),
        DType::IQ4_NL => (72.0, 0.0),
        DType::MXFP4 => (5.83, 0.0),
        DType::Q4_K => (4.61 * 33.0, 7.5),
        DType::Q5_K => (9.23 * 33.0, 15.5),
        _ => (18.5 * 64.0, 0.0),
    }
}

/// Fills rows of `row_bytes` bytes with blocks whose weights have this standard deviation.
pub(super) fn fill(bytes: &mut [u8], first_row: usize, row_bytes: usize, dtype: DType, deviation: f32) {
    let (unit, mean) = spread(dtype);
    let factor = |value: f32| f16::from_f32(value).to_le_bytes();
    let (d, minimum) = (factor(deviation / unit), factor(deviation / unit * mean));
    let power = (128.0 + (deviation / unit).log2()).round() as u8;
    for (row, bytes) in bytes.chunks_mut(row_bytes).enumerate() {
        let key = mix(1 ^ mix((first_row + row) as u64));
        for (i, bytes) in (0u64..).zip(bytes.chunks_mut(8)) {
            let word = mix(key.wrapping_add(i)).to_le_bytes();
            bytes.copy_from_slice(&word[..bytes.len()]);
        }
    }
    for block in bytes.chunks_exact_mut(dtype.block_bytes()) {
        match dtype {
            DType::MXFP4 => block[0] = power,
            DType::Q4_K | DType::Q5_K => {
                block[..2].copy_from_slice(&d);
                block[2..4].copy_from_slice(&minimum);
                // All scales and minima are 33.
                block[4..12].fill(33 | 2 << 6);
                block[12..16].fill(0x11);
            }
            DType::Q6_K => {
                block[192..208].fill(64);
                block[208..].copy_from_slice(&d);
            }
            _ => block[..2].copy_from_slice(&d),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn parts_have_the_bytes_of_the_whole() {
        const ROWS: usize = 7;
        for dtype in DType::ALL.into_iter().filter(|dtype| dtype.block_elements() > 1) {
            // Rows that are not whole words of eight bytes.
            let row_bytes = 3 * dtype.block_bytes();
            let filled = |rows: std::ops::Range<usize>| {
                let mut bytes = vec![0; rows.len() * row_bytes];
                fill(&mut bytes, rows.start, row_bytes, dtype, 0.1);
                bytes
            };
            let whole = filled(0..ROWS);
            assert_eq!([filled(0..3), filled(3..6), filled(6..ROWS)].concat(), whole, "{dtype:?}");
            assert_ne!(whole[..row_bytes], whole[row_bytes..2 * row_bytes], "{dtype:?}: equal rows");
        }
    }
}
