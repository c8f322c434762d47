//! Draws that leave logits too: all of them, or the largest of rows with filters.
#![allow(unsafe_code)]

use super::DeviceTiled;
use crate::abi::{HeadTransform, LogitStore};
use crate::device::alignment::check_rows;
use crate::device::fused_hopper::FusedOutput;
use crate::device::matrix::DeviceMatrix;
use crate::device::row_features::RowFeatures;
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
            self.launch_portable(
                stream,
                hidden,
                &call,
                LogitStore { logits, stride: row_stride as u64, block_maxima: 0 },
            )
        }
    }

    /// As [`DeviceTiled::launch`], and stores the logits by the fastest kernel for rows of these features. Returns whether they
    /// are the transformed ones, and not the raw ones.
    ///
    /// # Errors
    /// As [`DeviceTiled::launch`].
    ///
    /// # Safety
    /// As [`DeviceTiled::launch`]; what `stored` names too is device memory of this device until the launch has run, with room
    /// for whole octets of rows.
    pub(crate) unsafe fn launch_storing_fast(
        &mut self,
        stream: &CudaStream,
        hidden: &DeviceMatrix,
        (rows, draws): (u64, u64),
        features: RowFeatures,
        stored: LogitStore,
    ) -> Result<bool, CudaError> {
        let has_maxima = features == RowFeatures::Bare && self.stores_block_maxima(hidden);
        let output = if has_maxima { FusedOutput::StoreLogits(stored) } else { FusedOutput::MasksPenalties(stored) };
        // SAFETY: the same contract.
        unsafe { self.launch_any(stream, hidden, rows, draws, output) }
    }

    /// Whether calls with these hidden states can leave the largest logits of granules beside the logits.
    pub(crate) fn stores_block_maxima(&self, hidden: &DeviceMatrix) -> bool {
        self.has_block_maxima() && self.is_hoppers(hidden)
    }

    /// Whether `top_p_block_max` supports this head: it reads undecided rows by fours of tokens that share a Philox block.
    pub(crate) fn has_block_maxima(&self) -> bool {
        self.head.first_token.is_multiple_of(4) && self.head.transform() == HeadTransform::NONE
    }

    /// Whether calls with these hidden states can list the largest logits.
    pub(crate) fn lists(&self, hidden: &DeviceMatrix) -> bool {
        self.is_hoppers(hidden)
    }

    /// Loads the Hopper kernels that leave this, for every number of rows of the plan, where there are any.
    ///
    /// # Errors
    /// [`CudaError::Compile`], [`CudaError::Driver`].
    pub(crate) fn prepare_leaving(&mut self, output: &FusedOutput) -> Result<(), CudaError> {
        match &mut self.hopper {
            Some(hopper) => hopper.prepare(output, &self.device),
            None => Ok(()),
        }
    }

    /// As [`DeviceTiled::launch`] with [`RowFeatures::Any`](crate::RowFeatures::Any), and leaves
    /// * with [`FusedOutput::MasksPenalties`]: the logits of all rows, by the fastest kernel;
    /// * with [`FusedOutput::Lists`]: the largest logits of rows with filters, which are drawn as greedy ones where these tell all;
    /// * with [`FusedOutput::StoreLogits`]: the raw logits of all rows and the largest of each granule, of
    ///   [`RowFeatures::Bare`](crate::RowFeatures::Bare) alone.
    ///
    /// Returns whether stored logits are the transformed ones, and not the raw ones.
    ///
    /// # Errors
    /// As [`DeviceTiled::launch`].
    ///
    /// # Safety
    /// As [`DeviceTiled::launch`]; what `output` names too is device memory of this device until the launch has run, as row_lists.cuh
    /// and [`block_maxima_bytes`](crate::abi::block_maxima_bytes) state. Lists where [`DeviceTiled::lists`] is true of the hidden states, stores
    /// with block maxima where [`DeviceTiled::stores_block_maxima`] is.
    pub(crate) unsafe fn launch_leaving(
        &mut self,
        stream: &CudaStream,
        hidden: &DeviceMatrix,
        rows: u64,
        draws: u64,
        output: FusedOutput,
    ) -> Result<bool, CudaError> {
        // SAFETY: the same contract.
        unsafe { self.launch_any(stream, hidden, rows, draws, output) }
    }
}
