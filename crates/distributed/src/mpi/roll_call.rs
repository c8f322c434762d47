//! Who is still there, when a collective did not end.
#![allow(unsafe_code)]

use super::pending::{Request, check, deadline, unbegun};
use crate::transport::TransportError;
use core::ffi::c_int;
use core::time::Duration;
use mpi::ffi;
use mpi::raw::AsRaw;
use mpi::topology::{Communicator, SimpleCommunicator};
use std::time::Instant;

/// The one tag of the communicator of roll calls.
const TAG: c_int = 0;

/// Tells every other rank that this one waits, and listens for as much time as the exchange had: the ranks that wait too
/// began at about the same time and say so. Returns those that say nothing.
pub(super) fn roll_call(communicator: &SimpleCommunicator, limit: Duration) -> Result<Vec<usize>, TransportError> {
    let (mine, world) = (communicator.rank(), communicator.size());
    let mut waiting = Vec::new();
    for rank in (0..world).filter(|&rank| rank != mine) {
        let (mut sent, mut heard) = (unbegun(), unbegun());
        // SAFETY: messages of no bytes: nothing is read or written at the addresses, whenever the library is done.
        unsafe {
            let (byte, raw) = (ffi::RSMPI_UINT8_T, communicator.as_raw());
            check(ffi::MPI_Isend(core::ptr::null(), 0, byte, rank, TAG, raw, sent.as_mut_ptr()))?;
            check(ffi::MPI_Irecv(core::ptr::null_mut(), 0, byte, rank, TAG, raw, heard.as_mut_ptr()))?;
            // Nobody waits for the sending: a rank that is gone never takes it.
            waiting.push((rank as usize, Request(heard.assume_init())));
        }
    }
    let deadline = deadline(limit);
    while !waiting.is_empty() && deadline.is_none_or(|deadline| Instant::now() < deadline) {
        let mut silent = Vec::new();
        for (rank, mut request) in waiting {
            // A library that knows that a rank is gone says so by an error.
            if !request.test().unwrap_or(false) {
                silent.push((rank, request));
            }
        }
        waiting = silent;
        std::thread::yield_now();
    }
    Ok(waiting.into_iter().map(|(rank, _)| rank).collect())
}
