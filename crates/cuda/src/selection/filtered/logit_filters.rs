//! The kernels that filter float32 logits in device memory.

use super::{FILTER_ROW, FilterKinds, clear};
use crate::abi::{DeviceAddress, FilterCall, UNDECIDED_ROWS_SUMMED, UndecidedRows, block_maxima_bytes};
use crate::device::{ConfiguredKernel, Device, Grid, Kernel, MAX_ROWS, Queue, Scratch, entries, launch_words};
use crate::error::CudaError;
use crate::selection::top_p;
use crate::selection::top_p::TopP;
use flash_sampling_core::backend::MassHistogram;
use std::sync::Arc;

/// The selection kernels, and the memory of these kernels for up to `max_rows` draws.
#[derive(Debug)]
pub(crate) struct LogitFilters {
    /// Filters rows whose first filter is not top-p, and decides undecided rows.
    by_row: ConfiguredKernel<(FilterCall, DeviceAddress<f64>)>,
    /// The weights of mass bins.
    weights: Scratch,
    /// Filters rows whose first filter is top-p.
    pub(super) by_mass: TopP<top_p::OneGpu>,
    max_rows: usize,
    /// The rows that the first pass of top-p leaves undecided. The memory is zero after every complete launch.
    open: Scratch,
    pub(super) are_open_zeros: bool,
    /// The granule maxima of logits that no fused kernel of this GPU stored.
    maxima: Option<FindBlockMaxima>,
}

/// The kernel that finds the largest logit of each granule (16 tokens), and the memory for these logits.
#[derive(Debug)]
struct FindBlockMaxima {
    kernel: Kernel<(FilterCall, DeviceAddress<u16>)>,
    threads: u32,
    /// The number of tokens of a block.
    tokens: u32,
    memory: Scratch,
}

impl FindBlockMaxima {
    fn new(tokens: u32, max_rows: usize, device: &Arc<Device>) -> Result<Self, CudaError> {
        let module = device.module(&FILTER_ROW, &FILTER_ROW.instance())?;
        let memory = Scratch::new(block_maxima_bytes(max_rows, tokens as usize), &[], device)?;
        let kernel = Kernel::load(&module, &entries::FIND_BLOCK_MAXIMA)?;
        let [tokens, threads] = launch_words(&module, "find_block_maxima_launch", device)?;
        Ok(FindBlockMaxima { kernel, threads, tokens, memory })
    }

    /// Whether the kernel can read the rows of a call by loads of 16 bytes.
    fn can_read(call: &FilterCall) -> bool {
        call.logits.get().is_multiple_of(16) && call.row_stride.is_multiple_of(4) && call.tokens.is_multiple_of(4)
    }

    /// Enqueues the kernel for the rows with min-p first or a top-k. Returns the address of the maxima.
    fn launch(&mut self, queue: Queue<'_>, call: FilterCall) -> Result<DeviceAddress<u16>, CudaError> {
        let to = self.memory.begin_use();
        let blocks = (call.tokens.div_ceil(self.tokens), call.count);
        queue.launch(&self.kernel, Grid { blocks, ..Grid::of(0, self.threads) }, (call, to))?;
        Ok(to)
    }
}

const _: () = assert!(MAX_ROWS <= UNDECIDED_ROWS_SUMMED, "there is no room for the sums of every row");

impl LogitFilters {
    /// Loads the kernels and allocates their memory. For logits without stored block maxima, `tokens` is the number of
    /// tokens of a row. For the logits of a fused kernel, `tokens` is `None`.
    pub(crate) fn new(tokens: Option<u32>, max_rows: usize, device: &Arc<Device>) -> Result<Self, CudaError> {
        let bytes = UndecidedRows::bytes(max_rows);
        Ok(LogitFilters {
            by_row: ConfiguredKernel::load(device, &FILTER_ROW, &entries::FILTER_ROW)?,
            weights: Scratch::of(MassHistogram::weights(), device)?,
            by_mass: TopP::<top_p::OneGpu>::load(device)?,
            max_rows,
            open: Scratch::new(bytes, std::slice::from_ref(&(0..bytes)), device)?,
            are_open_zeros: true,
            maxima: tokens.map(|tokens| FindBlockMaxima::new(tokens, max_rows, device)).transpose()?,
        })
    }

    /// Enqueues the kernels that replace the draws without filters by draws with filters. With `is_final`, only rows
    /// with a temperature after their filters may be [`UNDECIDED`](crate::abi::status::UNDECIDED).
    pub(crate) fn enqueue(
        &mut self,
        queue: Queue<'_>,
        call: FilterCall,
        kinds: FilterKinds,
        is_final: bool,
    ) -> Result<(), CudaError> {
        if kinds.by_mass {
            let (open, are_zeros) = self.begin_open(queue)?;
            self.by_mass.launch(queue, &call, (call, open), call.count)?;
            self.are_open_zeros = are_zeros;
        }
        if kinds.gathered || (is_final && kinds.by_mass) {
            let weights = if is_final { self.weights.begin_use() } else { DeviceAddress::NULL };
            let block_maxima = match &mut self.maxima {
                Some(maxima) if kinds.gathered && FindBlockMaxima::can_read(&call) => maxima.launch(queue, call)?,
                _ => call.block_maxima,
            };
            self.by_row.launch(queue, call.count, (FilterCall { block_maxima, ..call }, weights))?;
        }
        Ok(())
    }

    /// Returns the memory for undecided rows, and clears this memory if necessary. Also returns whether later launches
    /// outside of a captured graph find zeros, provided that the next launches succeed.
    pub(super) fn begin_open(&mut self, queue: Queue<'_>) -> Result<(UndecidedRows, bool), CudaError> {
        let (base, size) = (self.open.begin_use(), self.open.len());
        let are_zeros = std::mem::replace(&mut self.are_open_zeros, false) || clear(queue, base, size)?;
        Ok((UndecidedRows::at(base, self.max_rows), are_zeros))
    }

    /// Marks the memory as idle after all launches have run; see [`Scratch::mark_idle`].
    pub(crate) fn mark_idle(&mut self) {
        [&mut self.weights, &mut self.open].into_iter().for_each(Scratch::mark_idle);
        self.maxima.iter_mut().for_each(|maxima| maxima.memory.mark_idle());
    }
}
