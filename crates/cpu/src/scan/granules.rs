//! The words of a batch of granules, and which spans may hold a candidate.
//!
//! A 32-bit word occupies the low half of a 64-bit lane. A widening multiplication reads only low halves, so high
//! halves may hold any bits. A Philox round takes two multiplications, two shifts and four exclusive ors for all
//! blocks.

use crate::simd::Vector;
use flash_sampling_core::Noise;
use flash_sampling_core::noise::granule;

/// Philox blocks per batch: the number of 64-bit lanes of AVX-512. A block is the words of four granules.
pub(crate) const BLOCKS: usize = 8;

/// Random123's Philox multipliers.
pub(crate) const PHILOX_M4X32: [u32; 2] = [0xd251_1f53, 0xcd9e_8d57];
/// Random123's Weyl constants.
pub(crate) const PHILOX_W32: [u32; 2] = [0x9e37_79b9, 0xbb67_ae85];

/// The keys of the ten Philox rounds, from a row's seed.
pub(crate) type RoundKeys = [[u64; 2]; 10];

#[inline(always)]
pub(crate) fn round_keys(noise: &Noise) -> RoundKeys {
    let key = noise.key();
    let of_round = |round, k: usize| u64::from(key[k].wrapping_add(PHILOX_W32[k].wrapping_mul(round)));
    core::array::from_fn(|round| [of_round(round as u32, 0), of_round(round as u32, 1)])
}

/// The words of a batch of granules.
#[derive(Clone, Copy, Debug, Default)]
#[repr(align(64))]
pub(crate) struct Granules {
    /// `words[b][j]` belongs to granule `4 b + j`.
    pub(crate) words: [[u32; 4]; BLOCKS],
    /// The smallest minimum bits of the four granules of each block.
    pub(crate) least: [u32; BLOCKS],
}

/// A cache of granule words: the words of one draw of a row, for the current tile of a head and the next tiles.
///
/// A tile of a head has four blocks, fewer than a batch. Computing the words of four tiles at once takes little more
/// time than computing the words of one tile.
#[derive(Clone, Debug)]
pub(crate) struct WordsAhead {
    /// The first block of the cache; [`Self::NOWHERE`] if the cache is empty.
    first: u32,
    /// The smallest minimum bits of each block. Zeros follow, so that a whole batch can be read from any block on.
    least: [u32; Self::BLOCKS + BLOCKS],
    words: [[u32; 4]; Self::BLOCKS],
}

impl WordsAhead {
    /// The number of blocks that are computed at once.
    const BLOCKS: usize = 2 * BLOCKS;

    /// A block number far above every real block, so that no real block is in the cache.
    const NOWHERE: u32 = 1 << 31;

    /// An empty cache.
    pub(crate) const NONE: WordsAhead =
        WordsAhead { first: Self::NOWHERE, least: [0; Self::BLOCKS + BLOCKS], words: [[0; 4]; Self::BLOCKS] };

    /// Empties the cache.
    pub(crate) fn clear(&mut self) {
        self.first = Self::NOWHERE;
    }

    /// Returns the smallest minimum bits of a batch from `block` on, and the words of the first `count` blocks.
    ///
    /// `count` is at most [`BLOCKS`]. Only the first `count` minimum bits belong to the draw. `counter` is the Philox
    /// counter of `block`. Computes the words if the cache does not have all of them.
    ///
    /// # Safety
    /// The instruction set of `V` is available.
    #[inline(always)]
    pub(crate) unsafe fn at<V: Vector>(
        &mut self,
        block: u32,
        count: usize,
        keys: &RoundKeys,
        counter: [u32; 4],
    ) -> (&[u32; BLOCKS], &[[u32; 4]]) {
        if block.wrapping_sub(self.first) as usize > Self::BLOCKS - count {
            self.first = block;
            // SAFETY: by this function's contract.
            let batches: [Granules; 2] = unsafe { V::granules(counter, keys) };
            for (n, batch) in batches.into_iter().enumerate() {
                self.least[n * BLOCKS..][..BLOCKS].copy_from_slice(&batch.least);
                self.words[n * BLOCKS..][..BLOCKS].copy_from_slice(&batch.words);
            }
        }
        let at = (block - self.first) as usize;
        (self.least[at..].first_chunk().expect("a batch follows"), &self.words[at..at + count])
    }
}

