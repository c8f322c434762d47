//! Who is there, when a collective does not end.
#![allow(unsafe_code)]

use super::collectives::{Request, check, unbegun};
use crate::transport::TransportError;
use core::ffi::c_int;
use core::time::Duration;
use mpi::ffi;
use mpi::raw::AsRaw;
use mpi::topology::{Communicator, SimpleCommunicator};
use std::time::Instant;

/// The one tag of the communicator of roll calls.
const TAG: c_int = 0;

/// A rank that waits for long in an exchange tells every other rank the exchange's number, again and again, and listens to
/// those that do so too. The ranks that are there began at about the same time and say so within the limit; one that came
/// and died says it no more. What was said in an exchange that did end is heard later, and is of an earlier number. A rank that
/// gives an exchange up says that too: it lives, and is not why a later one does not end, nor is one that goes on saying an
/// earlier number, as a rank that is gone holds it up there. At the end of its limit a rank asks all others: a rank that waits
/// answers at once, also one that has not waited long enough to say its number unasked, and one that was stopped a moment ago
/// does not. One for which the exchange ends after it spoke says so; one for
/// which it ended before, as nearly all do, says nothing, which would cost messages in every exchange: where it ends for that
/// rank and not for others, and that rank stays away as long as they wait, they miss it too.
pub(super) struct Liveness {
    communicator: SimpleCommunicator,
    /// Of every other rank; none before the first roll call.
    others: Vec<Other>,
}

/// The bit of a number that was given up.
const GIVEN_UP: u64 = 1 << 63;
/// The bit of a number whose sender wants an answer at once: its limit is over.
const ASKS: u64 = 1 << 62;

/// How long a rank waits for answers after the end of its limit, and the part of the limit that this is at most. A rank that
/// is there answers at once; this is what it may lack a processor for.
const LAST_CALL: Duration = Duration::from_millis(350);
const LAST_CALL_PART: u32 = 2;

/// The part of the limit in which a rank that waits says nothing unasked, and after which it says each time that it still
/// waits.
const AGAIN: u32 = 8;

/// A rank that is not heard for so many times as long as it said that it would be silent is gone. One that is there may lack
/// a processor for a while.
const SILENT: u32 = 3;

/// When a rank says the number again of an exchange that ended for it: never.
const ENDED: Duration = Duration::from_nanos(u64::MAX);

/// A wait for an exchange.
pub(super) struct Wait {
    /// The exchange's number.
    pub(super) step: u64,
    /// When it began.
    pub(super) begun: Instant,
    /// When its limit is over; `None` = never.
    pub(super) end: Option<Instant>,
    /// How long the answers of other ranks are waited for then.
    pub(super) last_call: Duration,
    /// After which time the number is said, and said again.
    pub(super) again: Duration,
}

impl Wait {
    /// A wait that begins now and ends when so much time is `left` of the limit of all ranks.
    pub(super) fn new(step: u64, left: Duration, limit: Duration) -> Wait {
        let begun = Instant::now();
        let last_call = LAST_CALL.min(limit / LAST_CALL_PART);
        Wait { step, begun, end: begun.checked_add(left), last_call, again: limit / AGAIN }
    }
}

/// Another rank.
struct Other {
    rank: c_int,
    /// The last number that it said; 0 before the first.
    said: u64,
    /// When that was heard.
    heard: Instant,
    /// In what time it says the number again, as it said.
    again: Duration,
    /// Whether it gave that exchange up.
    has_given_up: bool,
    /// Whether it waits for an answer.
    asks: bool,
    /// Whether it was told the number of the exchange that this rank waits in.
    is_told: bool,
    hearing: Message,
    /// The number that it was told last, which it may not have taken yet: one that is gone never does.
    telling: Option<Message>,
}

/// A number and the nanoseconds after which it comes again, on their way: the library knows their address until the request
/// is done. A vector, as a box that moves says that nobody else knows what it owns.
struct Message {
    words: Vec<u64>,
    request: Request,
}

