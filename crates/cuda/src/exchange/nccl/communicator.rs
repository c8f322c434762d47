//! A group of ranks of the library: met, waited for and left within a time limit.
#![allow(unsafe_code)]

use super::{NcclId, failed, is_present};
use crate::device::gpu::Device;
use crate::device::scratch::wait;
use crate::error::CudaError;
use core::ffi::c_int;
use core::time::Duration;
use cudarc::driver::CudaStream;
use cudarc::nccl::result::{self, NcclError};
use cudarc::nccl::sys;
use std::sync::Arc;
use std::sync::mpsc::{RecvTimeoutError, channel};
use std::time::Instant;

/// How long ranks may take to meet, where their time limit is not longer: the library looks at the machine first.
const MEETING: Duration = Duration::from_secs(60);
/// How long one may take to leave, where the time limit is not longer.
const LEAVING: Duration = Duration::from_secs(5);
/// Looks at the stream between two at the library's own errors.
const LOOKS: u32 = 1024;

/// What the library calls a group, on its way to another thread.
struct Handle(sys::ncclComm_t);

// SAFETY: the library takes calls for a communicator from any thread, one at a time; a handle goes to one thread.
unsafe impl Send for Handle {}

impl Handle {
    /// Ends it, alone or, by an abort, with what waits on the GPU for other ranks.
    fn end(self, is_done: bool) {
        // SAFETY: alive, and ended once, as this takes the handle. A failure leaves nobody to tell.
        let _ = unsafe { if is_done { result::comm_destroy(self.0) } else { result::comm_abort(self.0) } };
    }
}

/// One rank of a group.
#[derive(Debug)]
pub(crate) struct Communicator {
    /// `None` when the group was given up.
    comm: Option<sys::ncclComm_t>,
    limit: Duration,
    device: Arc<Device>,
}

// SAFETY: the library takes calls for a communicator from any thread, one at a time, which `&mut self` ensures.
unsafe impl Send for Communicator {}
// SAFETY: a shared reference makes no call.
unsafe impl Sync for Communicator {}

impl Communicator {
    /// Meets the other ranks of the id, within the longer of `limit` and a minute. The library has no limit of its own: it
    /// is asked on a thread of its own, which stays behind when the others do not come.
    pub(crate) fn meet(
        id: &NcclId,
        rank: usize,
        world: usize,
        device: &Arc<Device>,
        limit: Duration,
    ) -> Result<Communicator, CudaError> {
        if !is_present() {
            return Err(CudaError::unavailable("the library libnccl cannot be loaded"));
        }
        let (id, device, meeting) = (*id, device.clone(), limit.max(MEETING));
        let meet = move || {
            device.context().bind_to_thread().map_err(CudaError::driver("bind the context"))?;
            let mut comm = core::ptr::null_mut();
            // SAFETY: a place for the communicator; the context of its device is bound.
            unsafe { result::comm_init_rank(&raw mut comm, world as c_int, id.raw(), rank as c_int) }.map_err(unmet)?;
            Ok(Communicator { comm: Some(comm), limit, device })
        };
        within(meeting, meet)?.unwrap_or(Err(CudaError::LateRanks { ranks: Vec::new(), limit: meeting }))
    }

    /// For the library's calls.
    ///
    /// # Errors
    /// [`CudaError::LateRanks`] when the group was given up.
    pub(crate) fn raw(&self) -> Result<sys::ncclComm_t, CudaError> {
        self.comm.ok_or_else(|| self.given_up())
    }

    /// Waits for the stream. When that takes more than the time limit, or the library finds an error, the group is given up
    /// on this rank, and what waits on the GPU for the other ranks ends.
    ///
    /// # Errors
    /// [`CudaError::LateRanks`], without the ranks, which the library does not tell; [`CudaError::Nccl`],
    /// [`CudaError::Driver`].
    pub(crate) fn wait(&mut self, stream: &CudaStream) -> Result<(), CudaError> {
        let driver = CudaError::driver("wait for an exchange");
        let done = stream.record_event(None).map_err(&driver)?;
        let begun = Instant::now();
        for look in 1u32.. {
            if done.try_is_complete().map_err(&driver)? {
                break;
            }
            if begun.elapsed() > self.limit {
                self.give_up();
                return Err(self.given_up());
            }
            if look % LOOKS == 0 {
                self.look_for_errors()?;
            }
            std::hint::spin_loop();
        }
        stream.synchronize().map_err(driver)
    }

