//! Which draws read the shadow of the weight, and how many rows it has left to the weight.
#![allow(unsafe_code)]

use super::DeviceTiled;
use crate::device::launch::Queue;
use crate::device::matrix::DeviceMatrix;
use crate::error::CudaError;
use cudarc::driver::CudaStream;

impl DeviceTiled {
    /// Whether draws for these hidden states read the shadow.
    pub(super) fn uses_shadow(&self, hidden: &DeviceMatrix) -> bool {
        self.is_hopper(hidden) && self.shadow.as_ref().is_some_and(|shadow| hidden.rows <= shadow.max_rows())
    }

    /// The number of rows, of all launches so far, that a shadow did not decide, so that the launch read the weight,
    /// too. Waits for the stream.
    ///
    /// # Errors
    /// [`CudaError::Driver`].
    ///
    /// # Safety
    /// The launches so far are on `stream`, or ordered before it.
    pub unsafe fn undecided_by_shadow(&mut self, stream: &CudaStream) -> Result<u32, CudaError> {
        let mut count = [0];
        if let Some(shadow) = &mut self.shadow {
            // SAFETY: *Memory*: this value owns the word. *Order*: the bullet of this function.
            unsafe { Queue::new(stream) }.copy_down(shadow.undecided(), &mut count)?;
        }
        Ok(count[0])
    }
}
