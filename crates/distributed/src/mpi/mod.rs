//! The transport between processes that MPI started.
//!
//! Every exchange is a nonblocking collective of the MPI library, polled until it is done or the time limit is over. A
//! timeout alone does not name the missing rank. So a rank that waits long sends heartbeats to the others by
//! point-to-point messages, and queries them when the limit is over. The error names the silent ranks (`liveness`). An
//! exchange that does not end leaks its buffers, since the library may still write to them. Such a group is not shut
//! down, since the shutdown waits for the missing ranks.

mod collectives;
mod liveness;

use crate::transport::{TIME_LIMIT, Transport, TransportError};
use collectives::Collectives;
use core::time::Duration;
use mpi::Threading;
use mpi::environment::Universe;
use mpi::topology::{Communicator, SimpleCommunicator};
use std::time::Instant;

/// One rank of a group of processes (`mpirun -n 4 ...`), over an MPI library.
///
/// Dropping it shuts MPI down if [`Mpi::start`] began it and no exchange has failed. The shutdown waits for the other
/// ranks to do the same.
pub struct Mpi {
    rank: usize,
    world: usize,
    /// This rank's number among the ranks of this host, and the number of these ranks.
    on_host: (usize, usize),
    limit: Duration,
    is_broken: bool,
    /// Messages of at most this many bytes travel in one collective. Every rank has the same value: it follows from the
    /// lengths of earlier messages, which all ranks know.
    block: usize,
    sent: Vec<u8>,
    received: Vec<u8>,
    // Fields are dropped in order: the communicator, then the library.
    collectives: Option<Collectives>,
    universe: Option<Universe>,
}

/// The smallest block of an all-gather: the size of a few rows.
const SMALLEST_BLOCK: usize = 256;
/// The largest block: a longer message always takes a second collective.
const LARGEST_BLOCK: usize = 1 << 16;
/// Bytes in front of a block, for the message's whole length.
const LENGTH: usize = size_of::<u64>();

impl Mpi {
    /// Starts MPI; this process becomes a rank of all processes of the launch. The library waits here for the other
    /// ranks, without a limit: [`Mpi::with_time_limit`] applies to later exchanges.
    ///
    /// # Errors
    /// [`TransportError::Failed`] when MPI has been started in this process before (see [`Mpi::over`]) or cannot be
    /// used from one thread after another.
    pub fn start() -> Result<Mpi, TransportError> {
        let (universe, threading) = mpi::initialize_with_threading(Threading::Serialized)
            .ok_or_else(|| failed("MPI has been started in this process before"))?;
        if threading < Threading::Serialized {
            return Err(failed("this MPI library cannot be used from one thread after another"));
        }
        let world = universe.world();
        // The library allows calls from one thread after another.
        let mut mpi = Mpi::of(&world)?;
        mpi.universe = Some(universe);
        Ok(mpi)
    }

    /// One rank of a group that exists. A collective call: the communicator is duplicated, and split by hosts.
    ///
    /// # Errors
    /// [`TransportError::Failed`], with the error of the library.
    ///
    /// # Safety
    /// * MPI is not shut down while this value lives.
    /// * The library was started so that this value may be used where it is: `Funneled` allows the main thread only,
    ///   `Serialized` one thread at a time in the whole process, `Multiple` every thread.
    #[allow(unsafe_code)]
    pub unsafe fn over(communicator: &SimpleCommunicator) -> Result<Mpi, TransportError> {
        Mpi::of(communicator)
    }

    /// [`Mpi::over`]; its contract is met by the callers in this module.
    fn of(communicator: &SimpleCommunicator) -> Result<Mpi, TransportError> {
        let (rank, world) = (communicator.rank(), communicator.size());
        let collectives = Collectives::new(communicator.duplicate(), communicator.duplicate())?;
        let host = communicator.split_shared(rank);
        Ok(Mpi {
            rank: rank as usize,
            world: world as usize,
            on_host: (host.rank() as usize, host.size() as usize),
            limit: TIME_LIMIT,
            is_broken: false,
            block: SMALLEST_BLOCK,
            sent: Vec::new(),
            received: Vec::new(),
            collectives: Some(collectives),
            universe: None,
        })
    }

    /// This rank's number among the ranks of its host, from 0: the number of its GPU if each rank has one.
    pub fn rank_on_host(&self) -> usize {
        self.on_host.0
    }

    /// Number of ranks on this rank's host, where host means processes that can share memory.
    pub fn world_on_host(&self) -> usize {
        self.on_host.1
    }

