//! Finds the missing ranks when a collective does not end.
#![allow(unsafe_code)]

use super::collectives::{Request, check, unbegun};
use crate::transport::TransportError;
use core::ffi::c_int;
use core::time::Duration;
use mpi::ffi;
use mpi::raw::AsRaw;
use mpi::topology::{Communicator, SimpleCommunicator};
use std::time::Instant;

/// The only tag of the liveness communicator.
const TAG: c_int = 0;

/// Detects which ranks are missing, by heartbeats outside the collectives.
///
/// * A rank that waits long in an exchange sends the exchange's number to every other rank, at regular intervals, and
///   receives theirs. Live ranks begin an exchange at about the same time, so their heartbeats arrive within the limit.
///   A rank that died in the exchange falls silent.
/// * Heartbeats of an exchange that ended arrive later, with a lower number.
/// * A rank that gives up an exchange reports it. This rank is alive, so a later exchange does not count it as missing.
///   Nor does it count a rank that still waits in an earlier exchange: a missing rank delays that rank there.
/// * At the end of its limit, a rank queries all others. Every waiting rank replies at once, even before its first
///   heartbeat; a rank that was stopped a moment ago does not reply.
/// * A rank whose exchange ends after a heartbeat reports the end. Most exchanges end before one, and then the rank
///   sends nothing, since a message per exchange costs too much. If such an exchange does not end for other ranks, and
///   this rank makes no other exchange while they wait, they count it as missing.
pub(super) struct Liveness {
    communicator: SimpleCommunicator,
    /// All other ranks; empty before the first long wait.
    others: Vec<Other>,
}

/// The bit of a number that marks its exchange as given up.
const GIVEN_UP: u64 = 1 << 63;
/// The bit of a query: the limit of the sender is over, and the sender needs a reply at once.
const QUERY: u64 = 1 << 62;

/// The time, and the part of the limit, for which a rank waits for replies after the end of its limit. A live rank
/// replies at once, unless it lacks a processor.
const REPLY_TIME: Duration = Duration::from_millis(350);
const REPLY_PART: u32 = 2;

/// The interval between heartbeats, as a part of the limit.
const HEARTBEATS_PER_LIMIT: u32 = 8;

/// The silence, in intervals of the sender, after which a rank is missing. A live rank may lack a processor for a
/// while.
const MISSED_HEARTBEATS: u32 = 3;

/// The interval of a rank whose exchange ended: it sends no further heartbeat.
const ENDED: Duration = Duration::from_nanos(u64::MAX);

pub(super) struct Wait {
    pub(super) step: u64,
    /// When it began.
    pub(super) begun: Instant,
    /// When its limit is over; `None` = no limit.
    pub(super) end: Option<Instant>,
    /// How long this rank then waits for replies.
    pub(super) reply_time: Duration,
    pub(super) interval: Duration,
}

impl Wait {
    /// A wait that begins now and lasts for the time `left` of the common limit.
    pub(super) fn new(step: u64, left: Duration, limit: Duration) -> Wait {
        let begun = Instant::now();
        let reply_time = REPLY_TIME.min(limit / REPLY_PART);
        Wait { step, begun, end: begun.checked_add(left), reply_time, interval: limit / HEARTBEATS_PER_LIMIT }
    }
}

struct Other {
    rank: c_int,
    /// The number of its last heartbeat; 0 before the first.
    step: u64,
    /// When the last heartbeat arrived.
    last_heartbeat: Instant,
    interval: Duration,
    /// Whether it gave up the exchange of its last heartbeat.
    has_given_up: bool,
    /// Whether it waits for a reply.
    wants_reply: bool,
    /// Whether it was sent a heartbeat of the current exchange.
    is_notified: bool,
    incoming: Message,
    /// The last heartbeat to it, which may not be received yet: a dead rank never receives it.
    outgoing: Option<Message>,
}

/// A heartbeat in flight: a number, and the interval in nanoseconds.
///
/// The library holds the address of the words until the request is done. They are in a vector, because moving a box
/// asserts that no other pointer to its content exists.
struct Message {
    words: Vec<u64>,
    request: Request,
}

