//! The counter and the key of every random word.
//!
//! ```text
//! key      k0 = seed bits 0..32      k1 = seed bits 32..64
//! counter  c0 = block                c1 = draw
//!          c2 = position bits 0..32  c3 = domain (bits 24..32) | position bits 32..56 (bits 0..24)
//! ```
//! A block has four words. For noise, the block is `index >> 2` and the word `index & 3`.

/// The largest position: the counter has 56 bits for it.
pub const POSITION_MAX: u64 = (1 << 56) - 1;

/// The use of a random word. No two uses share a word.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[repr(u8)]
pub enum Domain {
    /// The noise of a token within its granule; index = global token id.
    Token = 0,
    /// The outer noise of a group (paper Alg. I.2, line 6); index = group number.
    Group = 1,
    /// The coin of the binary merge (paper Alg. I.3, line 10); block = group number, two words.
    MergeCoin = 2,
    /// The outer noise of a shard (paper Alg. I.4, line 3); index = rank.
    Shard = 3,
    /// The acceptance test of speculative decoding; two words of block 0.
    Accept = 4,
    /// The draw from the residual law of speculative decoding, within its granule; index = global token id.
    Residual = 5,
    /// The stream of [`NoiseRng`](super::NoiseRng).
    Generator = 6,
    /// The coin of a row's exclude-top-choices filter; two words of block 0.
    Xtc = 7,
    /// The smallest exponential of sixteen tokens, and the token that has it; index = global token id >> 4.
    Granule = 8,
    /// [`Domain::Granule`] for [`Domain::Residual`].
    ResidualGranule = 9,
}

impl Domain {
    /// All domains, for tests and tables.
    pub const ALL: [Domain; 10] = [
        Domain::Token,
        Domain::Group,
        Domain::MergeCoin,
        Domain::Shard,
        Domain::Accept,
        Domain::Residual,
        Domain::Generator,
        Domain::Xtc,
        Domain::Granule,
        Domain::ResidualGranule,
    ];

    /// The code of the domain's words.
    pub const fn code(self) -> u8 {
        self as u8
    }

    /// The code of the words that refine the tail of this domain: its own code with the top bit set.
    pub const fn refinement_code(self) -> u8 {
        self as u8 | 0x80
    }

    /// The domain of the granules of this domain's indices; `None` if every index has independent noise.
    pub const fn granules(self) -> Option<Domain> {
        match self {
            Domain::Token => Some(Domain::Granule),
            Domain::Residual => Some(Domain::ResidualGranule),
            _ => None,
        }
    }
}

/// Packs a counter, injective in (block, draw, position, code) for positions up to [`POSITION_MAX`]. Drops higher bits.
#[inline(always)]
pub(super) const fn counter(block: u32, draw: u32, position: u64, code: u8) -> [u32; 4] {
    [block, draw, position as u32, (code as u32) << 24 | (position >> 32) as u32 & 0x00ff_ffff]
}

/// The Philox key of a seed.
#[inline(always)]
pub(super) const fn key(seed: u64) -> [u32; 2] {
    [seed as u32, (seed >> 32) as u32]
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    /// The inverse of `counter`, whose existence proves `counter` injective.
    fn unpack(c: [u32; 4]) -> (u32, u32, u64, u8) {
        let position = u64::from(c[2]) | u64::from(c[3] & 0x00ff_ffff) << 32;
        (c[0], c[1], position, (c[3] >> 24) as u8)
    }

    proptest! {
        #[test]
        fn counter_is_injective(block: u32, draw: u32, position in 0..=POSITION_MAX, code: u8) {
            prop_assert_eq!(unpack(counter(block, draw, position, code)), (block, draw, position, code));
        }
    }

    #[test]
    fn counter_is_injective_on_corners() {
        let mut seen = std::collections::HashSet::new();
        for block in [0, 1, u32::MAX] {
            for draw in [0, 1, u32::MAX] {
                for position in [0, 1, u64::from(u32::MAX), 1 << 32, POSITION_MAX] {
                    for domain in Domain::ALL {
                        for code in [domain.code(), domain.refinement_code()] {
                            assert!(seen.insert(counter(block, draw, position, code)));
                        }
                    }
                }
            }
        }
    }
}
