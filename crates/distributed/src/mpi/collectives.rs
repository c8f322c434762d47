//! Nonblocking collectives with a time limit: the calls into the MPI library.
#![allow(unsafe_code)]

use super::failed;
use super::liveness::{Liveness, Wait};
use crate::transport::TransportError;
use core::ffi::c_int;
use core::mem::MaybeUninit;
use core::time::Duration;
use mpi::ffi;
use mpi::raw::AsRaw;
use mpi::topology::{Communicator, SimpleCommunicator};
use std::time::Instant;

/// The communicators of a group: one for collectives and one for liveness, so that their messages do not mix.
pub(super) struct Collectives {
    of_exchanges: SimpleCommunicator,
    liveness: Liveness,
    /// The number of exchanges begun.
    step: u64,
}

/// The time, and the part of the limit, for which a rank only polls an exchange. After the shorter of the two it also
/// exchanges heartbeats.
const POLL_ONLY_TIME: Duration = Duration::from_millis(20);
const POLL_ONLY_PART: u32 = 8;

/// The number of exchanges after which a rank receives pending heartbeats, even without a wait. Heartbeats accumulate
/// at a rank that is always last.
const CATCH_UP: u64 = 256;

// SAFETY: the values are handles of a library that may be called from the thread that holds this value. `Mpi::start`
// requests this from the library, and `Mpi::over` requires it from its caller.
unsafe impl Send for Collectives {}

impl Collectives {
    /// Makes MPI return errors rather than end the process.
    pub(super) fn new(
        of_exchanges: SimpleCommunicator,
        of_liveness: SimpleCommunicator,
    ) -> Result<Self, TransportError> {
        for communicator in [&of_exchanges, &of_liveness] {
            // SAFETY: a live communicator and a constant of the library.
            check(unsafe { ffi::MPI_Comm_set_errhandler(communicator.as_raw(), ffi::RSMPI_ERRORS_RETURN) })?;
        }
        Ok(Collectives { of_exchanges, liveness: Liveness::new(of_liveness), step: 0 })
    }

    /// Gathers every rank's `sent`, by rank, in `received`, which has room for equal sizes. `left` is this rank's
    /// remaining part of the common `limit`.
    pub(super) fn all_gather(
        &mut self,
        sent: Vec<u8>,
        mut received: Vec<u8>,
        left: Duration,
        limit: Duration,
    ) -> Result<(Vec<u8>, Vec<u8>), TransportError> {
        let count = count(sent.len())?;
        debug_assert_eq!(received.len(), sent.len() * self.of_exchanges.size() as usize);
        let mut request = unbegun();
        // SAFETY: the buffers have the stated sizes; `wait` keeps them until the collective is done, or forever.
        let begun = unsafe {
            ffi::MPI_Iallgather(
                sent.as_ptr().cast(),
                count,
                ffi::RSMPI_UINT8_T,
                received.as_mut_ptr().cast(),
                count,
                ffi::RSMPI_UINT8_T,
                self.of_exchanges.as_raw(),
                request.as_mut_ptr(),
            )
        };
        self.wait(begun, request, (sent, received), left, limit)
    }

    /// Polls a collective until it is done. A collective that does not end keeps its buffers: the library may use them.
    fn wait<B>(
        &mut self,
        begun: c_int,
        request: MaybeUninit<ffi::MPI_Request>,
        buffers: B,
        left: Duration,
        limit: Duration,
    ) -> Result<B, TransportError> {
        check(begun)?;
        // SAFETY: the call that began the collective succeeded, so there is a request.
        let mut request = Request(unsafe { request.assume_init() });
        self.step += 1;
        let wait = Wait::new(self.step, left, limit);
        let alone = wait.begun.checked_add(POLL_ONLY_TIME.min(limit / POLL_ONLY_PART).min(left));
        let outcome = match request.wait_until(alone) {
            Ok(false) => self.liveness.wait_until(&wait, &mut request),
            Ok(true) => Ok(None),
            Err(error) => Err(error),
        };
        if let Ok(None) = outcome {
            if self.step.is_multiple_of(CATCH_UP) {
                self.liveness.catch_up()?;
            }
            return Ok(buffers);
        }
        core::mem::forget(buffers);
        Err(match outcome? {
            Some(ranks) if !ranks.is_empty() => TransportError::TimedOut { ranks, limit },
            _ => TransportError::Stuck { limit },
        })
    }
}

pub(super) struct Request(pub(super) ffi::MPI_Request);

impl Request {
    /// Whether the operation is done.
    pub(super) fn test(&mut self) -> Result<bool, TransportError> {
        let mut done: c_int = 0;
        // SAFETY: a request that was begun, or the null request of an earlier test, which counts as done.
        check(unsafe { ffi::MPI_Test(&raw mut self.0, &raw mut done, ffi::RSMPI_STATUS_IGNORE) })?;
        Ok(done != 0)
    }

    /// Polls until the operation is done, or the deadline is over. Yields between polls: there may be more ranks than
    /// processors.
    fn wait_until(&mut self, deadline: Option<Instant>) -> Result<bool, TransportError> {
        loop {
            if self.test()? {
                return Ok(true);
            }
            if deadline.is_some_and(|deadline| Instant::now() >= deadline) {
                return Ok(false);
            }
            std::thread::yield_now();
        }
    }
}

pub(super) fn unbegun() -> MaybeUninit<ffi::MPI_Request> {
    MaybeUninit::uninit()
}

fn count(length: usize) -> Result<c_int, TransportError> {
    c_int::try_from(length).map_err(|_| failed(format!("a message of {length} is more than MPI counts")))
}

/// Converts a code of the library to a result.
pub(super) fn check(code: c_int) -> Result<(), TransportError> {
    if code == ffi::MPI_SUCCESS as c_int {
        return Ok(());
    }
    let mut text = [0u8; ffi::MPI_MAX_ERROR_STRING as usize + 1];
    let mut length: c_int = 0;
    // SAFETY: the buffer has the length that the library requires; `length` is a place to write to.
    let known = unsafe { ffi::MPI_Error_string(code, text.as_mut_ptr().cast(), &raw mut length) };
    let text = text.get(..length.max(0) as usize).filter(|_| known == ffi::MPI_SUCCESS as c_int);
    let text = text.map(|text| String::from_utf8_lossy(text).into_owned());
    Err(failed(text.unwrap_or_else(|| format!("MPI error {code}"))))
}