    /// What the library found besides: a connection that broke, say.
    fn look_for_errors(&mut self) -> Result<(), CudaError> {
        let comm = self.raw()?;
        let mut found = sys::ncclResult_t::ncclSuccess;
        // SAFETY: the communicator is alive; a place for its state.
        let asked = unsafe { sys::ncclCommGetAsyncError(comm, &raw mut found) };
        let error = asked.result().and_then(|_| found.result()).err();
        error.map_or(Ok(()), |error| {
            self.give_up();
            Err(failed("reduce the draws")(error))
        })
    }

    fn given_up(&self) -> CudaError {
        CudaError::LateRanks { ranks: Vec::new(), limit: self.limit }
    }

    /// Ends the group on this rank. The device is kept for as long as the library takes.
    fn end(&self, handle: Handle, is_done: bool) {
        let device = self.device.clone();
        let end = move || {
            let _ = device.context().bind_to_thread();
            handle.end(is_done);
        };
        let _ = within(self.limit.max(LEAVING), end);
    }

    fn give_up(&mut self) {
        if let Some(handle) = self.comm.take().map(Handle) {
            self.end(handle, false);
        }
    }
}

impl Drop for Communicator {
    /// Waits for the GPU, and leaves the group; gives it up where that takes longer than the time limit.
    fn drop(&mut self) {
        let Some(handle) = self.comm.take().map(Handle) else { return };
        let device = self.device.clone();
        let synchronize = move || {
            let context = device.context();
            context.bind_to_thread().is_ok() && wait(context, || context.synchronize())
        };
        let is_done = within(self.limit, synchronize).ok().flatten().unwrap_or(false);
        self.end(handle, is_done);
    }
}

/// Why the ranks have not met. The library has no code of its own for two on one GPU, of which only it can be sure: each
/// process may have been shown other GPUs.
fn unmet(error: NcclError) -> CudaError {
    let is_misuse = error.0 == sys::ncclResult_t::ncclInvalidUsage;
    match failed("meet the other ranks")(error) {
        CudaError::Nccl { action, name } if is_misuse => {
            CudaError::Nccl { action, name: format!("{name}, as where two ranks are on one GPU") }
        }
        error => error,
    }
}

/// What `f` gives within a time limit. What it gives later is dropped on its own thread.
fn within<T: Send + 'static>(limit: Duration, f: impl FnOnce() -> T + Send + 'static) -> Result<Option<T>, CudaError> {
    let (give, take) = channel();
    let thread = std::thread::Builder::new().name("nccl".into()).spawn(move || {
        let _ = give.send(f());
    });
    thread.map_err(|error| CudaError::unavailable(format!("no thread can be started: {error}")))?;
    match take.recv_timeout(limit) {
        Ok(given) => Ok(Some(given)),
        Err(RecvTimeoutError::Timeout | RecvTimeoutError::Disconnected) => Ok(None),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_takes_too_long_is_left_behind_and_dropped_when_it_comes() {
        assert_eq!(within(Duration::from_secs(20), || 7), Ok(Some(7)));
        struct Told(std::sync::mpsc::Sender<()>);
        impl Drop for Told {
            fn drop(&mut self) {
                let _ = self.0.send(());
            }
        }
        let (go, wait) = channel::<()>();
        let (told, dropped) = channel();
        let begun = Instant::now();
        let late = within(Duration::from_millis(20), move || {
            let _ = wait.recv();
            Told(told)
        });
        assert!(matches!(late, Ok(None)) && begun.elapsed() < Duration::from_secs(10));
        assert!(dropped.try_recv().is_err());
        go.send(()).unwrap();
        dropped.recv_timeout(Duration::from_secs(20)).unwrap();
    }
}
