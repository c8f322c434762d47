//! The descriptor that a rank sends to the other ranks before they connect.

use crate::error::CudaError;
use std::hash::{BuildHasher, RandomState};
use std::sync::LazyLock;

/// First bytes of a descriptor; the last two digits are the version of the format.
const MAGIC: [u8; 4] = *b"fp05";
/// Bytes of a handle that opens memory in another process.
pub(crate) const HANDLE: usize = 64;
const DESCRIPTOR: usize = 4 + 5 * 8 + HANDLE;

/// A random number that identifies this process.
static PROCESS: LazyLock<u64> = LazyLock::new(|| RandomState::new().hash_one(std::process::id()));

/// A rank and its mailbox.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct PeerDescriptor {
    /// The process that owns the mailbox.
    pub(crate) process: u64,
    /// The mailbox's number in its process.
    pub(crate) mailbox: u64,
    pub(crate) rank: u32,
    pub(crate) world: u32,
    /// The maximum number of rows of a call.
    pub(crate) max_rows: u64,
    /// The number of logits in a row of the rank's matrix; 0 for a mailbox.
    pub(crate) vocab_size: u64,
    /// The handle that opens the mailbox in another process.
    pub(crate) handle: [u8; HANDLE],
}

impl PeerDescriptor {
    /// The number of this process.
    pub(crate) fn this_process() -> u64 {
        *PROCESS
    }

    pub(crate) fn encode(&self) -> Vec<u8> {
        let mut bytes = MAGIC.to_vec();
        let ranks = u64::from(self.rank) | u64::from(self.world) << 32;
        for word in [self.process, self.mailbox, ranks, self.max_rows, self.vocab_size] {
            bytes.extend_from_slice(&word.to_le_bytes());
        }
        bytes.extend_from_slice(&self.handle);
        bytes
    }

    /// Decodes a descriptor; `None` if the bytes are not a descriptor.
    fn decode(bytes: &[u8]) -> Option<PeerDescriptor> {
        let bytes: &[u8; DESCRIPTOR] = bytes.try_into().ok()?;
        let (magic, rest) = bytes.split_first_chunk::<4>()?;
        let (words, handle) = rest.split_last_chunk::<HANDLE>()?;
        let mut words = words.as_chunks::<8>().0.iter().map(|word| u64::from_le_bytes(*word));
        let mut word = || words.next();
        let (process, mailbox, ranks) = (word()?, word()?, word()?);
        let (max_rows, vocab_size) = (word()?, word()?);
        let (rank, world) = (ranks as u32, (ranks >> 32) as u32);
        let handle = *handle;
        (*magic == MAGIC).then_some(PeerDescriptor { process, mailbox, rank, world, max_rows, vocab_size, handle })
    }

    /// Decodes the descriptors of all ranks, in order, and checks them against this rank's own descriptor.
    pub(crate) fn decode_all(&self, descriptors: &[Vec<u8>]) -> Result<Vec<PeerDescriptor>, CudaError> {
        let refused = |rank, what: String| Err(CudaError::Rank { rank, what });
        if descriptors.len() != self.world as usize {
            return refused(
                self.rank as usize,
                format!("received {} descriptors for {} ranks", descriptors.len(), self.world),
            );
        }
        let mut all = Vec::with_capacity(descriptors.len());
        for (rank, bytes) in descriptors.iter().enumerate() {
            let Some(descriptor) = PeerDescriptor::decode(bytes) else {
                return refused(rank, "sent no descriptor of this version".into());
            };
            if (descriptor.rank as usize, descriptor.world) != (rank, self.world) {
                let (found, world) = (descriptor.rank, descriptor.world);
                return refused(rank, format!("says that it is rank {found} of {world}, not of {}", self.world));
            }
            if descriptor.max_rows != self.max_rows {
                return refused(rank, format!("is planned for {} rows, not {}", descriptor.max_rows, self.max_rows));
            }
            // A rank stores its logits in the matrices of the other ranks, with its own vocabulary as their row length.
            if descriptor.vocab_size != self.vocab_size {
                let (found, expected) = (descriptor.vocab_size, self.vocab_size);
                return refused(rank, format!("has a vocabulary of {found} tokens, not {expected}"));
            }
            all.push(descriptor);
        }
        if all[self.rank as usize] != *self {
            return refused(self.rank as usize, "received a descriptor for itself that it did not send".into());
        }
        Ok(all)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn descriptor(rank: u32) -> PeerDescriptor {
        let handle = [rank as u8; HANDLE];
        PeerDescriptor { process: 7, mailbox: 9, rank, world: 3, max_rows: 64, vocab_size: 1000, handle }
    }

    #[test]
    fn bytes_carry_a_descriptor() {
        let bytes = descriptor(2).encode();
        assert_eq!(PeerDescriptor::decode(&bytes), Some(descriptor(2)));
        for cut in 0..bytes.len() {
            assert_eq!(PeerDescriptor::decode(&bytes[..cut]), None);
        }
        assert_eq!(PeerDescriptor::decode(&[bytes.as_slice(), &[0]].concat()), None);
        let mut other = bytes;
        other[3] ^= 1;
        assert_eq!(PeerDescriptor::decode(&other), None);
    }

    #[test]
    fn ranks_that_differ_are_named() {
        let all = |change: fn(&mut Vec<PeerDescriptor>)| {
            let mut descriptors: Vec<_> = (0..3).map(descriptor).collect();
            change(&mut descriptors);
            let bytes: Vec<_> = descriptors.iter().map(PeerDescriptor::encode).collect();
            descriptor(0).decode_all(&bytes)
        };
        assert_eq!(all(|_| {}).unwrap(), [descriptor(0), descriptor(1), descriptor(2)]);
        let blamed = |change| match all(change) {
            Err(CudaError::Rank { rank, .. }) => rank,
            other => panic!("{other:?}"),
        };
        assert_eq!(blamed(|descriptors| descriptors[1].rank = 2), 1);
        assert_eq!(blamed(|descriptors| descriptors[2].world = 4), 2);
        assert_eq!(blamed(|descriptors| descriptors[2].max_rows = 65), 2);
        assert_eq!(blamed(|descriptors| descriptors[1].vocab_size = 1001), 1);
        let error = all(|descriptors| descriptors[2].vocab_size = 0).unwrap_err().to_string();
        assert!(error.contains("has a vocabulary of 0 tokens, not 1000"), "{error}");
        assert_eq!(blamed(|descriptors| descriptors[0].mailbox = 1), 0);
        assert_eq!(blamed(|descriptors| descriptors.truncate(2)), 0);
        assert!(matches!(descriptor(0).decode_all(&[vec![], vec![], vec![]]), Err(CudaError::Rank { rank: 0, .. })));
    }
}
