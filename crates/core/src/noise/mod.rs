//! Noise, version 1: the noise of (seed, position, draw, token) is a pure function, the same on every backend.
//!
//! Words are `philox4x32-10` (Salmon et al. 2011) of a [`counter`](counter::counter) under the row's seed; a word
//! becomes a Gumbel by [`uniform`]; the logarithms are in [`log`]. `docs/noise.md` draws the bits and derives the error
//! bounds. A change of anything here is value-breaking.

pub mod counter;
pub mod log;
mod rng;
pub mod uniform;

pub use counter::{Domain, POSITION_MAX};
pub use rng::NoiseRng;
pub use uniform::GUMBEL_MAX;

/// The noise of one row: its seed and its position in the sequence.
///
/// **Position** is the token's place in its sequence and comes from the caller; it is never a batch index, so a row's
/// noise does not depend on its neighbours.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Noise {
    key: [u32; 2],
    position: u64,
}

impl Noise {
    /// The noise of (seed, position); `None` when the position is above [`POSITION_MAX`].
    pub fn new(seed: u64, position: u64) -> Option<Self> {
        (position <= POSITION_MAX).then(|| Noise { key: counter::key(seed), position })
    }

    /// The Philox key.
    pub fn key(&self) -> [u32; 2] {
        self.key
    }

    /// The counter of a block of this row, for backends that compute many blocks at once.
    pub fn counter(&self, code: u8, draw: u32, block: u32) -> [u32; 4] {
        counter::counter(block, draw, self.position, code)
    }

    /// The four words of a block.
    pub fn words(&self, domain: Domain, draw: u32, block: u32) -> [u32; 4] {
        rand_philox::philox4x32_10(self.counter(domain.code(), draw, block), self.key)
    }

    /// The word of an index: block `index >> 2`, word `index & 3`.
    pub fn word(&self, domain: Domain, draw: u32, index: u32) -> u32 {
        self.words(domain, draw, index >> 2)[(index & 3) as usize]
    }

    /// The word that refines the tail of an index.
    pub fn refinement(&self, domain: Domain, draw: u32, index: u32) -> u32 {
        let block = self.counter(domain.refinement_code(), draw, index >> 2);
        rand_philox::philox4x32_10(block, self.key)[(index & 3) as usize]
    }

    /// The standard Gumbel of an index.
    pub fn gumbel(&self, domain: Domain, draw: u32, index: u32) -> f32 {
        self.gumbel_of_word(domain, draw, index, self.word(domain, draw, index))
    }

    /// The standard Gumbel of an index whose word is already at hand. Inlined, so that its fused multiply-adds are
    /// instructions where the caller has them.
    #[inline(always)]
    pub fn gumbel_of_word(&self, domain: Domain, draw: u32, index: u32, word: u32) -> f32 {
        uniform::gumbel(word, || self.refinement(domain, draw, index))
    }

    /// The merge coin of group `group`: a uniform in (0, 1) with 64 bits.
    pub fn coin(&self, draw: u32, group: u32) -> f64 {
        self.coin_of(Domain::MergeCoin, draw, group)
    }

    /// The coin that decides whether top choices are excluded: a uniform in (0, 1) with 64 bits.
    pub fn xtc_coin(&self) -> f64 {
        self.coin_of(Domain::Xtc, 0, 0)
    }

    /// A coin of a domain: a uniform in (0, 1) with 64 bits, from the first two words of a block.
    pub fn coin_of(&self, domain: Domain, draw: u32, block: u32) -> f64 {
        let words = self.words(domain, draw, block);
        uniform::coin_open([words[0], words[1]])
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn positions_end_where_the_counter_ends() {
        assert!(Noise::new(1, POSITION_MAX).is_some());
        assert!(Noise::new(1, POSITION_MAX + 1).is_none());
    }

    #[test]
    fn words_are_random123s() {
        // Random123 known answers for philox4x32-10 (vectors/philox4x32.txt holds the file that every backend reads).
        let pi = rand_philox::philox4x32_10(
            [0x243f_6a88, 0x85a3_08d3, 0x1319_8a2e, 0x0370_7344],
            [0xa409_3822, 0x299f_31d0],
        );
        assert_eq!(pi, [0xd16c_fe09, 0x94fd_cceb, 0x5001_e420, 0x2412_6ea1]);
        let zero = Noise::new(0, 0).unwrap().words(Domain::Token, 0, 0);
        assert_eq!(zero, [0x6627_e8d5, 0xe169_c58d, 0xbc57_ac4c, 0x9b00_dbd8]);
    }

    #[test]
    fn every_argument_changes_the_noise() {
        let base = Noise::new(1, 1).unwrap();
        let g = base.gumbel(Domain::Token, 1, 1);
        assert_ne!(g, Noise::new(2, 1).unwrap().gumbel(Domain::Token, 1, 1));
        assert_ne!(g, Noise::new(1, 2).unwrap().gumbel(Domain::Token, 1, 1));
        assert_ne!(g, Noise::new(1, 1 + (1 << 32)).unwrap().gumbel(Domain::Token, 1, 1));
        assert_ne!(g, base.gumbel(Domain::Group, 1, 1));
        assert_ne!(g, base.gumbel(Domain::Token, 2, 1));
        assert_ne!(g, base.gumbel(Domain::Token, 1, 2));
    }
}
