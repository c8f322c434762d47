//! Which draws read the shadow of the weight, the lists of rows with filters, and how many rows the shadow has left to the
//! weight.
#![allow(unsafe_code)]

use super::DeviceTiled;
use crate::abi::{FilterListCall, FilterPasses, SkipIf};
use crate::device::shadow::{LARGEST_TOP_K, MAX_TOP_K_ELEMENTS, MAX_TOP_K_ROWS};
use crate::device::{DeviceMatrix, FusedOutput, Queue};
use crate::error::CudaError;
use cudarc::driver::CudaStream;

impl DeviceTiled {
    /// Whether draws for these hidden states read the shadow.
    pub(super) fn uses_shadow(&self, hidden: &DeviceMatrix) -> bool {
        let is_supported = hidden.dtype == self.head.weight.dtype && hidden.is_aligned();
        is_supported && self.shadow.as_ref().is_some_and(|shadow| hidden.rows <= shadow.max_rows())
    }

    /// Whether lists for these hidden states come from the shadow, if no row has a larger top-k.
    pub(crate) fn lists_by_shadow(&self, hidden: &DeviceMatrix, largest_top_k: u32) -> bool {
        let has_top_k = hidden.rows <= MAX_TOP_K_ROWS && hidden.rows * hidden.cols <= MAX_TOP_K_ELEMENTS;
        let most = if has_top_k { LARGEST_TOP_K } else { 0 };
        self.is_hopper(hidden) && self.uses_shadow(hidden) && largest_top_k <= most
    }

    /// Writes the lists of rows with listed filters, and draws for rows without filters: with `by_shadow` from the shadow
    /// if it supports the hidden states, or from the weight. From the weight, rows with filters are drawn as greedy rows;
    /// from the shadow, some rows may be [`UNDECIDED`](crate::abi::status::UNDECIDED), also without filters.
    pub(crate) fn launch_lists(
        &mut self,
        queue: Queue<'_>,
        hidden: &DeviceMatrix,
        filtered: FilterListCall,
        by_shadow: bool,
    ) -> Result<(), CudaError> {
        let (rows, skip_if) =
            ((filtered.rows, filtered.draws), SkipIf::new(filtered.passes, FilterPasses::Logits as u32));
        if !(by_shadow && self.is_hopper(hidden) && self.uses_shadow(hidden)) {
            return self.launch_unless(skip_if, queue, hidden, rows, FusedOutput::Lists(filtered.lists)).map(drop);
        }
        let Some(call) = self.begin(hidden, rows, skip_if)? else { return Ok(()) };
        let shadow = self.shadow.as_mut().expect("it is used");
        shadow.launch_lists(queue, hidden, call, filtered, &self.device)
    }

    /// The number of rows, of all launches so far, that a shadow did not decide, so that the draw read the weight,
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
