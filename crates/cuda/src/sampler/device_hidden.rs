//! Hidden states in the caller's device memory, for ranks.
#![allow(unsafe_code)]

use crate::device::matrix::DeviceMatrix;
use crate::error::CudaError;
use cudarc::driver::{CudaEvent, CudaStream};
use std::sync::Arc;

/// Hidden states `[rows, hidden]` in device memory, for calls that read them in place.
///
/// ```no_run
/// # fn step(stream: &flash_sampling_cuda::cudarc::driver::CudaStream, hidden: flash_sampling_cuda::DeviceMatrix) {
/// use flash_sampling_cuda::DeviceHidden;
///
/// // SAFETY: the model's last layer, enqueued on `stream`, writes `hidden`. The next step begins after this one.
/// let hidden = unsafe { DeviceHidden::new(stream, hidden) };
/// # }
/// ```
#[derive(Clone, Debug)]
pub struct DeviceHidden {
    matrix: DeviceMatrix,
    /// The GPU's number.
    device: usize,
    /// The work before the first read.
    ready: Arc<CudaEvent>,
}

impl DeviceHidden {
    /// The hidden states after all work that was enqueued on `stream`.
    ///
    /// # Errors
    /// [`CudaError::Driver`].
    ///
    /// # Safety
    /// * `hidden` is device memory of the stream's device, of the stated size, while this value or a clone exists, and
    ///   until all work on it has run. Calls keep no clone, and wait for their work.
    /// * In this time, only the work that was enqueued on `stream` before this call writes to the memory.
    pub unsafe fn new(stream: &CudaStream, hidden: DeviceMatrix) -> Result<Self, CudaError> {
        let ready = stream.record_event(None).map_err(CudaError::driver("record the hidden states"))?;
        Ok(DeviceHidden { matrix: hidden, device: stream.context().ordinal(), ready: Arc::new(ready) })
    }

    /// The hidden states.
    pub fn matrix(&self) -> DeviceMatrix {
        self.matrix
    }

    /// Orders the hidden states before later work on a stream.
    pub(crate) fn order_before(&self, stream: &CudaStream) -> Result<(), CudaError> {
        if stream.context().ordinal() != self.device {
            return Err(CudaError::Layout { what: "hidden states", reason: "they are on another GPU" });
        }
        stream.wait(&self.ready).map_err(CudaError::driver("wait for the hidden states"))
    }
}
