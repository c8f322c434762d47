//! The transport of messages between ranks.

use core::time::Duration;

/// The default time limit of an exchange.
pub const TIME_LIMIT: Duration = Duration::from_secs(30);

/// Moves bytes between the ranks of a group.
///
/// # Contract
/// * `world` is at least 1, and `rank` is below `world`. Both never change, and each rank of the group exists once.
/// * All ranks of a group make the same sequence of calls. A call returns the messages of *that* call, at any speed of
///   the ranks: a fast rank must not overwrite a message that another rank has not yet read.
/// * Messages of [`all_gather`](Transport::all_gather) may have any length, 0 included, and different lengths on
///   different ranks.
/// * A rank may leave, hang, or not make the call. The other ranks then get an error that names the rank, at most half
///   a second after the transport's time limit. The other ranks neither hang nor get a result.
/// * A time limit of 0 allows one check for the messages. A limit beyond the range of the clock means no limit.
/// * After an error the group is unusable: later calls fail with [`TransportError::Broken`] and wait for no rank.
pub trait Transport: Send {
    /// Returns this rank's number, from 0.
    fn rank(&self) -> usize;

    /// Returns the number of ranks.
    fn world(&self) -> usize;

    /// Returns the time limit of an exchange.
    fn time_limit(&self) -> Duration;

    /// Sets the time limit of this rank's later exchanges.
    ///
    /// All ranks of a group need the same limit. A rank with a shorter limit gives up while the other ranks still wait,
    /// and may name ranks that are in time by their own limit.
    fn set_time_limit(&mut self, limit: Duration);

    /// Sends `mine` to every rank, and receives the message of each rank `r` in `all[r]`, this rank included.
    ///
    /// `all` gets exactly [`world`](Transport::world) entries; the call reuses the memory in it.
    ///
    /// # Errors
    /// [`TransportError`]; the content of `all` is then unspecified.
    fn all_gather(&mut self, mine: &[u8], all: &mut Vec<Vec<u8>>) -> Result<(), TransportError>;
}

/// Implements [`Transport`] for a pointer to a transport.
macro_rules! transport_behind {
    ($pointer:ty) => {
        impl<T: Transport + ?Sized> Transport for $pointer {
            fn rank(&self) -> usize {
                (**self).rank()
            }

            fn world(&self) -> usize {
                (**self).world()
            }

            fn time_limit(&self) -> Duration {
                (**self).time_limit()
            }

            fn set_time_limit(&mut self, limit: Duration) {
                (**self).set_time_limit(limit);
            }

            fn all_gather(&mut self, mine: &[u8], all: &mut Vec<Vec<u8>>) -> Result<(), TransportError> {
                (**self).all_gather(mine, all)
            }
        }
    };
}

transport_behind!(Box<T>);
transport_behind!(&mut T);

/// Why an exchange failed.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum TransportError {
    /// A rank left the group before the exchange: it was dropped, or its thread panicked.
    #[error("rank {rank} has left the group")]
    PeerLeft {
        /// The rank.
        rank: usize,
    },
    /// Ranks did not come to the exchange in time, or came and then fell silent: they hang, were stopped, or died
    /// without an error.
    #[error("{} did not come to the exchange within {limit:?}", named("rank", ranks))]
    TimedOut {
        /// The ranks, ascending; at least one.
        ranks: Vec<usize>,
        /// The time limit of the exchange.
        limit: Duration,
    },
    /// Every rank came to the exchange, but the exchange did not end: ranks make different calls, or the transport
    /// hangs.
    #[error("all ranks are there, but the exchange did not end within {limit:?}")]
    Stuck {
        /// The time limit of the exchange.
        limit: Duration,
    },
    /// An earlier exchange failed.
    #[error("an earlier exchange of this group failed")]
    Broken,
    /// The transport itself failed; `source` has the cause.
    #[error("the transport failed")]
    Failed {
        /// The error of the transport.
        #[source]
        source: Box<dyn core::error::Error + Send + Sync>,
    },
}

impl TransportError {
    /// Replaces the time limit that the error names, if any.
    ///
    /// A caller that waited for the rest of a limit can report the whole limit.
    pub fn with_limit(self, limit: Duration) -> Self {
        match self {
            TransportError::TimedOut { ranks, .. } => TransportError::TimedOut { ranks, limit },
            TransportError::Stuck { .. } => TransportError::Stuck { limit },
            error => error,
        }
    }
}

/// Formats a noun, in the plural if there are several numbers, and the numbers with commas between them.
pub(crate) fn named(what: &str, ranks: &[usize]) -> String {
    let numbers: Vec<_> = ranks.iter().map(usize::to_string).collect();
    format!("{what}{} {}", if ranks.len() == 1 { "" } else { "s" }, numbers.join(", "))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_error_names_the_whole_limit() {
        let [left, whole] = [1, 4].map(Duration::from_secs);
        let timed_out = |limit| TransportError::TimedOut { ranks: vec![1], limit };
        let stuck = |limit| TransportError::Stuck { limit };
        assert_eq!(timed_out(left).with_limit(whole).to_string(), timed_out(whole).to_string());
        assert_eq!(stuck(left).with_limit(whole).to_string(), stuck(whole).to_string());
        assert_eq!(TransportError::Broken.with_limit(whole).to_string(), TransportError::Broken.to_string());
    }

    #[test]
    fn one_is_a_rank_and_several_are_ranks() {
        let says = |ranks: &[usize]| {
            TransportError::TimedOut { ranks: ranks.to_vec(), limit: Duration::from_secs(2) }.to_string()
        };
        assert_eq!(says(&[3]), "rank 3 did not come to the exchange within 2s");
        assert_eq!(says(&[0, 3]), "ranks 0, 3 did not come to the exchange within 2s");
    }
}
