//! NCCL communicators with a timeout for connecting, waiting and leaving.
#![allow(unsafe_code)]

use super::{NcclId, failed, is_present};
use crate::device::{Device, wait};
use crate::error::CudaError;
use core::ffi::c_int;
use core::time::Duration;
use cudarc::driver::CudaStream;
use cudarc::nccl::result::{self, NcclError};
use cudarc::nccl::sys;
use std::sync::Arc;
use std::sync::mpsc::{RecvTimeoutError, channel};
use std::time::Instant;

/// The minimum timeout of [`Communicator::connect`]: NCCL first inspects the machine.
const MIN_CONNECT_TIMEOUT: Duration = Duration::from_secs(60);
/// The minimum timeout for ending a communicator.
const MIN_END_TIMEOUT: Duration = Duration::from_secs(5);
/// Polls of the stream per query of NCCL's asynchronous errors.
const POLLS_PER_QUERY: u32 = 1024;

/// A communicator that moves to another thread.
struct Handle(sys::ncclComm_t);

// SAFETY: NCCL takes calls for a communicator from any thread, one at a time; a handle moves to a single thread.
unsafe impl Send for Handle {}

impl Handle {
    /// Destroys a communicator whose work is done; otherwise aborts it and its pending work on the GPU.
    fn end(self, is_done: bool) {
        // SAFETY: the communicator is alive and ends once, since this function consumes the handle. Errors are ignored.
        let _ = unsafe { if is_done { result::comm_destroy(self.0) } else { result::comm_abort(self.0) } };
    }
}

/// One rank of an NCCL group.
#[derive(Debug)]
pub(crate) struct Communicator {
    /// `None` after an abort.
    comm: Option<sys::ncclComm_t>,
    limit: Duration,
    device: Arc<Device>,
}

// SAFETY: NCCL takes calls for a communicator from any thread, one at a time, which `&mut self` ensures.
unsafe impl Send for Communicator {}
// SAFETY: a shared reference makes no call.
unsafe impl Sync for Communicator {}

impl Communicator {
    /// Connects to the other ranks of the id, within the longer of `limit` and a minute.
    ///
    /// NCCL has no timeout, so another thread makes the call. After a timeout, that thread stays blocked in NCCL.
    pub(crate) fn connect(
        id: &NcclId,
        rank: usize,
        world: usize,
        device: &Arc<Device>,
        limit: Duration,
    ) -> Result<Communicator, CudaError> {
        if !is_present() {
            return Err(CudaError::unavailable("the library libnccl cannot be loaded"));
        }
        let (id, device, timeout) = (*id, device.clone(), limit.max(MIN_CONNECT_TIMEOUT));
        let connect = move || {
            device.context().bind_to_thread().map_err(CudaError::driver("bind the context"))?;
            let mut comm = core::ptr::null_mut();
            // SAFETY: the pointer is valid for one communicator; the context of the rank's device is bound.
            unsafe { result::comm_init_rank(&raw mut comm, world as c_int, id.raw(), rank as c_int) }
                .map_err(connect_error)?;
            Ok(Communicator { comm: Some(comm), limit, device })
        };
        within(timeout, connect)?.unwrap_or(Err(CudaError::LateRanks { ranks: Vec::new(), limit: timeout }))
    }

    /// The handle for calls of NCCL.
    ///
    /// # Errors
    /// [`CudaError::LateRanks`] after an abort.
    pub(crate) fn raw(&self) -> Result<sys::ncclComm_t, CudaError> {
        self.comm.ok_or_else(|| self.late_ranks())
    }

