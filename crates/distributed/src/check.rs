//! The debug check that every rank came to the same results.

use crate::error::ShardError;
use crate::summary::digest;
use flash_sampling_core::Samples;

/// A digest of each row's tokens and scores, or of its error.
pub(crate) fn encode(samples: &Samples, bytes: &mut Vec<u8>) {
    bytes.clear();
    for row in samples.iter() {
        let word = match row {
            Ok(row) => digest(row.draws.iter().flat_map(|d| [u64::from(d.token), u64::from(d.score.to_bits())])),
            Err(error) => digest(error.to_string().bytes().map(u64::from)),
        };
        bytes.extend_from_slice(&word.to_le_bytes());
    }
}

/// Compares the digests of all ranks with this rank's.
pub(crate) fn compare(mine: &[u8], all: &[Vec<u8>]) -> Result<(), ShardError> {
    let Some((shard, theirs)) = all.iter().enumerate().find(|(_, theirs)| *theirs != mine) else { return Ok(()) };
    let (mine, theirs) = (mine.as_chunks::<8>().0, theirs.as_chunks::<8>().0);
    let row = mine.iter().zip(theirs).position(|(a, b)| a != b).unwrap_or(mine.len().min(theirs.len()));
    Err(ShardError::Disagree { shard, row })
}
