//! A call of a rank that does not wait: hidden states, parameters and results in device memory.
#![allow(unsafe_code)]

use crate::abi::{RowColumns, TokenColumns};
use crate::device::{DeviceMatrix, Queue};
use cudarc::driver::CudaStream;

/// A call of a rank that does not wait, for [`CudaTiled::enqueue_sharded`](crate::CudaTiled::enqueue_sharded): the
/// hidden states, the parameters and the results of its rows, all in device memory, and the stream of the call.
///
/// ```no_run
/// # use flash_sampling_cuda::{CudaError, CudaExchange, CudaTiled, DeviceMatrix, cudarc::driver::CudaStream};
/// # use flash_sampling_cuda::abi::{RowColumns, TokenColumns};
/// # fn step(
/// #     shard: &mut CudaTiled<'_>, exchange: &mut CudaExchange, stream: &CudaStream, hidden: DeviceMatrix,
/// #     columns: RowColumns, out: TokenColumns,
/// # ) -> Result<(), CudaError> {
/// use flash_sampling_cuda::ColumnCall;
///
/// // SAFETY: the arrays are on this GPU, and live until the tokens are read. The model's last layer, enqueued on
/// // `stream`, writes `hidden`.
/// let call = unsafe { ColumnCall::new(stream, hidden, columns, out) };
/// shard.enqueue_sharded(exchange, &call)
/// # }
/// ```
#[derive(Clone, Copy, Debug)]
pub struct ColumnCall<'s> {
    queue: Queue<'s>,
    hidden: DeviceMatrix,
    columns: RowColumns,
    out: TokenColumns,
}

impl<'s> ColumnCall<'s> {
    /// Makes a call. The kernels read `hidden` and the arrays of `columns` when they run, and write the arrays of `out`.
    ///
    /// # Safety
    /// * `hidden` and all arrays of `columns` and `out` are device memory of the stream's device, until the kernels of
    ///   every call that uses this value have run, also in every launch of a graph that captured the call. Each array has
    ///   the elements that [`RowColumns`] and [`TokenColumns`] name. Each list lies within its tokens. Only work before
    ///   or after the call on `stream` writes to the memory that the kernels read.
    /// * Calls of the sampler follow each other: on one stream, or ordered by events. The same holds for the calls of the
    ///   exchange.
    /// * Until the kernels have run, also in every launch of a graph that captured them, sampler and exchange are neither
    ///   dropped nor converted, and the sampler plans neither more adjusted tokens nor another number of rows. Each of
    ///   these frees memory of the kernels, and none happens while a stream of the context captures.
    pub unsafe fn new(stream: &'s CudaStream, hidden: DeviceMatrix, columns: RowColumns, out: TokenColumns) -> Self {
        // SAFETY: *Memory*: the contract of this function; the sampler and the exchange own the rest, sized before each
        // launch. *Order*: all work of a call is on this stream. *Rows*: the kernel encodes valid rows from any
        // parameters.
        let queue = unsafe { Queue::new(stream) };
        ColumnCall { queue, hidden, columns, out }
    }

    pub(crate) fn queue(&self) -> Queue<'s> {
        self.queue
    }

    pub(crate) fn hidden(&self) -> &DeviceMatrix {
        &self.hidden
    }

    /// The parameters.
    pub fn columns(&self) -> &RowColumns {
        &self.columns
    }

    /// The results.
    pub fn out(&self) -> &TokenColumns {
        &self.out
    }
}
