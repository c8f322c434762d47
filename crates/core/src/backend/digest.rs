//! Digests by which ranks detect that their calls differ, and a shadow in a file that its weight differs. Not
//! cryptographic.

use crate::matrix::Matrix;

/// An odd number near 2^64 divided by the golden ratio.
const FACTOR: u64 = 0x9e37_79b9_7f4a_7c15;

fn step(hash: u64, word: u64) -> u64 {
    let hash = (hash ^ word).wrapping_mul(FACTOR);
    hash ^ hash >> 29
}

/// The digest of words, in their order.
pub fn of_words(words: impl IntoIterator<Item = u64>) -> u64 {
    words.into_iter().fold(FACTOR, step)
}

/// The digest of blocks, of the words after the last block, and of the length.
fn of_blocks(blocks: impl ExactSizeIterator<Item = [u64; 4]>, rest: impl Iterator<Item = u64>, len: usize) -> u64 {
    let rest = rest.chain([len as u64]);
    // Most lists are empty: this path reduces the digest of a row without lists from 66 to 26 ns.
    if blocks.len() == 0 {
        return of_words(rest);
    }
    // Four independent chains, because each product waits for the product before it.
    let mut chains = [1, 2, 3, 4];
    for block in blocks {
        chains.iter_mut().zip(block).for_each(|(chain, word)| *chain = step(*chain, word));
    }
    of_words(chains.into_iter().chain(rest))
}

/// The digest of bytes, in their order.
pub fn of_bytes(bytes: &[u8]) -> u64 {
    let (words, last) = bytes.as_chunks::<8>();
    let (blocks, words) = words.as_chunks::<4>();
    let rest = words.as_flattened().iter().chain(last).map(|&byte| u64::from(byte));
    of_blocks(blocks.iter().map(|block| block.map(u64::from_le_bytes)), rest, bytes.len())
}

/// The digest of a matrix: of the [digests](of_bytes) of its rows' bytes, in their order. Type and shape do not count.
pub fn of_matrix(matrix: &Matrix<'_>) -> u64 {
    of_words((0..matrix.rows()).map(|row| of_bytes(matrix.row_bytes(row))))
}

/// The digest of numbers, in their order: tokens, or the words of a mask.
pub fn of_list(list: &[u32]) -> u64 {
    let (pairs, last) = list.as_chunks::<2>();
    let (blocks, pairs) = pairs.as_chunks::<4>();
    let rest = pairs.as_flattened().iter().chain(last).map(|&word| u64::from(word));
    let word = |[low, high]: [u32; 2]| u64::from(high) << 32 | u64::from(low);
    of_blocks(blocks.iter().map(|block| block.map(word)), rest, list.len())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::matrix::DType;
    use std::collections::HashSet;

    #[test]
    fn every_place_order_and_length_counts() {
        let list: Vec<u32> = (0..37).map(|i| i * i).collect();
        let bytes: Vec<u8> = (0..99).collect();
        let (mut lists, mut texts) = (HashSet::from([of_list(&list)]), HashSet::from([of_bytes(&bytes)]));
        for i in 0..list.len() {
            let mut other = list.clone();
            other[i] ^= 1 << (i % 32);
            assert!(lists.insert(of_list(&other)), "word {i}");
            assert!(lists.insert(of_list(&list[..i])), "{i} words");
            other = list.clone();
            other.rotate_left(i);
            assert!(i == 0 || lists.insert(of_list(&other)), "turned by {i}");
        }
        for i in 0..bytes.len() {
            let mut other = bytes.clone();
            other[i] ^= 1 << (i % 8);
            assert!(texts.insert(of_bytes(&other)), "byte {i}");
            assert!(texts.insert(of_bytes(&bytes[..i])), "{i} bytes");
        }
        assert_ne!(of_list(&[]), of_list(&[0]));
        assert_ne!(of_words([1, 2]), of_words([2, 1]));
    }

    /// Files hold digests of matrices.
    #[test]
    fn the_digest_of_a_matrix_does_not_depend_on_the_stride_and_never_changes() {
        let bytes: Vec<u8> = (0..90).collect();
        let matrix = |stride| Matrix::from_bytes(&bytes, DType::I8, 2, 40, stride).unwrap();
        assert_eq!(of_matrix(&matrix(40)), 0xb3c6_0fcc_65b2_76d0);
        assert_eq!(of_matrix(&matrix(40)), of_words([of_bytes(&bytes[..40]), of_bytes(&bytes[40..80])]));
        assert_eq!(of_matrix(&matrix(50)), of_words([of_bytes(&bytes[..40]), of_bytes(&bytes[50..])]));
    }
}