    /// Sets the time limit of each exchange, in place of [`TIME_LIMIT`]. Every rank needs the same limit.
    ///
    /// A waiting rank sends a heartbeat in every eighth of the limit. At the end of the limit it queries all other
    /// ranks, and waits for replies for 0.35 s, or half of the limit if that is shorter. Then the exchange fails. The
    /// error names the ranks that did not come, and those that came but were silent for three eighths of the limit. If
    /// there are none, it names the ranks that did not reply, such as a rank that was stopped a moment ago. So a rank
    /// is named at most half a second after the limit.
    ///
    /// A rank whose exchange ends within an eighth of the limit sends no heartbeat. If the exchange does not end for
    /// other ranks, and this rank makes no other exchange while they wait, the error also names this rank.
    ///
    /// Neither starting MPI nor shutting it down is an exchange.
    pub fn with_time_limit(mut self, limit: Duration) -> Self {
        self.limit = limit;
        self
    }

    /// Makes one collective over blocks; `sent` has this rank's block, `received` gets all blocks.
    fn gather_blocks(&mut self, collectives: &mut Collectives, left: Duration) -> Result<(), TransportError> {
        let (sent, received) = (core::mem::take(&mut self.sent), core::mem::take(&mut self.received));
        (self.sent, self.received) = collectives.all_gather(sent, received, left, self.limit)?;
        Ok(())
    }

    fn all_gather_once(
        &mut self,
        mine: &[u8],
        all: &mut Vec<Vec<u8>>,
        collectives: &mut Collectives,
    ) -> Result<(), TransportError> {
        // The length and the first bytes; if any rank has more, a second collective has the rest.
        let (block, begun) = (self.block, Instant::now());
        self.sent.clear();
        self.sent.extend_from_slice(&(mine.len() as u64).to_le_bytes());
        self.sent.extend_from_slice(&mine[..mine.len().min(block)]);
        self.sent.resize(LENGTH + block, 0);
        self.received.resize((LENGTH + block) * self.world, 0);
        self.gather_blocks(collectives, self.limit)?;
        all.resize_with(self.world, Vec::new);
        let mut longest = 0;
        for (message, part) in all.iter_mut().zip(self.received.chunks_exact(LENGTH + block)) {
            let (length, bytes) = part.split_first_chunk::<LENGTH>().ok_or(TransportError::Broken)?;
            let length = u64::from_le_bytes(*length) as usize;
            longest = longest.max(length);
            message.clear();
            message.extend_from_slice(&bytes[..length.min(block)]);
            // The second collective fills the rest.
            message.resize(length, 0);
        }
        if longest > block {
            let rest = longest - block;
            self.sent.clear();
            self.sent.extend_from_slice(&mine[mine.len().min(block)..]);
            self.sent.resize(rest, 0);
            self.received.resize(rest * self.world, 0);
            // Ranks with more time left reply at its end.
            self.gather_blocks(collectives, self.limit.saturating_sub(begun.elapsed()))?;
            for (message, part) in all.iter_mut().zip(self.received.chunks_exact(rest)) {
                let length = message.len();
                message.get_mut(block..).map(|end| end.copy_from_slice(&part[..length - block])).unwrap_or_default();
            }
            // The next message may be as long. Longer messages are rare, and a larger block costs every call.
            self.block = longest.next_power_of_two().min(LARGEST_BLOCK);
        }
        Ok(())
    }
}

impl Transport for Mpi {
    fn rank(&self) -> usize {
        self.rank
    }

    fn world(&self) -> usize {
        self.world
    }

    fn time_limit(&self) -> Duration {
        self.limit
    }

    fn set_time_limit(&mut self, limit: Duration) {
        self.limit = limit;
    }

    fn all_gather(&mut self, mine: &[u8], all: &mut Vec<Vec<u8>>) -> Result<(), TransportError> {
        if self.is_broken {
            return Err(TransportError::Broken);
        }
        let Some(mut collectives) = self.collectives.take() else { return Err(TransportError::Broken) };
        let outcome = self.all_gather_once(mine, all, &mut collectives);
        let outcome = outcome.map_err(|error| error.with_limit(self.limit));
        self.collectives = Some(collectives);
        self.is_broken = outcome.is_err();
        outcome
    }
}

impl Drop for Mpi {
    fn drop(&mut self) {
        if self.is_broken {
            // Freeing the group and shutting down would wait for missing ranks.
            core::mem::forget(self.collectives.take());
            core::mem::forget(self.universe.take());
        }
    }
}

impl core::fmt::Debug for Mpi {
    fn fmt(&self, f: &mut core::fmt::Formatter<'_>) -> core::fmt::Result {
        let Mpi { rank, world, on_host, limit, is_broken, .. } = self;
        f.debug_struct("Mpi")
            .field("rank", rank)
            .field("world", world)
            .field("on_host", on_host)
            .field("limit", limit)
            .field("is_broken", is_broken)
            .finish_non_exhaustive()
    }
}

fn failed(what: impl Into<String>) -> TransportError {
    TransportError::Failed { source: what.into().into() }
}
