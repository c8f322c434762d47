//! The exchange between ranks.

/// Moves bytes between the ranks of a group.
///
/// # Contract
/// * `world` is at least 1 and `rank` is below it; both never change, and each rank of the group exists once.
/// * The group's ranks make the same sequence of [`all_gather`](Transport::all_gather) calls. A call returns the
///   messages of *that* call, whatever the speed of the ranks: one that runs ahead must not overwrite what another has
///   still to read.
/// * Messages may have any length, 0 included, and different lengths on different ranks.
/// * When a rank has gone and will not make the call, the others get an error in finite time, not a hang.
/// * After an error the group is of no further use.
pub trait Transport: Send {
    /// This rank's number, from 0.
    fn rank(&self) -> usize;

    /// Number of ranks.
    fn world(&self) -> usize;

    /// Gives `mine` to every rank and receives every rank's message: `all[r]` becomes that of rank `r`, this rank's own
    /// included. `all` gets exactly [`world`](Transport::world) entries; the memory in it is reused.
    ///
    /// # Errors
    /// [`TransportError`]; the content of `all` is then unspecified.
    fn all_gather(&mut self, mine: &[u8], all: &mut Vec<Vec<u8>>) -> Result<(), TransportError>;
}

impl<T: Transport + ?Sized> Transport for Box<T> {
    fn rank(&self) -> usize {
        (**self).rank()
    }

    fn world(&self) -> usize {
        (**self).world()
    }

    fn all_gather(&mut self, mine: &[u8], all: &mut Vec<Vec<u8>>) -> Result<(), TransportError> {
        (**self).all_gather(mine, all)
    }
}

/// Why an exchange failed.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum TransportError {
    /// A rank has gone (dropped, or its thread panicked) before the exchange.
    #[error("rank {rank} has left the group")]
    PeerLeft {
        /// The rank.
        rank: usize,
    },
    /// The transport itself failed; the source says how.
    #[error("the transport failed")]
    Failed {
        /// Its own error.
        #[source]
        source: Box<dyn core::error::Error + Send + Sync>,
    },
}