impl Liveness {
    pub(super) fn new(communicator: SimpleCommunicator) -> Self {
        Liveness { communicator, others: Vec::new() }
    }

    /// Polls the request of an exchange until it is done, or the wait is over: then the ranks that are not there, without
    /// those that gave an earlier exchange up or wait in one where there are others. Says the number once in every
    /// [`Wait::again`].
    pub(super) fn wait_until(
        &mut self,
        wait: &Wait,
        request: &mut Request,
    ) -> Result<Option<Vec<usize>>, TransportError> {
        let Wait { step, again, .. } = *wait;
        self.listen()?;
        self.others.iter_mut().for_each(|other| other.is_told = false);
        let mut next = wait.begun.checked_add(again);
        let mut asked = None;
        loop {
            if request.test()? {
                // A rank for which it does not end misses this one no more, whatever it does next and however long.
                self.tell(step, ENDED, |other| other.is_told);
                return Ok(None);
            }
            let now = self.hear()?;
            self.tell(step, again, |other| core::mem::take(&mut other.asks));
            match asked {
                None if wait.end.is_some_and(|end| now >= end) => {
                    self.tell(step | ASKS, again, |_| true);
                    asked = Some(now);
                }
                None if next.is_some_and(|next| now >= next) => {
                    self.tell(step, again, |_| true);
                    next = now.checked_add(again);
                }
                Some(asked) if now >= asked + wait.last_call || self.others.iter().all(|o| o.answers(step, asked)) => {
                    let missing = self.missing(step, asked, now);
                    self.tell(step | GIVEN_UP, again, |_| true);
                    return Ok(Some(missing));
                }
                _ => {}
            }
            std::thread::yield_now();
        }
    }

    /// The ranks that are not there, of those that were asked then. Those that were silent for long before that come first: one
    /// that lacks a processor for a moment is not among them.
    fn missing(&self, step: u64, asked: Instant, now: Instant) -> Vec<usize> {
        let long = |other: &Other| !other.is_there(step, now) && !other.is_elsewhere(now);
        let is_silent = |other: &Other| other.waits() && other.heard < asked;
        let mut ranks = self.ranks(long);
        if ranks.is_empty() {
            ranks = self.ranks(is_silent);
        }
        if ranks.is_empty() {
            ranks = self.ranks(|other| !other.is_there(step, now));
        }
        ranks
    }

    /// Takes what was said to this rank, without a wait.
    pub(super) fn catch_up(&mut self) -> Result<(), TransportError> {
        self.listen()?;
        self.hear().map(drop)
    }

    /// Takes what the others said, and says when.
    fn hear(&mut self) -> Result<Instant, TransportError> {
        let now = Instant::now();
        for other in &mut self.others {
            other.hear(now, &self.communicator)?;
        }
        Ok(now)
    }

    fn ranks(&self, which: impl Fn(&Other) -> bool) -> Vec<usize> {
        self.others.iter().filter(|other| which(other)).map(|other| other.rank as usize).collect()
    }

    /// Begins to listen to every other rank.
    fn listen(&mut self) -> Result<(), TransportError> {
        if self.others.is_empty() {
            let (mine, world) = (self.communicator.rank(), self.communicator.size());
            for rank in (0..world).filter(|&rank| rank != mine) {
                let hearing = Message::hear(rank, &self.communicator)?;
                self.others.push(Other {
                    rank,
                    said: 0,
                    heard: Instant::now(),
                    again: Duration::ZERO,
                    has_given_up: false,
                    asks: false,
                    is_told: false,
                    hearing,
                    telling: None,
                });
            }
        }
        Ok(())
    }