/// Returns an upper bound of the sum of rounding errors of a Gumbel (below 7e-6), a threshold, and a score near `cut`.
#[inline(always)]
pub(crate) fn slack(cut: f32) -> f32 {
    4e-5 + 3e-7 * cut.abs()
}

/// The logit thresholds for a score cutoff: no token of a granule with a lower logit reaches the cutoff.
///
/// The map from the minimum bits `u` of a granule to a logit threshold: `base + SCALE bits(u)`, at least `floor`.
///
/// `bits(u)` is the bit pattern of the float `u`. `log2 u >= 2^-23 bits(u) - 127`, because `log2(1 + f) >= f` on
/// [0, 1]. So a threshold is never too high, and at most 0.06 nats too low.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Threshold {
    pub(crate) base: f32,
    pub(crate) floor: f32,
}

impl Threshold {
    pub(crate) const SCALE: f32 = core::f32::consts::LN_2 / 8_388_608.0;

    /// Creates the map for the score cutoff `cut`. No threshold is below `floor`.
    #[inline(always)]
    pub(crate) fn of(cut: f32, floor: f32) -> Self {
        Threshold { base: cut - slack(cut) - (127.0 + 32.0) * core::f32::consts::LN_2, floor }
    }

    /// Returns the logit threshold of a granule with this word.
    #[inline(always)]
    pub(crate) fn of_word(self, word: u32) -> f32 {
        self.of_bits(granule::minimum_bits(word))
    }

    /// Returns the logit threshold of a granule with these minimum bits.
    #[inline(always)]
    pub(crate) fn of_bits(self, least: u32) -> f32 {
        let bits = (least as i32 as f32).to_bits() as i32;
        let threshold = self.base + bits as f32 * Threshold::SCALE;
        if threshold > self.floor { threshold } else { self.floor }
    }
}

