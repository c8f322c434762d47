//! The kernels that filter float32 logits in device memory.

use super::{FILTER_ROW, FilterKinds, clear};
use crate::abi::{DeviceAddress, FilterCall, UNDECIDED_ROWS_SUMMED, UndecidedRows};
use crate::device::entries;
use crate::device::fused_hopper::MAX_ROWS;
use crate::device::gpu::Device;
use crate::device::launch::Queue;
use crate::device::launch_config::ConfiguredKernel;
use crate::device::scratch::Scratch;
use crate::error::CudaError;
use crate::selection::top_p::{self, TopP};
use flash_sampling_core::backend::MassHistogram;
use std::sync::Arc;

/// The selection kernels, and their memory for up to `max_rows` draws.
#[derive(Debug)]
pub(crate) struct LogitFilters {
    /// Filters rows whose first filter is not top-p, and decides undecided rows.
    by_row: ConfiguredKernel<(FilterCall, DeviceAddress<f64>)>,
    /// The weights of mass bins.
    weights: Scratch,
    pub(super) by_mass: TopP<top_p::OneGpu>,
    max_rows: usize,
    /// Rows that the first pass of top-p leaves undecided. Every complete launch leaves zeros.
    open: Scratch,
    pub(super) are_open_zeros: bool,
}

const _: () = assert!(MAX_ROWS <= UNDECIDED_ROWS_SUMMED, "there is no room for the sums of every row");

impl LogitFilters {
    pub(crate) fn new(max_rows: usize, device: &Arc<Device>) -> Result<Self, CudaError> {
        let bytes = UndecidedRows::bytes(max_rows);
        Ok(LogitFilters {
            by_row: ConfiguredKernel::load(device, &FILTER_ROW, &entries::FILTER_ROW)?,
            weights: Scratch::of(MassHistogram::weights(), device)?,
            by_mass: TopP::<top_p::OneGpu>::load(device)?,
            max_rows,
            open: Scratch::new(bytes, std::slice::from_ref(&(0..bytes)), device)?,
            are_open_zeros: true,
        })
    }

    /// Replaces the draws without filters of a call's rows by draws with filters. With `is_final`, only rows with a
    /// temperature after their filters may be [`UNDECIDED`](crate::abi::status::UNDECIDED).
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
            self.by_row.launch(queue, call.count, (call, weights))?;
        }
        Ok(())
    }

    /// Returns the memory for undecided rows, and clears it if necessary. Also returns whether later launches outside
    /// of a captured graph find zeros, if the next launches succeed.
    pub(super) fn begin_open(&mut self, queue: Queue<'_>) -> Result<(UndecidedRows, bool), CudaError> {
        let (base, size) = (self.open.begin_use(), self.open.len());
        let are_zeros = std::mem::replace(&mut self.are_open_zeros, false) || clear(queue, base, size)?;
        Ok((UndecidedRows::at(base, self.max_rows), are_zeros))
    }

    /// Marks the memory as idle after all launches have run; see [`Scratch::mark_idle`].
    pub(crate) fn mark_idle(&mut self) {
        [&mut self.weights, &mut self.open].into_iter().for_each(Scratch::mark_idle);
    }
}