    /// Tells these ranks that this one waits in an exchange, or gives it up.
    fn tell(&mut self, number: u64, again: Duration, to: impl Fn(&mut Other) -> bool) {
        let words = [number, u64::try_from(again.as_nanos()).unwrap_or(u64::MAX)];
        for other in &mut self.others {
            if !to(other) {
                continue;
            }
            other.is_told = true;
            // A library that knows that a rank is gone says so by an error; then nobody is told.
            let telling = Message::tell(words, other.rank, &self.communicator).ok();
            // A number that is not taken yet is not waited for: its memory stays the library's.
            if let Some(mut earlier) = core::mem::replace(&mut other.telling, telling)
                && !earlier.request.test().unwrap_or(false)
            {
                core::mem::forget(earlier);
            }
        }
    }
}

impl Other {
    /// Takes what the rank said.
    fn hear(&mut self, now: Instant, communicator: &SimpleCommunicator) -> Result<(), TransportError> {
        // A library that knows that a rank is gone says so by an error.
        while self.hearing.request.test().unwrap_or(false) {
            let [number, again] = [0, 1].map(|at| self.hearing.words[at]);
            (self.said, self.has_given_up) = (number & !(GIVEN_UP | ASKS), number & GIVEN_UP != 0);
            self.asks = number & ASKS != 0;
            (self.heard, self.again) = (now, Duration::from_nanos(again));
            self.hearing = Message::hear(self.rank, communicator)?;
        }
        Ok(())
    }

    /// Whether it came to an exchange, and is still there or waited as long as it does.
    fn is_there(&self, step: u64, now: Instant) -> bool {
        self.said >= step && (self.has_given_up || self.is_heard(now))
    }

    /// Whether the exchange of which it spoke last did not end for it: it gave that up, or waits in it.
    fn is_elsewhere(&self, now: Instant) -> bool {
        self.has_given_up || (self.waits() && self.is_heard(now))
    }

    /// Whether it waits in the exchange of which it spoke last, as far as it said.
    fn waits(&self) -> bool {
        self.said > 0 && self.again != ENDED && !self.has_given_up
    }

    /// Whether nothing more is to come of it for those who asked then.
    fn answers(&self, step: u64, asked: Instant) -> bool {
        self.has_given_up || (self.said >= step && (self.again == ENDED || self.heard >= asked))
    }

    fn is_heard(&self, now: Instant) -> bool {
        now.duration_since(self.heard) <= self.again.saturating_mul(SILENT)
    }
}

impl Message {
    fn tell(words: [u64; 2], rank: c_int, communicator: &SimpleCommunicator) -> Result<Message, TransportError> {
        let (words, mut request, raw) = (words.to_vec(), unbegun(), communicator.as_raw());
        // SAFETY: two words, which stay where they are until the request is done, or for good.
        let request = unsafe {
            let address = words.as_ptr().cast();
            check(ffi::MPI_Isend(address, 2, ffi::RSMPI_UINT64_T, rank, TAG, raw, request.as_mut_ptr()))?;
            Request(request.assume_init())
        };
        Ok(Message { words, request })
    }

    fn hear(rank: c_int, communicator: &SimpleCommunicator) -> Result<Message, TransportError> {
        let (mut words, mut request, raw) = (vec![0; 2], unbegun(), communicator.as_raw());
        // SAFETY: room for two words, which stays where it is until the request is done, or for good.
        let request = unsafe {
            let address = words.as_mut_ptr().cast();
            check(ffi::MPI_Irecv(address, 2, ffi::RSMPI_UINT64_T, rank, TAG, raw, request.as_mut_ptr()))?;
            Request(request.assume_init())
        };
        Ok(Message { words, request })
    }
}

impl Drop for Liveness {
    /// Takes back what is listened for, before the communicator goes; memory that the library may still know is left to it.
    fn drop(&mut self) {
        for mut other in self.others.drain(..) {
            // SAFETY: a request that was begun and is not known to be done, which `MPI_Test` then ends.
            let cancelled = unsafe { ffi::MPI_Cancel(&raw mut other.hearing.request.0) };
            let is_done = check(cancelled).is_ok() && other.hearing.request.test().unwrap_or(false);
            let is_told = other.telling.as_mut().is_none_or(|told| told.request.test().unwrap_or(false));
            if !(is_done && is_told) {
                core::mem::forget(other);
            }
        }
    }
}
