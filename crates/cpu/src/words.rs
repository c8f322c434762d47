//! The words of 64 consecutive tokens at once: `philox4x32-10` over sixteen blocks, written so that it vectorises.

use flash_sampling_core::{Domain, Noise};

/// Tokens of a call: sixteen blocks of four words.
pub(crate) const SPAN: usize = 64;
const LANES: usize = SPAN / 4;

/// Random123's multipliers and Weyl constants.
const PHILOX_M4X32_0: u32 = 0xd251_1f53;
const PHILOX_M4X32_1: u32 = 0xcd9e_8d57;
const PHILOX_W32_0: u32 = 0x9e37_79b9;
const PHILOX_W32_1: u32 = 0xbb67_ae85;

type Lane = [u32; LANES];

#[inline(always)]
fn multiply(a: &Lane, m: u32) -> (Lane, Lane) {
    let mut high = [0; LANES];
    let mut low = [0; LANES];
    for i in 0..LANES {
        let product = u64::from(a[i]) * u64::from(m);
        high[i] = (product >> 32) as u32;
        low[i] = product as u32;
    }
    (high, low)
}

/// The token noise words of `first .. first + 64`, `first` a multiple of 4: word `j` of lane `i` is that of token
/// `first + 4 i + j`.
#[inline(always)]
pub(crate) fn token_words(noise: &Noise, draw: u32, first: u32) -> [Lane; 4] {
    let [block, c1, c2, c3] = noise.counter(Domain::Token.code(), draw, first >> 2);
    let mut c = [[0; LANES], [c1; LANES], [c2; LANES], [c3; LANES]];
    for (i, lane) in c[0].iter_mut().enumerate() {
        *lane = block.wrapping_add(i as u32);
    }
    let [mut k0, mut k1] = noise.key();
    for _ in 0..10 {
        let (high0, low0) = multiply(&c[0], PHILOX_M4X32_0);
        let (high1, low1) = multiply(&c[2], PHILOX_M4X32_1);
        for i in 0..LANES {
            c[0][i] = high1[i] ^ c[1][i] ^ k0;
            c[2][i] = high0[i] ^ c[3][i] ^ k1;
        }
        c[1] = low1;
        c[3] = low0;
        k0 = k0.wrapping_add(PHILOX_W32_0);
        k1 = k1.wrapping_add(PHILOX_W32_1);
    }
    c
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_words_are_the_scalar_ones() {
        for (seed, position, draw, first) in [(0, 0, 0, 0), (!0, 1 << 40, 7, 4), (12345, 99, !0, u32::MAX - 63)] {
            let noise = Noise::new(seed, position).unwrap();
            let words = token_words(&noise, draw, first);
            for i in 0..SPAN as u32 {
                let want = noise.word(Domain::Token, draw, first.wrapping_add(i));
                assert_eq!(words[(i % 4) as usize][(i / 4) as usize], want);
            }
        }
    }
}
