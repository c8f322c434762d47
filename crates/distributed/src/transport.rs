//! The exchange between ranks.

use core::time::Duration;

/// How long an exchange takes at most, unless a transport is told otherwise.
pub const TIME_LIMIT: Duration = Duration::from_secs(30);

/// Moves bytes between the ranks of a group.
///
/// # Contract
/// * `world` is at least 1 and `rank` is below it; both never change, and each rank of the group exists once.
/// * The group's ranks make the same sequence of calls. A call returns the messages of *that* call, whatever the speed of
///   the ranks: one that runs ahead must not overwrite what another has still to read.
/// * Messages of [`all_gather`](Transport::all_gather) may have any length, 0 included, and different lengths on different
///   ranks.
/// * When a rank has gone, hangs, or will not make the call, the others get an error that names it within the transport's
///   time limit. No hang, no result. A limit of 0 is one look; one that no clock can count to is none.
/// * After an error the group is of no further use: later calls fail with [`TransportError::Broken`] and wait for nobody.
pub trait Transport: Send {
    /// This rank's number, from 0.
    fn rank(&self) -> usize;

    /// Number of ranks.
    fn world(&self) -> usize;

    /// How long an exchange takes at most.
    fn time_limit(&self) -> Duration;

    /// Changes that for later exchanges of this rank. The ranks of a group need the same: one that waits for less gives up
    /// while others still wait, and may name ranks that come in time by their limit.
    fn set_time_limit(&mut self, limit: Duration);

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

impl<T: Transport + ?Sized> Transport for &mut T {
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
    /// Ranks did not come to the exchange in time, or came and were not heard of again: they hang, were stopped, or died
    /// without a word.
    #[error("{} did not come to the exchange within {limit:?}", named("rank", ranks))]
    TimedOut {
        /// The ranks, ascending; at least one.
        ranks: Vec<usize>,
        /// The time limit of the exchange.
        limit: Duration,
    },
    /// Every rank came to the exchange, yet it did not end: ranks make different calls, the transport hangs, or a rank died
    /// so late in it that it was not missed.
    #[error("all ranks are there, but the exchange did not end within {limit:?}")]
    Stuck {
        /// The time limit of the exchange.
        limit: Duration,
    },
    /// An earlier exchange failed.
    #[error("an earlier exchange of this group failed")]
    Broken,
    /// The transport itself failed; the source says how.
    #[error("the transport failed")]
    Failed {
        /// Its own error.
        #[source]
        source: Box<dyn core::error::Error + Send + Sync>,
    },
}

impl TransportError {
    /// The same error with another limit, where it names one: what waited for a part of a limit tells the whole.
    pub fn with_limit(self, limit: Duration) -> Self {
        match self {
            TransportError::TimedOut { ranks, .. } => TransportError::TimedOut { ranks, limit },
            TransportError::Stuck { .. } => TransportError::Stuck { limit },
            error => error,
        }
    }
}

/// What they are, and their numbers with commas between them.
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