impl Liveness {
    pub(super) fn new(communicator: SimpleCommunicator) -> Self {
        Liveness { communicator, others: Vec::new() }
    }

    /// Polls the request of an exchange until it is done, and returns `None`; if the wait is over first, returns the
    /// missing ranks.
    ///
    /// Ranks that gave up an earlier exchange, or still wait in one, are not missing if others are. Sends a heartbeat
    /// in every [`Wait::interval`].
    pub(super) fn wait_until(
        &mut self,
        wait: &Wait,
        request: &mut Request,
    ) -> Result<Option<Vec<usize>>, TransportError> {
        let Wait { step, interval, .. } = *wait;
        self.listen()?;
        self.others.iter_mut().for_each(|other| other.is_notified = false);
        let mut next = wait.begun.checked_add(interval);
        let mut queried = None;
        loop {
            if request.test()? {
                // Without this report, a rank whose exchange does not end would count this rank as missing.
                self.send(step, ENDED, |other| other.is_notified);
                return Ok(None);
            }
            let now = self.receive()?;
            self.send(step, interval, |other| core::mem::take(&mut other.wants_reply));
            match queried {
                None if wait.end.is_some_and(|end| now >= end) => {
                    self.send(step | QUERY, interval, |_| true);
                    queried = Some(now);
                }
                None if next.is_some_and(|next| now >= next) => {
                    self.send(step, interval, |_| true);
                    next = now.checked_add(interval);
                }
                Some(queried)
                    if now >= queried + wait.reply_time || self.others.iter().all(|o| o.has_replied(step, queried)) =>
                {
                    let missing = self.missing(step, queried, now);
                    self.send(step | GIVEN_UP, interval, |_| true);
                    return Ok(Some(missing));
                }
                _ => {}
            }
            std::thread::yield_now();
        }
    }

    /// The missing ranks after the query at `queried`. Ranks that were silent long before the query come first; a rank
    /// that lacks a processor for a moment is not among them.
    fn missing(&self, step: u64, queried: Instant, now: Instant) -> Vec<usize> {
        let long = |other: &Other| !other.is_in_exchange(step, now) && !other.is_in_earlier_exchange(now);
        let is_silent = |other: &Other| other.waits() && other.last_heartbeat < queried;
        let mut ranks = self.ranks(long);
        if ranks.is_empty() {
            ranks = self.ranks(is_silent);
        }
        if ranks.is_empty() {
            ranks = self.ranks(|other| !other.is_in_exchange(step, now));
        }
        ranks
    }

    /// Receives the heartbeats that have arrived, without waiting.
    pub(super) fn catch_up(&mut self) -> Result<(), TransportError> {
        self.listen()?;
        self.receive().map(drop)
    }

    /// Receives the heartbeats that have arrived; returns the time.
    fn receive(&mut self) -> Result<Instant, TransportError> {
        let now = Instant::now();
        for other in &mut self.others {
            other.receive(now, &self.communicator)?;
        }
        Ok(now)
    }

    fn ranks(&self, which: impl Fn(&Other) -> bool) -> Vec<usize> {
        self.others.iter().filter(|other| which(other)).map(|other| other.rank as usize).collect()
    }

    /// Begins to receive from every other rank.
    fn listen(&mut self) -> Result<(), TransportError> {
        if self.others.is_empty() {
            let (mine, world) = (self.communicator.rank(), self.communicator.size());
            for rank in (0..world).filter(|&rank| rank != mine) {
                let incoming = Message::receive(rank, &self.communicator)?;
                self.others.push(Other {
                    rank,
                    step: 0,
                    last_heartbeat: Instant::now(),
                    interval: Duration::ZERO,
                    has_given_up: false,
                    wants_reply: false,
                    is_notified: false,
                    incoming,
                    outgoing: None,
                });
            }
        }
        Ok(())
    }

