//! The transport between processes that MPI started.
//!
//! Every exchange is a nonblocking collective of the MPI library, polled until it is done or the time limit is over. The
//! limit says that something is wrong but not who: a rank that waits for long says so to the others by point-to-point
//! messages, and asks them when the limit is over; those that are not heard are named (`liveness`). An exchange that did not end keeps
//! its buffers for good, since the library may still write to them, and the group is not shut down, which would wait for the
//! ranks that are gone.

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
/// Dropping it shuts MPI down when [`Mpi::start`] began it and no exchange has failed, which waits for the other ranks to
/// do the same.
pub struct Mpi {
    rank: usize,
    world: usize,
    /// The number among the ranks of this host, and how many these are.
    on_host: (usize, usize),
    limit: Duration,
    is_broken: bool,
    /// Messages of at most this many bytes travel in one collective. Every rank has the same value: it follows from the
    /// lengths of earlier messages, which all have seen.
    block: usize,
    sent: Vec<u8>,
    received: Vec<u8>,
    // Fields are dropped in order: the communicator, then the library.
    collectives: Option<Collectives>,
    universe: Option<Universe>,
}

/// The smallest block of a gathering: what a few rows need.
const SMALLEST_BLOCK: usize = 256;
/// The largest block: what is longer takes a second collective each time.
const LARGEST_BLOCK: usize = 1 << 16;
/// Bytes in front of a block, for the message's whole length.
const LENGTH: usize = size_of::<u64>();

impl Mpi {
    /// Starts MPI; this process becomes a rank of all that were started together. The library waits in it for the others, and
    /// has no limit: [`Mpi::with_time_limit`] is for what comes after.
    ///
    /// # Errors
    /// [`TransportError::Failed`] when MPI has been started in this process before (see [`Mpi::over`]) or cannot be used
    /// from one thread after another.
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
    /// [`TransportError::Failed`], with what the library says.
    ///
    /// # Safety
    /// * MPI is not shut down while this value lives.
    /// * The library was started so that this value may be used where it is: `Funneled` allows the main thread only,
    ///   `Serialized` one thread at a time in the whole process, `Multiple` every thread.
    #[allow(unsafe_code)]
    pub unsafe fn over(communicator: &SimpleCommunicator) -> Result<Mpi, TransportError> {
        Mpi::of(communicator)
    }

    /// [`Mpi::over`], of whose contract the callers here take care.
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

    /// This rank's number among those of its host, from 0, in their order: the GPU to take where each has one.
    pub fn rank_on_host(&self) -> usize {
        self.on_host.0
    }

    /// Number of ranks on this rank's host, where host means processes that can share memory.
    pub fn world_on_host(&self) -> usize {
        self.on_host.1
    }

    /// Sets the time that this rank waits for the other ranks in each exchange, in place of [`TIME_LIMIT`].
    ///
    /// At the end of the limit the rank asks all others, and waits for their answers for 0.35 s, or half of the limit if that
    /// is shorter. Then the exchange fails, and names the ranks that did not come, and those that came but were not heard for
    /// three eighths of the limit (a rank that waits is heard in every eighth). Without any, it names those that did not
    /// answer: a rank that was stopped a moment ago. So a rank is named at most half a second after the limit.
    ///
    /// A rank for which an exchange ends within an eighth of the limit says nothing of it. If the exchange does not end for
    /// others, and that rank makes no other while these wait, it is named beside the rank that is gone.
    ///
    /// Neither starting MPI nor shutting it down is an exchange. Every rank needs the same limit: how soon a rank is heard, and
    /// is missed, follows from it.
    pub fn with_time_limit(mut self, limit: Duration) -> Self {
        self.limit = limit;
        self
    }

    /// One collective in which every rank gives a block; `sent` holds this rank's, `received` all of them.
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
        // The length and the first bytes, and what is left in a second collective where any rank has more.
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
            // The rest comes behind; meanwhile the length is kept.
            message.resize(length, 0);
        }
        if longest > block {
            let rest = longest - block;
            self.sent.clear();
            self.sent.extend_from_slice(&mine[mine.len().min(block)..]);
            self.sent.resize(rest, 0);
            self.received.resize(rest * self.world, 0);
            // Ranks that have more of the limit left answer at its end.
            self.gather_blocks(collectives, self.limit.saturating_sub(begun.elapsed()))?;
            for (message, part) in all.iter_mut().zip(self.received.chunks_exact(rest)) {
                let length = message.len();
                message.get_mut(block..).map(|end| end.copy_from_slice(&part[..length - block])).unwrap_or_default();
            }
            // The next message may be as long. Longer ones are rare, and each call would pay for them.
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
            // Freeing the group and shutting down wait for ranks that may be gone.
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

/// What MPI says of itself or of this process.
fn failed(what: impl Into<String>) -> TransportError {
    TransportError::Failed { source: what.into().into() }
}
