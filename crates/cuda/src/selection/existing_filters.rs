//! Filters of existing logits in device memory.

use crate::abi::{self, DeviceAddress, FilterCall, WidenRows};
use crate::compile::{KernelSource, kernels};
use crate::device::{Device, DeviceMatrix, Grid, Kernel, Queue, Scratch, entries};
use crate::error::CudaError;
use crate::first_use::get_or_make;
use crate::selection::{FilterKinds, FilteredRows, LogitFilters};
use flash_sampling_core::DType;
use std::sync::Arc;

/// One instance, for all GPUs.
pub(crate) static WIDEN_ROWS: KernelSource = KernelSource::single("widen_rows.cu", kernels::any);

/// The threads of a block of `widen_rows`, and the tokens of a block.
const WIDEN_THREADS: u32 = 256;
const WIDEN_TOKENS: u32 = 8 * WIDEN_THREADS;

/// The kernels for draws with filters from existing logits. They read float32 logits in place, and a float32 copy of
/// 16-bit logits.
#[derive(Debug)]
pub(crate) struct ExistingFilters {
    by_logits: LogitFilters,
    widen: Kernel<(WidenRows,)>,
    vocab_size: u32,
    max_rows: usize,
    device: Arc<Device>,
    /// Room for the copies of `max_rows` rows, allocated at first use.
    copies: Option<Scratch>,
}

impl ExistingFilters {
    pub(crate) fn new(vocab_size: u32, max_rows: usize, device: &Arc<Device>) -> Result<Self, CudaError> {
        Ok(ExistingFilters {
            by_logits: LogitFilters::new(Some(vocab_size), max_rows, device)?,
            widen: device.function(&WIDEN_ROWS, &WIDEN_ROWS.instance(), &entries::WIDEN_ROWS)?,
            vocab_size,
            max_rows,
            device: device.clone(),
            copies: None,
        })
    }

    /// The number of elements from one copy to the next: a multiple of 16 bytes.
    fn copy_stride(&self) -> usize {
        self.vocab_size.next_multiple_of(4) as usize
    }

    /// Allocates the memory of later launches.
    pub(crate) fn prepare(&mut self) -> Result<(), CudaError> {
        self.copies().map(drop)
    }

    /// The room for copies, allocated at first use.
    fn copies(&mut self) -> Result<DeviceAddress<f32>, CudaError> {
        let bytes = DType::F32.block_bytes() * self.copy_stride() * self.max_rows;
        Ok(get_or_make(&mut self.copies, || Scratch::new(bytes, &[], &self.device))?.begin_use())
    }

    /// Replaces `count` draws without filters by draws with filters. `count` is at most `max_rows`.
    ///
    /// Draw `i` reads row `sources[i]` of the logits, or row `i` without sources. With `is_final`, only rows with a
    /// temperature after their filters may be [`UNDECIDED`](crate::abi::status::UNDECIDED). With `copies_all`, also rows
    /// without filters are copied. Returns the argument of the selection kernels, unless there are no draws.
    pub(crate) fn enqueue(
        &mut self,
        queue: Queue<'_>,
        (logits, sources): (&DeviceMatrix, Option<DeviceAddress<u32>>),
        rows: FilteredRows,
        count: usize,
        (kinds, is_final, copies_all): (FilterKinds, bool, bool),
    ) -> Result<Option<FilterCall>, CudaError> {
        CudaError::check_limits(&[("draws", count, self.max_rows)])?;
        if count == 0 {
            return Ok(None);
        }
        let sources = sources.unwrap_or_default();
        let (logits, row_stride, sources) = match logits.dtype {
            DType::F32 => (logits.address.cast(), logits.row_stride, sources),
            dtype => {
                let (copies, copy_stride) = (self.copies()?, self.copy_stride());
                let call = WidenRows {
                    logits: logits.address,
                    sources,
                    filters: if copies_all { DeviceAddress::NULL } else { rows.filters },
                    copies,
                    row_stride: logits.row_stride as u64,
                    copy_stride: copy_stride as u64,
                    element: abi::element(dtype),
                    tokens: self.vocab_size,
                };
                let blocks = (self.vocab_size.div_ceil(WIDEN_TOKENS), count as u32);
                queue.launch(&self.widen, Grid { blocks, ..Grid::of(0, WIDEN_THREADS) }, (call,))?;
                (copies, copy_stride, DeviceAddress::NULL)
            }
        };
        let call = FilterCall { sources, ..rows.call((logits, row_stride), 0..self.vocab_size, count) };
        self.by_logits.enqueue(queue, call, kinds, is_final)?;
        Ok(Some(call))
    }

    /// Marks the memory as idle after all launches have run; see [`Scratch::mark_idle`].
    pub(crate) fn mark_idle(&mut self) {
        self.by_logits.mark_idle();
        self.copies.iter_mut().for_each(Scratch::mark_idle);
    }
}
