//! The physical limit: a plain streaming read.

use std::hint::black_box;

/// The exclusive-or of all bytes, in eight independent accumulators of eight words, so that only the loads take time.
pub fn fold(bytes: &[u8]) -> u64 {
    let mut sums = [[0u64; 8]; 8];
    let (blocks, rest) = bytes.as_chunks::<512>();
    for block in blocks {
        for (sum, line) in sums.iter_mut().zip(block.as_chunks::<64>().0) {
            for (sum, word) in sum.iter_mut().zip(line.as_chunks::<8>().0) {
                *sum ^= u64::from_ne_bytes(*word);
            }
        }
    }
    let rest = rest.iter().fold(0, |sum, byte| sum ^ u64::from(*byte));
    sums.as_flattened().iter().fold(rest, |sum, word| sum ^ word)
}

/// Reads all bytes once; each thread reads a contiguous part.
pub fn stream(bytes: &[u8], threads: usize) {
    let part = bytes.len().div_ceil(threads.max(1)).max(1);
    std::thread::scope(|scope| {
        for part in bytes.chunks(part) {
            scope.spawn(move || black_box(fold(part)));
        }
    });
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_byte_is_read() {
        let mut bytes = vec![0u8; 512 * 3 + 17];
        for at in [0, 63, 511, 512, 1535, 1536, 1552] {
            bytes[at] = 1;
            assert_ne!(fold(&bytes), 0, "byte {at}");
            bytes[at] = 0;
        }
        stream(&bytes, 3);
        stream(&[], 2);
    }
}
