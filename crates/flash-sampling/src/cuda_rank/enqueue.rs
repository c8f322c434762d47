//! Calls of a rank that do not wait: hidden states, parameters and results are in device memory.

use super::CudaRank;
use flash_sampling_core::{DType, Matrix, PerturbedArgmax, SampleError};
use flash_sampling_cuda::cudarc::driver::CudaStream;
use flash_sampling_cuda::{ColumnCall, CudaError};
use flash_sampling_distributed::{CallStatus, Transport};

impl<T: Transport> CudaRank<'_, T> {
    /// Prepares calls of [`CudaRank::enqueue`] with up to `max_adjusted` adjusted tokens in a row, counted over the whole
    /// vocabulary. A collective call over the transport, which waits: no rank draws before all ranks have loaded the
    /// kernels.
    ///
    /// A larger number than before replaces memory, so graphs that captured earlier calls must not run again.
    ///
    /// # Errors
    /// * [`SampleError::Backend`] with a [`CudaError`]: a kernel or memory is missing. The other ranks then have the
    ///   error [`ShardError::Failed`](flash_sampling_distributed::ShardError::Failed).
    /// * The errors of an exchange over the transport.
    pub fn prepare_enqueue(&mut self, max_adjusted: usize) -> Result<(), SampleError> {
        self.by_host.count_call();
        let prepared = self.local.lock().prepare_enqueue_sharded(&self.exchange, max_adjusted);
        let failure = prepared.as_ref().err().map(CudaError::to_string);
        let status = failure.as_deref().map_or(CallStatus::Ready, CallStatus::Failed);
        let cols = self.by_host.shape().input;
        let nothing = Matrix::from_bytes(&[], DType::F32, 0, cols, cols).map_err(CudaError::from)?;
        self.by_host.can_call(nothing, &[], status)?;
        prepared?;
        self.is_enqueue_prepared = true;
        Ok(())
    }

    /// Enqueues draws from the whole vocabulary on the stream of the call, and returns without waiting:
    /// [`CudaTiled::enqueue_sharded`](flash_sampling_cuda::CudaTiled::enqueue_sharded), which has the statuses of rows.
    ///
    /// A graph can capture the call, if a call of [`CudaRank::prepare_enqueue`] precedes. Otherwise, the first call
    /// prepares for rows without adjusted tokens.
    ///
    /// All ranks make the same sequence of calls of this function and of calls that wait, and no rank waits on its host
    /// for a call that another rank has not enqueued. The GPU waits for half of the transport's time limit; then all rows
    /// have the status [`LATE_RANK`](flash_sampling_cuda::abi::status::LATE_RANK). By NCCL, [`CudaRank::wait`] ends a wait
    /// for a missing rank.
    ///
    /// # Errors
    /// [`SampleError::Backend`] with the errors of
    /// [`CudaTiled::enqueue_sharded`](flash_sampling_cuda::CudaTiled::enqueue_sharded); the errors of
    /// [`CudaRank::prepare_enqueue`] in the first call. The rank then takes no part in the call.
    pub fn enqueue(&mut self, call: &ColumnCall<'_>) -> Result<(), SampleError> {
        self.local.lock().check_enqueue_sharded(call)?;
        if !self.is_enqueue_prepared {
            self.prepare_enqueue(0)?;
        }
        Ok(self.local.lock().enqueue_sharded(&mut self.exchange, call)?)
    }

    /// Waits until the calls of [`CudaRank::enqueue`] on a stream have run, at most for the time limit:
    /// [`CudaExchange::wait`](flash_sampling_cuda::CudaExchange::wait).
    ///
    /// # Errors
    /// [`SampleError::Backend`] with [`CudaError::LateRanks`] if ranks missed this call or an earlier call; with
    /// [`CudaError::Nccl`] or [`CudaError::Driver`].
    pub fn wait(&mut self, stream: &CudaStream) -> Result<(), SampleError> {
        Ok(self.exchange.wait(stream)?)
    }
}
