//! Who is there, when a collective does not end.
#![allow(unsafe_code)]

use super::pending::{Request, check, unbegun};
use crate::transport::TransportError;
use core::ffi::c_int;
use mpi::ffi;
use mpi::raw::AsRaw;
use mpi::topology::{Communicator, SimpleCommunicator};
use std::time::Instant;

/// The one tag of the communicator of roll calls.
const TAG: c_int = 0;

/// A rank that waits for long in an exchange tells every other rank the exchange's number, and listens to those that do so too.
/// The ranks that are there began at about the same time and say so within the limit. What was said in an exchange that
/// did end is heard later, and is of an earlier number.
pub(super) struct RollCall {
    communicator: SimpleCommunicator,
    /// Of every other rank; none before the first roll call.
    others: Vec<Other>,
}

/// Another rank.
struct Other {
    rank: c_int,
    /// The last number that it said; 0 before the first.
    said: u64,
    hearing: Message,
    /// The number that it was told last, which it may not have taken yet: one that is gone never does.
    telling: Option<Message>,
}

/// A number on its way: the library knows its address until the request is done. A vector, as a box that moves says that
/// nobody else knows what it owns.
struct Message {
    number: Vec<u64>,
    request: Request,
}

impl RollCall {
    pub(super) fn new(communicator: SimpleCommunicator) -> Self {
        RollCall { communicator, others: Vec::new() }
    }

    /// Polls the request of an exchange until it is done, or the deadline is over: then the ranks that said nothing.
    pub(super) fn wait_until(
        &mut self,
        deadline: Option<Instant>,
        step: u64,
        request: &mut Request,
    ) -> Result<Option<Vec<usize>>, TransportError> {
        self.tell(step)?;
        loop {
            if request.test()? {
                return Ok(None);
            }
            let is_over = deadline.is_some_and(|deadline| Instant::now() >= deadline);
            for other in &mut self.others {
                other.hear(step, &self.communicator)?;
            }
            if is_over {
                let silent = self.others.iter().filter(|other| other.said < step);
                return Ok(Some(silent.map(|other| other.rank as usize).collect()));
            }
            std::thread::yield_now();
        }
    }

    /// Tells every other rank that this one waits in an exchange.
    fn tell(&mut self, step: u64) -> Result<(), TransportError> {
        let (mine, world) = (self.communicator.rank(), self.communicator.size());
        if self.others.is_empty() {
            for rank in (0..world).filter(|&rank| rank != mine) {
                let hearing = Message::hear(rank, &self.communicator)?;
                self.others.push(Other { rank, said: 0, hearing, telling: None });
            }
        }
        for other in &mut self.others {
            // A number that is not taken yet is not waited for: its memory stays the library's.
            if let Some(mut earlier) = other.telling.replace(Message::tell(step, other.rank, &self.communicator)?)
                && !earlier.request.test().unwrap_or(false)
            {
                core::mem::forget(earlier);
            }
        }
        Ok(())
    }
}

impl Other {
    /// Takes what the rank said, up to the number of an exchange.
    fn hear(&mut self, step: u64, communicator: &SimpleCommunicator) -> Result<(), TransportError> {
        // A library that knows that a rank is gone says so by an error.
        while self.said < step && self.hearing.request.test().unwrap_or(false) {
            self.said = self.hearing.number[0];
            self.hearing = Message::hear(self.rank, communicator)?;
        }
        Ok(())
    }
}

impl Message {
    fn tell(number: u64, rank: c_int, communicator: &SimpleCommunicator) -> Result<Message, TransportError> {
        let (number, mut request, raw) = (vec![number], unbegun(), communicator.as_raw());
        // SAFETY: one number, which stays where it is until the request is done, or for good.
        let request = unsafe {
            let address = number.as_ptr().cast();
            check(ffi::MPI_Isend(address, 1, ffi::RSMPI_UINT64_T, rank, TAG, raw, request.as_mut_ptr()))?;
            Request(request.assume_init())
        };
        Ok(Message { number, request })
    }

    fn hear(rank: c_int, communicator: &SimpleCommunicator) -> Result<Message, TransportError> {
        let (mut number, mut request, raw) = (vec![0], unbegun(), communicator.as_raw());
        // SAFETY: room for one number, which stays where it is until the request is done, or for good.
        let request = unsafe {
            let address = number.as_mut_ptr().cast();
            check(ffi::MPI_Irecv(address, 1, ffi::RSMPI_UINT64_T, rank, TAG, raw, request.as_mut_ptr()))?;
            Request(request.assume_init())
        };
        Ok(Message { number, request })
    }
}

impl Drop for RollCall {
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