    /// Waits for the stream. After a timeout or an NCCL error, aborts this rank's communicator and its work on the GPU.
    ///
    /// # Errors
    /// [`CudaError::LateRanks`] without ranks, because NCCL does not report them; [`CudaError::Nccl`],
    /// [`CudaError::Driver`].
    pub(crate) fn wait(&mut self, stream: &CudaStream) -> Result<(), CudaError> {
        let driver = CudaError::driver("wait for an exchange");
        let done = stream.record_event(None).map_err(&driver)?;
        let begun = Instant::now();
        for poll in 1u32.. {
            if done.try_is_complete().map_err(&driver)? {
                break;
            }
            if begun.elapsed() > self.limit {
                self.abort();
                return Err(self.late_ranks());
            }
            if poll % POLLS_PER_QUERY == 0 {
                self.check_async_error()?;
            }
            std::hint::spin_loop();
        }
        stream.synchronize().map_err(driver)
    }

    /// Checks for asynchronous errors of NCCL, for example a broken connection.
    fn check_async_error(&mut self) -> Result<(), CudaError> {
        let comm = self.raw()?;
        let mut found = sys::ncclResult_t::ncclSuccess;
        // SAFETY: the communicator is alive; the pointer is valid for one result.
        let queried = unsafe { sys::ncclCommGetAsyncError(comm, &raw mut found) };
        let error = queried.result().and_then(|_| found.result()).err();
        error.map_or(Ok(()), |error| {
            self.abort();
            Err(failed("reduce the draws")(error))
        })
    }

    fn late_ranks(&self) -> CudaError {
        CudaError::LateRanks { ranks: Vec::new(), limit: self.limit }
    }

    /// Ends this rank's communicator, on a thread that keeps the device alive.
    fn end(&self, handle: Handle, is_done: bool) {
        let device = self.device.clone();
        let end = move || {
            let _ = device.context().bind_to_thread();
            handle.end(is_done);
        };
        let _ = within(self.limit.max(MIN_END_TIMEOUT), end);
    }

    /// Aborts this rank's communicator and its work on the GPU.
    fn abort(&mut self) {
        if let Some(handle) = self.comm.take().map(Handle) {
            self.end(handle, false);
        }
    }
}

impl Drop for Communicator {
    /// Waits for the GPU and destroys the communicator; after a timeout, aborts it.
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

/// The error of a failed connection.
///
/// NCCL has no error code for two ranks on one GPU. Processes may see different GPUs, so only NCCL can detect this.
fn connect_error(error: NcclError) -> CudaError {
    let is_misuse = error.0 == sys::ncclResult_t::ncclInvalidUsage;
    match failed("connect to the other ranks")(error) {
        CudaError::Nccl { action, name } if is_misuse => {
            CudaError::Nccl { action, name: format!("{name}, possibly because two ranks are on one GPU") }
        }
        error => error,
    }
}

/// Runs `f` on another thread and returns its result; `None` after a timeout, when the thread drops the late result.
fn within<T: Send + 'static>(limit: Duration, f: impl FnOnce() -> T + Send + 'static) -> Result<Option<T>, CudaError> {
    let (sender, receiver) = channel();
    let thread = std::thread::Builder::new().name("nccl".into()).spawn(move || {
        let _ = sender.send(f());
    });
    thread.map_err(|error| CudaError::unavailable(format!("no thread can be started: {error}")))?;
    match receiver.recv_timeout(limit) {
        Ok(result) => Ok(Some(result)),
        Err(RecvTimeoutError::Timeout | RecvTimeoutError::Disconnected) => Ok(None),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_late_result_is_dropped() {
        assert_eq!(within(Duration::from_secs(20), || 7), Ok(Some(7)));
        struct OnDrop(std::sync::mpsc::Sender<()>);
        impl Drop for OnDrop {
            fn drop(&mut self) {
                let _ = self.0.send(());
            }
        }
        let (go, wait) = channel::<()>();
        let (sender, dropped) = channel();
        let begun = Instant::now();
        let late = within(Duration::from_millis(20), move || {
            let _ = wait.recv();
            OnDrop(sender)
        });
        assert!(matches!(late, Ok(None)) && begun.elapsed() < Duration::from_secs(10));
        assert!(dropped.try_recv().is_err());
        go.send(()).unwrap();
        dropped.recv_timeout(Duration::from_secs(20)).unwrap();
    }
}
