//! Draws that leave logits too: all of them, or the largest of rows with filters.
#![allow(unsafe_code)]

use super::DeviceTiled;
use crate::abi::{HeadTransform, LogitStore, RowLists};
use crate::device::address::check_rows;
use crate::device::fused_hopper::More;
use crate::device::matrix::DeviceMatrix;
use crate::error::CudaError;
use cudarc::driver::CudaStream;
use flash_sampling_core::DType;

impl DeviceTiled {
    /// Draws as [`DeviceTiled::launch`] does, and keeps the transformed logits (paper App. K), float32: that of row `r`
    /// and of the weight's row `t` at the device address `logits + 4 * (r * row_stride + t)`. An invalid logit is stored
    /// as -inf, and its row's draw says so. Always the portable kernel's work, on Hopper too.
    ///
    /// # Errors
    /// As [`DeviceTiled::launch`]; [`CudaError::Layout`] also when the logits' address is not a multiple of 4 or
    /// `row_stride` is smaller than the weight's rows.
    ///
    /// # Safety
    /// As [`DeviceTiled::launch`]; the logits too are device memory of this device until the launch has run.
    pub unsafe fn launch_storing(
        &mut self,
        stream: &CudaStream,
        hidden: &DeviceMatrix,
        rows: u64,
        draws: u64,
        logits: u64,
        row_stride: usize,
    ) -> Result<(), CudaError> {
        let (cols, dtype) = (self.head.weight.rows, DType::F32);
        DeviceMatrix { address: logits, dtype, rows: hidden.rows, cols, row_stride }.check("logits")?;
        check_rows(rows, draws)?;
        if !self.head.takes(hidden, self.max_rows)? {
            return Ok(());
        }
        let call = self.call(hidden, rows, draws);
        // SAFETY: the same contract.
        unsafe {
            self.launch_portable(stream, hidden, &call, LogitStore { logits, stride: row_stride as u64, tops: 0 })
        }
    }

    /// As [`DeviceTiled::launch`] with [`RowKinds::Any`](crate::RowKinds::Any), and stores the logits of all rows by the fastest kernel, `row_stride` floats
    /// apart. Returns whether they are the transformed ones, and not the raw ones.
    ///
    /// # Errors
    /// As [`DeviceTiled::launch`].
    ///
    /// # Safety
    /// As [`DeviceTiled::launch`]; the logits too are device memory of this device until the launch has run.
    pub(crate) unsafe fn launch_storing_any(
        &mut self,
        stream: &CudaStream,
        hidden: &DeviceMatrix,
        rows: u64,
        draws: u64,
        stored: LogitStore,
    ) -> Result<bool, CudaError> {
        // SAFETY: the same contract.
        unsafe { self.launch_any(stream, hidden, rows, draws, More::Knobs(stored)) }
    }

    /// Whether calls with these hidden states can leave the largest logits of granules beside the logits.
    pub(crate) fn stores_tops(&self, hidden: &DeviceMatrix) -> bool {
        self.has_tops() && self.is_hoppers(hidden)
    }

    /// Whether `select_by_tops` takes rows of this head: those that it leaves open are read by fours of tokens that share a
    /// block of random words.
    fn has_tops(&self) -> bool {
        self.head.first_token.is_multiple_of(4) && self.head.transform() == HeadTransform::NONE
    }

    /// Loads the kernels that store them, for every number of rows of the plan, where there are any for this head.
    pub(crate) fn prepare_storing_tops(&mut self) -> Result<(), CudaError> {
        if !self.has_tops() {
            return Ok(());
        }
        let more = More::Stores(LogitStore::default());
        self.hopper.as_mut().map_or(Ok(()), |hopper| hopper.prepare(&more, &self.device))
    }

    /// As [`DeviceTiled::launch`] with [`RowKinds::Bare`](crate::RowKinds::Bare), and stores the raw logits of all rows, and the
    /// largest of each granule.
    ///
    /// # Errors
    /// As [`DeviceTiled::launch`].
    ///
    /// # Safety
    /// As [`DeviceTiled::launch`]; [`DeviceTiled::stores_tops`] is true of the hidden states; logits and
    /// the [largest of granules](crate::abi::tops_bytes) too are device memory of this device until the launch has run.
    pub(crate) unsafe fn launch_storing_tops(
        &mut self,
        stream: &CudaStream,
        hidden: &DeviceMatrix,
        rows: u64,
        draws: u64,
        stored: LogitStore,
    ) -> Result<(), CudaError> {
        // SAFETY: the same contract.
        unsafe { self.launch_any(stream, hidden, rows, draws, More::Stores(stored)) }.map(drop)
    }

    /// Whether calls with these hidden states can list the largest logits.
    pub(crate) fn lists(&self, hidden: &DeviceMatrix) -> bool {
        self.is_hoppers(hidden)
    }

    /// Loads the kernels that list, for every number of rows of the plan.
    pub(crate) fn prepare_listing(&mut self) -> Result<(), CudaError> {
        let more = More::Lists(RowLists { filters: 0, counters: 0, posted: 0, keys: 0 });
        self.hopper.as_mut().map_or(Ok(()), |hopper| hopper.prepare(&more, &self.device))
    }

    /// As [`DeviceTiled::launch`] with [`RowKinds::Any`](crate::RowKinds::Any), but rows with filters leave their largest logits in `lists`, and a greedy
    /// draw where these tell all.
    ///
    /// # Errors
    /// As [`DeviceTiled::launch`].
    ///
    /// # Safety
    /// As [`DeviceTiled::launch`]; [`DeviceTiled::lists`] is true of the hidden states; the lists are device
    /// memory, as row_lists.cuh states, until the launch has run.
    pub(crate) unsafe fn launch_listing(
        &mut self,
        stream: &CudaStream,
        hidden: &DeviceMatrix,
        rows: u64,
        draws: u64,
        lists: RowLists,
    ) -> Result<(), CudaError> {
        // SAFETY: the same contract.
        unsafe { self.launch_any(stream, hidden, rows, draws, More::Lists(lists)) }.map(drop)
    }
}
