//! Launches that also store logits: all logits, or the largest logits of rows with filters.
#![allow(unsafe_code)]

use super::{DeviceTiled, RowsAndDraws};
use crate::abi::{DeviceAddress, Draw, HeadTransform, LogitStore, Row, RowLists, SkipIf};
use crate::device::{DeviceMatrix, FusedOutput, Queue, RowFeatures, check_rows};
use crate::error::CudaError;
use cudarc::driver::CudaStream;
use flash_sampling_core::DType;

impl DeviceTiled {
    /// Draws like [`DeviceTiled::launch`], and stores the transformed logits in float32 (paper App. K).
    ///
    /// The logit of row `r` and weight row `t` is stored at `logits + r * row_stride + t`. An invalid logit is stored
    /// as -inf, and the draw of its row reports it. This function uses the portable kernel on all GPUs.
    ///
    /// # Errors
    /// As [`DeviceTiled::launch`]; [`CudaError::Layout`] also if the logits' address is not a multiple of 4, or if
    /// `row_stride` is smaller than the number of weight rows.
    ///
    /// # Safety
    /// As [`DeviceTiled::launch`]; the logits are also device memory of this device until the launch has run.
    pub unsafe fn launch_storing(
        &mut self,
        stream: &CudaStream,
        hidden: &DeviceMatrix,
        rows: DeviceAddress<Row>,
        draws: DeviceAddress<Draw>,
        logits: DeviceAddress<f32>,
        row_stride: usize,
    ) -> Result<(), CudaError> {
        // SAFETY: the bullets of this function and of `new`; this value owns the scratch.
        let queue = unsafe { Queue::new(stream) };
        self.enqueue_storing(queue, hidden, (rows, draws), logits, row_stride)
    }

    /// [`DeviceTiled::launch_storing`].
    pub(crate) fn enqueue_storing(
        &mut self,
        queue: Queue<'_>,
        hidden: &DeviceMatrix,
        rows: RowsAndDraws,
        logits: DeviceAddress<f32>,
        row_stride: usize,
    ) -> Result<(), CudaError> {
        let (address, cols, dtype) = (logits.cast(), self.head.weight.rows, DType::F32);
        DeviceMatrix { address, dtype, rows: hidden.rows, cols, row_stride }.check("logits")?;
        check_rows(rows.0, rows.1)?;
        if !self.head.check_hidden(hidden, self.max_rows)? {
            return Ok(());
        }
        let call = self.call(hidden, rows, SkipIf::default());
        let stored = LogitStore { logits, stride: row_stride as u64, ..LogitStore::default() };
        self.launch_portable(queue, hidden, call, stored)
    }

    /// Draws, and stores the logits by the fastest kernel for rows of these features. `stored` has room for a multiple
    /// of eight rows. Returns whether the logits are transformed; otherwise they are raw. All calls of a value for hidden
    /// states of one type and alignment return the same.
    pub(crate) fn enqueue_storing_fast(
        &mut self,
        queue: Queue<'_>,
        hidden: &DeviceMatrix,
        rows: RowsAndDraws,
        features: RowFeatures,
        stored: LogitStore,
    ) -> Result<bool, CudaError> {
        let has_maxima = features == RowFeatures::Bare && self.stores_block_maxima(hidden);
        let output = if has_maxima { FusedOutput::StoreLogits(stored) } else { FusedOutput::MasksPenalties(stored) };
        self.launch_any(queue, hidden, rows, output)
    }

    /// Whether calls with these hidden states can store the largest logit of each granule besides the logits.
    pub(crate) fn stores_block_maxima(&self, hidden: &DeviceMatrix) -> bool {
        self.has_block_maxima() && self.is_hopper(hidden)
    }

    /// Whether `top_p_block_max` supports this head: it reads undecided rows in Philox blocks of four tokens.
    pub(crate) fn has_block_maxima(&self) -> bool {
        self.head.first_token.is_multiple_of(4) && self.head.transform() == HeadTransform::NONE
    }

    /// Whether calls with these hidden states can list the largest logits.
    pub(crate) fn can_list(&self, hidden: &DeviceMatrix) -> bool {
        self.is_hopper(hidden)
    }

    /// Loads the Hopper kernels with this output, if any, for every number of rows of the plan.
    ///
    /// # Errors
    /// [`CudaError::Compile`], [`CudaError::Driver`].
    pub(crate) fn prepare_output(&mut self, output: &FusedOutput) -> Result<(), CudaError> {
        match &mut self.hopper {
            Some(hopper) => hopper.prepare(output, &self.device),
            None => Ok(()),
        }
    }

    /// Loads the kernels of [`DeviceTiled::launch_lists`], if any, for every number of rows of the plan.
    ///
    /// # Errors
    /// [`CudaError::Compile`], [`CudaError::Driver`].
    pub(crate) fn prepare_lists(&mut self) -> Result<(), CudaError> {
        self.prepare_output(&FusedOutput::Lists(RowLists::default()))?;
        self.shadow.as_mut().map_or(Ok(()), |shadow| shadow.prepare_lists(&self.device))
    }
}
