//! Which draws read the shadow of the weight, the lists of rows with filters, and how many rows the shadow has left to the
//! weight.

use super::DeviceTiled;
use crate::abi::{FilterListCall, FilterPasses, SkipIf};
use crate::device::shadow::{LARGEST_TOP_K, MAX_TOP_K_ELEMENTS, MAX_TOP_K_ROWS, ShadowKernels};
use crate::device::{DeviceMatrix, FusedOutput, Queue};
use crate::error::CudaError;

impl DeviceTiled {
    /// Whether draws for these hidden states read the shadow.
    pub(crate) fn uses_shadow(&self, hidden: &DeviceMatrix) -> bool {
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

    /// Whether launches of few rows read a shadow.
    pub(crate) fn has_shadow(&self) -> bool {
        self.shadow.is_some()
    }

    /// The number of rows, of all complete launches, that a shadow did not decide, so that the draw read the weight, too.
    /// 0 without a shadow; wraps around at 2^32.
    ///
    /// Launches that cannot read the shadow do not count. The function does not wait. After a wait for a launch, the
    /// number contains the launch's rows.
    pub fn fallback_rows(&self) -> u32 {
        self.shadow.as_ref().map_or(0, ShadowKernels::undecided)
    }
}
