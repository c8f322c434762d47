//! Calls of a rank that do not wait: hidden states, parameters and results are in device memory.

use super::CudaRank;
use flash_sampling_core::{DType, Matrix, PerturbedArgmax, SampleError};
use flash_sampling_cuda::abi::{RowColumns, TokenColumns};
use flash_sampling_cuda::cudarc::driver::CudaStream;
use flash_sampling_cuda::{ColumnCall, CudaError};
use flash_sampling_distributed::{CallStatus, ShardError, Transport};

/// The calls that all ranks have prepared.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Prepared {
    /// Calls whose parameters act on single logits.
    Draws,
    /// Also calls that gather the logits of all ranks.
    Gathers,
}

impl<T: Transport> CudaRank<'_, T> {
    /// Prepares calls of [`CudaRank::enqueue`]. A collective call over the transport, which waits: no rank draws before
    /// all ranks have loaded the kernels.
    ///
    /// Later calls may have the arrays that `columns` and `out` have, or some of them: only whether an array is null
    /// matters. They may have up to `max_adjusted` adjusted tokens in a row, counted over the whole vocabulary. A larger
    /// number than before replaces memory, so graphs that captured earlier calls must not run again.
    ///
    /// # Errors
    /// * [`SampleError::Backend`] with [`CudaError::NotEnqueued`]: the ranks do not support a parameter or a result.
    /// * [`SampleError::Backend`] with another [`CudaError`]: a kernel or memory is missing. The other ranks then have the
    ///   error [`ShardError::Failed`].
    /// * The errors of an exchange over the transport.
    pub fn prepare_enqueue(
        &mut self,
        columns: &RowColumns,
        out: &TokenColumns,
        max_adjusted: usize,
    ) -> Result<(), SampleError> {
        let CudaRank { local, exchange, by_host, enqueues, .. } = self;
        let mut local = local.lock();
        let gathers = local.check_enqueue_sharded(exchange, columns, out)? && *enqueues != Some(Prepared::Gathers);
        by_host.count_call();
        let prepared = local.prepare_enqueue_sharded(exchange, max_adjusted);
        let offered = prepared.and_then(|()| if gathers { local.offer_logits(exchange) } else { Ok(Vec::new()) });
        drop(local);
        let failure = offered.as_ref().err().map(CudaError::to_string);
        let status = failure.as_deref().map_or(CallStatus::Ready, CallStatus::Failed);
        let cols = by_host.shape().input;
        let nothing = Matrix::from_bytes(&[], DType::F32, 0, cols, cols).map_err(CudaError::from)?;
        by_host.can_call(nothing, &[], status)?;
        let offered = offered?;
        if gathers {
            let mut messages = Vec::new();
            by_host.transport().all_gather(&offered, &mut messages).map_err(ShardError::from)?;
            exchange.connect_logits(&messages)?;
            *enqueues = Some(Prepared::Gathers);
        }
        enqueues.get_or_insert(Prepared::Draws);
        Ok(())
    }

    /// Enqueues draws from the whole vocabulary on the stream of the call, and returns without waiting:
    /// [`CudaTiled::enqueue_sharded`](flash_sampling_cuda::CudaTiled::enqueue_sharded), which has the statuses of rows.
    ///
    /// A graph can capture the call, if a call of [`CudaRank::prepare_enqueue`] precedes. Otherwise, the first call of each
    /// kind prepares on all ranks, for rows without adjusted tokens.
    ///
    /// All ranks make the same sequence of calls of this function and of calls that wait. No rank waits on its host for a
    /// call that another rank enqueues only after a later step of this rank. The GPU waits for half of the transport's time
    /// limit; then all rows have the status [`LATE_RANK`](flash_sampling_cuda::abi::status::LATE_RANK). By NCCL,
    /// [`CudaRank::wait`] ends a wait for a missing rank.
    ///
    /// # Errors
    /// [`SampleError::Backend`] with the errors of
    /// [`CudaTiled::enqueue_sharded`](flash_sampling_cuda::CudaTiled::enqueue_sharded); the errors of
    /// [`CudaRank::prepare_enqueue`] in the first call. The rank then takes no part in the call.
    pub fn enqueue(&mut self, call: &ColumnCall<'_>) -> Result<(), SampleError> {
        let gathers = self.local.lock().check_enqueue_sharded(&self.exchange, call.columns(), call.out())?;
        let is_prepared = match self.enqueues {
            None => false,
            Some(prepared) => !gathers || prepared == Prepared::Gathers,
        };
        if !is_prepared {
            self.prepare_enqueue(call.columns(), call.out(), 0)?;
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

    /// The number of rows, of all complete calls, that the shadow of this rank's shard did not decide:
    /// [`CudaTiled::fallback_rows`](flash_sampling_cuda::CudaTiled::fallback_rows). It serves calls of
    /// [`CudaRank::enqueue`]; for a call that waits, [`Samples::fallback_rows`](flash_sampling_core::Samples::fallback_rows)
    /// has the number. 0 without a shadow.
    pub fn fallback_rows(&self) -> u32 {
        self.local.lock().fallback_rows()
    }
}