/// Computes a batch in plain Rust. `counter` is the Philox counter of the first block.
#[inline(always)]
pub(crate) fn granules(counter: [u32; 4], keys: &RoundKeys) -> Granules {
    let [first, c1, c2, c3] = counter;
    let mut batch = Granules { least: [u32::MAX; BLOCKS], ..Granules::default() };
    // Four blocks at a time fit 128-bit registers.
    const AT_ONCE: usize = 4;
    for from in (0..BLOCKS).step_by(AT_ONCE) {
        let (mut w0, mut w1) = ([0u64; AT_ONCE], [u64::from(c1); AT_ONCE]);
        let (mut w2, mut w3) = ([u64::from(c2); AT_ONCE], [u64::from(c3); AT_ONCE]);
        for (w0, block) in w0.iter_mut().zip(from as u32..) {
            *w0 = u64::from(first.wrapping_add(block));
        }
        for [k0, k1] in keys {
            for (((w0, w1), w2), w3) in w0.iter_mut().zip(&mut w1).zip(&mut w2).zip(&mut w3) {
                let p0 = (*w0 & 0xffff_ffff) * u64::from(PHILOX_M4X32[0]);
                let p1 = (*w2 & 0xffff_ffff) * u64::from(PHILOX_M4X32[1]);
                *w0 = (p1 >> 32) ^ *w1 ^ k0;
                *w1 = p1;
                *w2 = (p0 >> 32) ^ *w3 ^ k1;
                *w3 = p0;
            }
        }
        for (j, words) in [w0, w1, w2, w3].into_iter().enumerate() {
            for (b, word) in (from..).zip(words) {
                batch.words[b][j] = word as u32;
                batch.least[b] = batch.least[b].min(granule::minimum_bits(word as u32));
            }
        }
    }
    batch
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::simd::Plain;
    use flash_sampling_core::Domain;
    use flash_sampling_core::noise::log::ln;
    use granule::Granule;
    use proptest::prelude::*;

    fn threshold(word: u32, cut: f32) -> f32 {
        Threshold::of(cut, f32::NEG_INFINITY).of_word(word)
    }

    /// # Safety
    /// The instruction set of `V` is available.
    unsafe fn check<V: Vector>() {
        for (seed, position, draw, block) in [(0, 0, 0, 0), (!0, 1 << 40, 7, 1), (12345, 99, !0, u32::MAX - 3)] {
            let noise = Noise::new(seed, position).unwrap();
            let counter = noise.counter(Domain::Granule.code(), draw, block);
            // SAFETY: by this function's contract.
            let batches: [Granules; 2] = unsafe { V::granules(counter, &round_keys(&noise)) };
            let tops = core::array::from_fn(|b| 1.5 * b as f32);
            for (n, batch) in batches.iter().enumerate() {
                let block = block.wrapping_add((n * BLOCKS) as u32);
                for (b, block) in (0..BLOCKS).map(|b| (b, block.wrapping_add(b as u32))) {
                    assert_eq!(batch.words[b], noise.words(Domain::Granule, draw, block));
                    assert_eq!(batch.least[b], granule::minimum_bits(batch.words[b].into_iter().min().unwrap()));
                }
                for floor in [f32::NEG_INFINITY, 10.0] {
                    // SAFETY: by this function's contract.
                    let open = unsafe { V::open(&batch.least, Threshold::of(12.5, floor), &tops) };
                    for (b, top) in tops.iter().enumerate() {
                        let thresholds = batch.words[b].map(|word| threshold(word, 12.5).max(floor));
                        assert_eq!(open >> b & 1 == 1, thresholds.iter().any(|t| top >= t));
                    }
                }
            }
        }
    }

    #[test]
    fn every_instruction_set_has_the_scalar_words() {
        // SAFETY: each instruction set is checked first.
        unsafe {
            check::<Plain>();
            #[cfg(target_arch = "x86_64")]
            if crate::isa::Isa::Avx512.is_available() {
                check::<crate::simd::avx512::Avx512>();
            }
            #[cfg(target_arch = "aarch64")]
            if crate::isa::Isa::Neon.is_available() {
                check::<crate::simd::neon::Neon>();
            }
        }
    }

    #[test]
    fn words_ahead_are_the_words_of_every_block() {
        let (noise, mut ahead) = (Noise::new(7, 3).unwrap(), WordsAhead::NONE);
        for (block, count) in [(0, 4), (4, 4), (8, 4), (12, 4), (16, 2), (18, 8), (27, 8), (19, 1), (0, 8), (15, 1)] {
            let counter = noise.counter(Domain::Granule.code(), 3, block);
            // SAFETY: plain Rust is always available.
            let (least, words) = unsafe { ahead.at::<Plain>(block, count, &round_keys(&noise), counter) };
            let want: Vec<_> = (block..).take(count).map(|block| noise.words(Domain::Granule, 3, block)).collect();
            assert_eq!(words, want, "{block}");
            assert_eq!(least[..count], want.iter().map(|words| words.iter().min().unwrap() >> 4).collect::<Vec<_>>());
        }
    }

    proptest! {
        #[test]
        fn logits_below_the_threshold_cannot_reach_the_cut(
            word in prop_oneof![any::<u32>(), 0u32..9000, (0u32..32).prop_map(|k| 1 << k)], refinement: u32,
            token_word in prop_oneof![any::<u32>(), 0u32..99],
            cut in prop_oneof![-300f32..300.0, -1e6f32..1e6, Just(0.0)], below in prop_oneof![Just(0.0), 0f32..9.0],
        ) {
            let granule = Granule::of_word(word, || refinement);
            let logit = threshold(word, cut).next_down() - below;
            for token in [granule.leader, granule.leader ^ 1] {
                prop_assert!(logit - ln(granule.exponential(token, || token_word)) < cut);
            }
        }

        #[test]
        fn the_threshold_is_not_much_lower_than_it_must_be(word in 1u32 << 14..1 << 31, cut in -30f32..30.0) {
            let most = Granule::of_word(word, || 0).largest_gumbel();
            prop_assert!(threshold(word, cut) > cut - most - 0.43);
        }
    }
}
