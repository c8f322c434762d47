//! Noise, version 2: a pure function of (seed, position, draw, token), with the same bits on every backend.
//!
//! Words are `philox4x32-10` (Salmon et al. 2011) of a [counter](Noise::counter), keyed by the row's seed.
//! * [`granule`] draws the smallest exponential of sixteen tokens first.
//! * [`uniform`] maps a word to an exponential and a Gumbel.
//! * [`log`] has the logarithms.
//!
//! `docs/noise.md` shows the bit layouts, proves the law and derives the error bounds. Any change to this module is
//! value-breaking.

mod counter;
pub mod granule;
pub mod log;
mod rng;
pub mod uniform;

pub use counter::{Domain, POSITION_MAX};
use granule::Granule;
pub use rng::NoiseRng;

/// The noise of one row, from a seed and a position in the sequence.
///
/// The **position** is the token's index in its sequence. The caller supplies the position. A position is never a batch
/// index, so the noise of a row does not depend on neighbouring rows.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Noise {
    key: [u32; 2],
    position: u64,
}

impl Noise {
    /// Creates the noise of (seed, position); `None` if the position is above [`POSITION_MAX`].
    pub fn new(seed: u64, position: u64) -> Option<Self> {
        (position <= POSITION_MAX).then(|| Noise { key: counter::key(seed), position })
    }

    /// Returns the Philox key.
    pub fn key(&self) -> [u32; 2] {
        self.key
    }

    /// Returns the counter of a Philox block of this row, for backends that compute many blocks at once.
    pub fn counter(&self, code: u8, draw: u32, block: u32) -> [u32; 4] {
        counter::counter(block, draw, self.position, code)
    }

    /// Returns the four words of a Philox block.
    pub fn words(&self, domain: Domain, draw: u32, block: u32) -> [u32; 4] {
        rand_philox::philox4x32_10(self.counter(domain.code(), draw, block), self.key)
    }

    /// Returns the word of an index: Philox block `index >> 2`, word `index & 3`.
    pub fn word(&self, domain: Domain, draw: u32, index: u32) -> u32 {
        self.words(domain, draw, index >> 2)[(index & 3) as usize]
    }

    /// Returns the word that refines the tail of an index.
    pub fn refinement(&self, domain: Domain, draw: u32, index: u32) -> u32 {
        let block = self.counter(domain.refinement_code(), draw, index >> 2);
        rand_philox::philox4x32_10(block, self.key)[(index & 3) as usize]
    }

    /// Returns the standard Gumbel of an index.
    ///
    /// A token or a residual token draws from its [granule](Noise::granule): two Philox blocks and three logarithms, or
    /// one block and two logarithms for the granule's leader. A group or a shard draws from one word.
    pub fn gumbel(&self, domain: Domain, draw: u32, index: u32) -> f32 {
        match domain.granules() {
            Some(granules) => {
                let word = self.word(granules, draw, granule::of(index));
                self.gumbel_in(&self.granule(domain, draw, index, word), domain, draw, index)
            }
            None => uniform::gumbel(self.word(domain, draw, index), || self.refinement(domain, draw, index)),
        }
    }

    /// Returns the granule of `token` in `domain` ([`Domain::Token`] or [`Domain::Residual`]).
    ///
    /// The caller passes the granule's word, `word(domain.granules(), draw, token >> 4)`.
    #[inline(always)]
    pub fn granule(&self, domain: Domain, draw: u32, token: u32, word: u32) -> Granule {
        let granules = domain.granules().unwrap_or(Domain::Granule);
        Granule::of_word(word, || self.refinement(granules, draw, granule::of(token)))
    }

    /// Returns the standard Gumbel of a token in `granule`.
    ///
    /// Inlined, so that fused multiply-adds compile to the instructions of the caller's target features.
    #[inline(always)]
    pub fn gumbel_in(&self, granule: &Granule, domain: Domain, draw: u32, token: u32) -> f32 {
        -log::ln(granule.exponential(token, || self.word(domain, draw, token)))
    }

    /// Returns the merge coin of group `group`: a uniform in (0, 1) with 64 bits.
    pub fn coin(&self, draw: u32, group: u32) -> f64 {
        self.coin_of(Domain::MergeCoin, draw, group)
    }

    /// Returns the coin of the XTC filter (exclude top choices): a uniform in (0, 1) with 64 bits.
    pub fn xtc_coin(&self) -> f64 {
        self.coin_of(Domain::Xtc, 0, 0)
    }

    /// Returns a coin of a domain: a uniform in (0, 1) with 64 bits, from the first two words of a Philox block.
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
        // Random123's known answers for philox4x32-10. Every backend reads them from tests/vectors/philox4x32.txt.
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
        assert_ne!(g, base.gumbel(Domain::Residual, 1, 1));
    }

    #[test]
    fn residual_noise_keeps_its_bits() {
        let noise = Noise::new(0x1234_5678_9abc_def0, 1 << 40).unwrap();
        let bits: Vec<u32> = (0..4).map(|i| noise.gumbel(Domain::Residual, 7, 5 * i + 2).to_bits()).collect();
        assert_eq!(bits, [3_209_660_170, 3_214_413_834, 1_051_963_650, 1_066_920_955]);
        let word = noise.word(Domain::ResidualGranule, 7, 0);
        assert_eq!((word, noise.refinement(Domain::ResidualGranule, 7, 0)), (3_676_038_400, 3_141_875_822));
    }

    #[test]
    fn tokens_of_a_granule_share_its_word_and_residual_tokens_do_not() {
        let noise = Noise::new(3, 4).unwrap();
        for token in [0, 15, 16, 1 << 20, u32::MAX] {
            let word = noise.word(Domain::Granule, 2, token >> 4);
            let granule = noise.granule(Domain::Token, 2, token, word);
            assert_eq!(granule.leader, word & 15);
            let gumbels = |domain| (0..16).map(move |i| noise.gumbel(domain, 2, (token & !15) + i));
            let (at, best) = gumbels(Domain::Token).enumerate().max_by(|a, b| a.1.total_cmp(&b.1)).unwrap();
            assert_eq!((at as u32, best), (granule.leader, granule.largest_gumbel()));
            assert!(gumbels(Domain::Token).zip(gumbels(Domain::Residual)).all(|(a, b)| a != b));
        }
    }
}
