//! The noise as a seekable random generator.

use super::{Domain, Noise};
use core::convert::Infallible;
use rand_core::TryRng;

/// A [`rand_core`] generator over the words of [`Domain::Generator`].
///
/// Code around the sampler can use it for random numbers that replay with the draws. A stream has 2^66 words in blocks
/// of four. [`NoiseRng::seek`] takes constant time.
#[derive(Clone, Debug)]
pub struct NoiseRng {
    noise: Noise,
    block: u64,
    words: [u32; 4],
    /// Number of used words of the current block; 4 = none left.
    used: usize,
}

impl NoiseRng {
    /// A generator at the start of the stream of (seed, position).
    pub fn new(noise: Noise) -> Self {
        NoiseRng { noise, block: 0, words: [0; 4], used: 4 }
    }

    /// Moves to the first word of a block of four words.
    pub fn seek(&mut self, block: u64) {
        self.block = block;
        self.used = 4;
    }
}

impl TryRng for NoiseRng {
    type Error = Infallible;

    fn try_next_u32(&mut self) -> Result<u32, Infallible> {
        if self.used == 4 {
            self.words = self.noise.words(Domain::Generator, (self.block >> 32) as u32, self.block as u32);
            self.block = self.block.wrapping_add(1);
            self.used = 0;
        }
        self.used += 1;
        Ok(self.words[self.used - 1])
    }

    fn try_next_u64(&mut self) -> Result<u64, Infallible> {
        let low = self.try_next_u32()?;
        Ok(u64::from(low) | u64::from(self.try_next_u32()?) << 32)
    }

    fn try_fill_bytes(&mut self, bytes: &mut [u8]) -> Result<(), Infallible> {
        for chunk in bytes.chunks_mut(4) {
            chunk.copy_from_slice(&self.try_next_u32()?.to_le_bytes()[..chunk.len()]);
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use rand_core::Rng;

    #[test]
    fn seeking_replays_the_stream() {
        let noise = Noise::new(7, 3).unwrap();
        let mut rng = NoiseRng::new(noise);
        let stream: Vec<u32> = (0..64).map(|_| rng.next_u32()).collect();
        rng.seek(5);
        assert_eq!(rng.next_u32(), stream[20]);
        let mut bytes = [0; 6];
        rng.seek(0);
        rng.fill_bytes(&mut bytes);
        assert_eq!(bytes[..4], stream[0].to_le_bytes());
        assert_eq!(bytes[4..], stream[1].to_le_bytes()[..2]);
        rng.seek(0);
        assert_eq!(rng.next_u64(), u64::from(stream[0]) | u64::from(stream[1]) << 32);
    }
}