    /// Sends a heartbeat to the selected ranks.
    fn send(&mut self, number: u64, interval: Duration, to: impl Fn(&mut Other) -> bool) {
        let words = [number, u64::try_from(interval.as_nanos()).unwrap_or(u64::MAX)];
        for other in &mut self.others {
            if !to(other) {
                continue;
            }
            other.is_notified = true;
            // The library may report a dead rank as an error; nothing is then sent.
            let outgoing = Message::send(words, other.rank, &self.communicator).ok();
            // Does not wait for an earlier heartbeat in flight: the library keeps its memory.
            if let Some(mut earlier) = core::mem::replace(&mut other.outgoing, outgoing)
                && !earlier.request.test().unwrap_or(false)
            {
                core::mem::forget(earlier);
            }
        }
    }
}

impl Other {
    fn receive(&mut self, now: Instant, communicator: &SimpleCommunicator) -> Result<(), TransportError> {
        // The library may report a dead rank as an error.
        while self.incoming.request.test().unwrap_or(false) {
            let [number, interval] = [0, 1].map(|at| self.incoming.words[at]);
            (self.step, self.has_given_up) = (number & !(GIVEN_UP | QUERY), number & GIVEN_UP != 0);
            self.wants_reply = number & QUERY != 0;
            (self.last_heartbeat, self.interval) = (now, Duration::from_nanos(interval));
            self.incoming = Message::receive(self.rank, communicator)?;
        }
        Ok(())
    }

    /// Whether it came to an exchange, and is alive or gave up that exchange.
    fn is_in_exchange(&self, step: u64, now: Instant) -> bool {
        self.step >= step && (self.has_given_up || self.is_recent(now))
    }

    /// Whether the exchange of its last heartbeat did not end for it: it gave up that exchange, or waits in it.
    fn is_in_earlier_exchange(&self, now: Instant) -> bool {
        self.has_given_up || (self.waits() && self.is_recent(now))
    }

    /// Whether it waits in the exchange of its last heartbeat, according to that heartbeat.
    fn waits(&self) -> bool {
        self.step > 0 && self.interval != ENDED && !self.has_given_up
    }

    /// Whether it has replied to the query at `queried`, or cannot reply.
    fn has_replied(&self, step: u64, queried: Instant) -> bool {
        self.has_given_up || (self.step >= step && (self.interval == ENDED || self.last_heartbeat >= queried))
    }

    /// Whether its last heartbeat is recent.
    fn is_recent(&self, now: Instant) -> bool {
        now.duration_since(self.last_heartbeat) <= self.interval.saturating_mul(MISSED_HEARTBEATS)
    }
}

impl Message {
    fn send(words: [u64; 2], rank: c_int, communicator: &SimpleCommunicator) -> Result<Message, TransportError> {
        let (words, mut request, raw) = (words.to_vec(), unbegun(), communicator.as_raw());
        // SAFETY: two words, which keep their address until the request is done, or forever.
        let request = unsafe {
            let address = words.as_ptr().cast();
            check(ffi::MPI_Isend(address, 2, ffi::RSMPI_UINT64_T, rank, TAG, raw, request.as_mut_ptr()))?;
            Request(request.assume_init())
        };
        Ok(Message { words, request })
    }

    fn receive(rank: c_int, communicator: &SimpleCommunicator) -> Result<Message, TransportError> {
        let (mut words, mut request, raw) = (vec![0; 2], unbegun(), communicator.as_raw());
        // SAFETY: room for two words, which keeps its address until the request is done, or forever.
        let request = unsafe {
            let address = words.as_mut_ptr().cast();
            check(ffi::MPI_Irecv(address, 2, ffi::RSMPI_UINT64_T, rank, TAG, raw, request.as_mut_ptr()))?;
            Request(request.assume_init())
        };
        Ok(Message { words, request })
    }
}

impl Drop for Liveness {
    /// Cancels the receives before the communicator is freed. Memory that the library may still use is leaked.
    fn drop(&mut self) {
        for mut other in self.others.drain(..) {
            // SAFETY: a request that was begun and is not known to be done, which `MPI_Test` then ends.
            let cancelled = unsafe { ffi::MPI_Cancel(&raw mut other.incoming.request.0) };
            let is_done = check(cancelled).is_ok() && other.incoming.request.test().unwrap_or(false);
            let is_notified = other.outgoing.as_mut().is_none_or(|message| message.request.test().unwrap_or(false));
            if !(is_done && is_notified) {
                core::mem::forget(other);
            }
        }
    }
}
