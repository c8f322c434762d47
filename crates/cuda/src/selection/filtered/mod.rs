//! The fused tiled variant with filters, over device memory.
//!
//! The fused kernel draws without filters and stores the logits. The selection kernels then filter, with one block per
//! row; all blocks share the few rows that top-p draws again.
#![allow(unsafe_code)]

mod kinds;
mod logit_filters;
mod sharded_filters;

use crate::abi::{
    DeviceAddress, Draw, FilterCall, FilterListCall, FilterPasses, LIST_COUNTERS_BYTES, LIST_POSTS, LIST_ROOM,
    LogitStore, Row, RowFilters, RowLists, SkipIf, block_maxima_bytes,
};
use crate::compile::{KernelSource, kernels};
use crate::device::{
    ConfiguredKernel, Device, DeviceMatrix, DeviceTiled, FusedOutput, MAX_ROWS, Queue, RowFeatures, RowsAndDraws,
    Scratch, check_aligned, entries, fused_hopper,
};
use crate::error::CudaError;
use crate::first_use::get_or_make;
use core::ops::Range;
use cudarc::driver::CudaStream;
use cudarc::driver::sys::CUstreamCaptureStatus;
use flash_sampling_core::{DType, Knob};
pub use kinds::FilterKinds;
pub(crate) use logit_filters::LogitFilters;
use sharded_filters::RankKernels;
use std::sync::Arc;

pub(crate) static FILTER_LIST: KernelSource = KernelSource::single_cold("filter_list.cu", kernels::any);
pub(crate) static FILTER_LIST_RANKS: KernelSource =
    KernelSource::single_cold("filter_list_ranks.cu", fused_hopper::serves);
pub(crate) static FILTER_ROW: KernelSource = KernelSource::single_cold("filter_row.cu", kernels::any);

/// The device addresses of a call's rows, filters and draws.
#[derive(Clone, Copy, Debug)]
pub(crate) struct FilteredRows {
    pub(crate) rows: DeviceAddress<Row>,
    pub(crate) filters: DeviceAddress<RowFilters>,
    pub(crate) draws: DeviceAddress<Draw>,
    /// For calls that do not wait: a word with the [`FilterPasses`] of the rows, if lists of the largest logits may decide
    /// the rows with filters. Null: no lists, or the host makes the second pass.
    pub(crate) passes: DeviceAddress<u32>,
}

impl FilteredRows {
    /// The rows of a call whose second pass the host makes, if rows need it.
    pub(crate) fn new(
        rows: DeviceAddress<Row>,
        filters: DeviceAddress<RowFilters>,
        draws: DeviceAddress<Draw>,
    ) -> FilteredRows {
        FilteredRows { rows, filters, draws, passes: DeviceAddress::NULL }
    }

    fn unfiltered(&self) -> RowsAndDraws {
        (self.rows, self.draws)
    }

    /// The argument of the selection kernels for the raw logits of `count` rows, with `row_stride` elements from one row
    /// to the next.
    pub(crate) fn call(
        &self,
        (logits, row_stride): (DeviceAddress<f32>, usize),
        tokens: Range<u32>,
        count: usize,
    ) -> FilterCall {
        FilterCall {
            logits,
            row_stride: row_stride as u64,
            sources: DeviceAddress::NULL,
            rows: self.rows,
            filters: self.filters,
            draws: self.draws,
            first_token: tokens.start,
            tokens: tokens.len() as u32,
            is_transformed: 0,
            count: count as u32,
            block_maxima: DeviceAddress::NULL,
            skip_if: SkipIf::default(),
        }
    }
}

/// Draws with min-p, top-k and top-p, with the kernels of a [`DeviceTiled`] and the selection kernels.
///
/// A call takes two to four launches on the caller's stream and does not wait. The first call of each kind loads
/// kernels and allocates memory, unless [`DeviceFilters::prepare`] has done so. The kept tokens equal those of the core
/// crate's selector.
///
/// The result of a draw may be [`UNDECIDED`](crate::abi::status::UNDECIDED). Then its filters keep more than 2048
/// tokens before a top-k or top-p, or a mass equals its limit within rounding. [`CudaTiled`](crate::CudaTiled) decides
/// such rows on the host.
#[derive(Debug)]
pub struct DeviceFilters {
    by_logits: LogitFilters,
    tokens: Range<u32>,
    stride: usize,
    max_rows: usize,
    device: Arc<Device>,
    /// Room for the logits of `max_rows` rows and then for their block maxima. Allocated at first use.
    logits: Option<Scratch>,
    /// Filters rows by their lists.
    by_list: ConfiguredKernel<(FilterListCall,)>,
    /// The keys of lists, then their counters and posts. Every complete launch leaves counters and posts at zero.
    lists: Scratch,
    are_zeros: bool,
    /// The kernels of ranks, once prepared.
    of_ranks: Option<RankKernels>,
}

impl DeviceFilters {
    /// Loads the kernels, and allocates room for lists (65 KiB a row), for the tokens of a head and up to `max_rows`
    /// rows.
    ///
    /// The first [`launch`](DeviceFilters::launch) loads more kernels, and allocates room for the float32 logits of
    /// `max_rows` rows. Before a capture, call [`prepare`](DeviceFilters::prepare), which does the same.
    ///
    /// # Errors
    /// * [`CudaError::EmptyPlan`]: no rows. [`CudaError::TooLarge`]: more than 256. [`CudaError::Layout`]: no tokens.
    /// * [`CudaError::Compile`], [`CudaError::Driver`].
    pub fn new(tokens: Range<u32>, max_rows: usize, device: &Arc<Device>) -> Result<Self, CudaError> {
        if max_rows == 0 {
            return Err(CudaError::EmptyPlan { knob: Knob::MaxRows });
        }
        CudaError::check_limits(&[("rows", max_rows, MAX_ROWS)])?;
        if tokens.is_empty() {
            return Err(CudaError::Layout { what: "logits", reason: "they have no tokens" });
        }
        let stride = tokens.len().next_multiple_of(8);
        let zeros = 8 * LIST_ROOM * max_rows..(8 * LIST_ROOM + LIST_COUNTERS_BYTES + 4 * LIST_POSTS) * max_rows;
        let lists = Scratch::new(zeros.end, &[zeros], device)?;
        let by_logits = LogitFilters::new(None, max_rows, device)?;
        let by_list = ConfiguredKernel::load(device, &FILTER_LIST, &entries::FILTER_LIST)?;
        Ok(DeviceFilters {
            by_logits,
            tokens,
            stride,
            max_rows,
            device: device.clone(),
            logits: None,
            by_list,
            lists,
            are_zeros: true,
            of_ranks: None,
        })
    }

    /// The maximum number of rows in a call.
    pub fn max_rows(&self) -> usize {
        self.max_rows
    }

    /// Marks the scratch as idle after all launches have run; see [`Scratch::mark_idle`].
    pub(crate) fn mark_idle(&mut self) {
        self.logits.iter_mut().for_each(Scratch::mark_idle);
        self.lists.mark_idle();
        self.by_logits.mark_idle();
    }

    /// Allocates the room for logits, and loads the kernels of `sampler`, for every number of rows in its plan. Later
    /// launches allocate and load nothing, so each can be captured.
    ///
    /// This covers hidden states of the weight's type; on Hopper, with addresses and strides that are multiples of 16
    /// bytes. For other hidden states, the first launch loads the portable kernel.
    ///
    /// # Errors
    /// [`CudaError::Driver`], [`CudaError::Compile`].
    pub fn prepare(&mut self, sampler: &mut DeviceTiled) -> Result<(), CudaError> {
        sampler.prepare(RowFeatures::Any)?;
        sampler.prepare_lists()?;
        if sampler.has_block_maxima() {
            sampler.prepare_output(&FusedOutput::StoreLogits(LogitStore::default()))?;
        }
        self.room().map(drop)
    }

    /// The bytes of the logits. The fused kernel stores a multiple of eight rows.
    fn logits_bytes(&self) -> usize {
        4 * self.stride * self.max_rows.next_multiple_of(8)
    }

    /// The room for logits, allocated at first use.
    fn room(&mut self) -> Result<&mut Scratch, CudaError> {
        let bytes = self.logits_bytes() + block_maxima_bytes(self.max_rows, self.tokens.len());
        get_or_make(&mut self.logits, || Scratch::new(bytes, &[], &self.device))
    }

    fn check(
        &self,
        hidden: &DeviceMatrix,
        sampler: &DeviceTiled,
        filters: DeviceAddress<RowFilters>,
    ) -> Result<(), CudaError> {
        check_aligned("filters", filters)?;
        CudaError::check_limits(&[("rows", hidden.rows, self.max_rows)])?;
        if sampler.tokens() != self.tokens {
            return Err(CudaError::Layout { what: "logits", reason: "they have other tokens than the head" });
        }
        Ok(())
    }

    /// Draws as [`DeviceFilters::launch`] does, from lists of the largest logits in place of stored logits.
    ///
    /// The launch is much faster, and decides rows with [listed](crate::abi::RowFilters::is_listed) filters. Other rows
    /// with filters are [`UNDECIDED`](crate::abi::status::UNDECIDED), and so are the few rows whose lists are too
    /// short. [`DeviceFilters::launch`] decides undecided rows. If the head has a shadow, the launch reads the shadow
    /// instead of the weight, and rows without filters may also be undecided. Returns false, and launches nothing, if
    /// the Hopper kernel does not support the call.
    ///
    /// # Errors
    /// As [`DeviceFilters::launch`].
    ///
    /// # Safety
    /// As [`DeviceFilters::launch`].
    pub unsafe fn launch_listed(
        &mut self,
        stream: &CudaStream,
        sampler: &mut DeviceTiled,
        hidden: &DeviceMatrix,
        (rows, filters): (DeviceAddress<Row>, DeviceAddress<RowFilters>),
        draws: DeviceAddress<Draw>,
    ) -> Result<bool, CudaError> {
        // SAFETY: the bullets of this function and of [`DeviceTiled::new`]; this value and the sampler own the scratch.
        let queue = unsafe { Queue::new(stream) };
        self.enqueue_listed(queue, sampler, hidden, FilteredRows::new(rows, filters, draws), true)
    }

    /// [`DeviceFilters::launch_listed`]. With `by_shadow`, reads the shadow of the weight if it supports the hidden states.
    pub(crate) fn enqueue_listed(
        &mut self,
        queue: Queue<'_>,
        sampler: &mut DeviceTiled,
        hidden: &DeviceMatrix,
        rows: FilteredRows,
        by_shadow: bool,
    ) -> Result<bool, CudaError> {
        self.check(hidden, sampler, rows.filters)?;
        if !sampler.can_list(hidden) {
            return Ok(false);
        }
        let (lists, are_zeros) = self.begin_lists(queue, rows.filters)?;
        let FilteredRows { rows, draws, passes, .. } = rows;
        let call = FilterListCall { lists, rows, draws, passes };
        sampler.launch_lists(queue, hidden, call, by_shadow)?;
        if hidden.rows > 0 {
            self.by_list.launch(queue, hidden.rows as u32, (call,))?;
        }
        self.are_zeros = are_zeros;
        Ok(true)
    }

    /// Returns the memory for lists, and clears its counters and posts if necessary. Also returns whether later
    /// launches outside of a captured graph find zeros, if the next launches succeed.
    fn begin_lists(
        &mut self,
        queue: Queue<'_>,
        filters: DeviceAddress<RowFilters>,
    ) -> Result<(RowLists, bool), CudaError> {
        let keys = self.lists.begin_use::<u64>();
        let counters = keys.add(LIST_ROOM * self.max_rows).cast();
        let posted = counters.add(self.max_rows).cast::<u32>();
        let size = (LIST_COUNTERS_BYTES + 4 * LIST_POSTS) * self.max_rows;
        let are_zeros = std::mem::replace(&mut self.are_zeros, false) || clear(queue, counters.cast(), size)?;
        Ok((RowLists { filters, counters, posted, keys }, are_zeros))
    }

    /// Draws for `hidden [rows, hidden]` with filters: [`DeviceTiled::launch`] with one
    /// [`abi::RowFilters`](crate::abi::RowFilters) per row.
    ///
    /// If the host knows the kinds of rows and filters, `kinds` saves a launch, and selects faster launches for rows
    /// without masks, biases and penalties. Otherwise `kinds` is [`FilterKinds::ALL`].
    ///
    /// # Errors
    /// * [`CudaError::TooLarge`]: more rows than planned.
    /// * [`CudaError::Layout`]: other tokens than planned; the address of the filters is not a multiple of 8.
    /// * [`CudaError::Driver`]: no memory for the logits, at the first call.
    /// * The errors of [`DeviceTiled::launch`].
    ///
    /// # Safety
    /// * The bullets of [`DeviceTiled::launch`] with [`RowFeatures::Any`](crate::RowFeatures::Any), also for the
    ///   filters and this value.
    /// * No top-k exceeds [`abi::TOP_K_MAX`](crate::abi::TOP_K_MAX).
    /// * No row with filters is greedy. Rows without filters, and so all greedy rows, have [`RowFilters::OFF`].
    /// * `kinds` includes every row and its filters.
    pub unsafe fn launch(
        &mut self,
        stream: &CudaStream,
        sampler: &mut DeviceTiled,
        hidden: &DeviceMatrix,
        (rows, filters): (DeviceAddress<Row>, DeviceAddress<RowFilters>),
        draws: DeviceAddress<Draw>,
        kinds: FilterKinds,
    ) -> Result<(), CudaError> {
        // SAFETY: the bullets of this function and of [`DeviceTiled::new`]; this value and the sampler own the scratch.
        let queue = unsafe { Queue::new(stream) };
        self.enqueue(queue, sampler, hidden, FilteredRows::new(rows, filters, draws), kinds)
    }

    /// [`DeviceFilters::launch`].
    pub(crate) fn enqueue(
        &mut self,
        queue: Queue<'_>,
        sampler: &mut DeviceTiled,
        hidden: &DeviceMatrix,
        rows: FilteredRows,
        kinds: FilterKinds,
    ) -> Result<(), CudaError> {
        self.enqueue_rows(queue, sampler, hidden, &rows, (kinds, false), false).map(drop)
    }

    /// Draws as [`DeviceFilters::launch`] does, and decides all rows without a temperature after their filters. With
    /// `stores_all`, the raw logits of all rows are stored, also of rows without filters. Returns the argument of the
    /// selection kernels, unless the call has no rows.
    ///
    /// With a word for [`FilteredRows::passes`], a first pass draws from lists, and the second pass over all logits runs
    /// only if the device finds that the lists do not decide all rows.
    pub(crate) fn enqueue_decided(
        &mut self,
        queue: Queue<'_>,
        sampler: &mut DeviceTiled,
        hidden: &DeviceMatrix,
        rows: FilteredRows,
        (kinds, stores_all): (FilterKinds, bool),
        by_shadow: bool,
    ) -> Result<Option<FilterCall>, CudaError> {
        let is_listed = !rows.passes.is_null() && self.enqueue_listed(queue, sampler, hidden, rows, by_shadow)?;
        // Without lists, the second pass always runs.
        let rows = FilteredRows { passes: if is_listed { rows.passes } else { DeviceAddress::NULL }, ..rows };
        self.enqueue_rows(queue, sampler, hidden, &rows, (kinds, stores_all), true)
    }

    /// Returns the argument of the selection kernels, unless the call has no rows.
    fn enqueue_rows(
        &mut self,
        queue: Queue<'_>,
        sampler: &mut DeviceTiled,
        hidden: &DeviceMatrix,
        rows: &FilteredRows,
        (kinds, stores_all): (FilterKinds, bool),
        is_final: bool,
    ) -> Result<Option<FilterCall>, CudaError> {
        self.check(hidden, sampler, rows.filters)?;
        let has_maxima = kinds.is_by_block_maxima()
            && self.by_logits.by_mass.supports_block_maxima()
            && sampler.stores_block_maxima(hidden);
        let filters = if stores_all { DeviceAddress::NULL } else { rows.filters };
        let (stored, output) = self.logit_store(has_maxima, filters)?;
        let skip_if = SkipIf::new(rows.passes, FilterPasses::Lists as u32);
        let is_transformed = sampler.launch_unless(skip_if, queue, hidden, rows.unfiltered(), output)?;
        if hidden.rows == 0 {
            return Ok(None);
        }
        let call = FilterCall { skip_if, ..self.filter_call(stored, rows, is_transformed, hidden.rows) };
        self.by_logits.enqueue(queue, call, kinds, is_final)?;
        Ok(Some(call))
    }

    /// The memory for the logits of a call, with or without block maxima, and the kernel's output for this memory. Without
    /// filters (null), the raw logits of all rows are stored.
    fn logit_store(
        &mut self,
        has_maxima: bool,
        filters: DeviceAddress<RowFilters>,
    ) -> Result<(LogitStore, FusedOutput), CudaError> {
        let (bytes, stride) = (self.logits_bytes(), self.stride as u64);
        let base = self.room()?.begin_use::<u8>();
        let block_maxima = if has_maxima { base.add(bytes).cast() } else { DeviceAddress::NULL };
        let is_raw = filters.is_null().into();
        let stored = LogitStore { logits: base.cast(), stride, block_maxima, is_raw, padding: 0, filters };
        let output = if has_maxima { FusedOutput::StoreLogits(stored) } else { FusedOutput::MasksPenalties(stored) };
        Ok((stored, output))
    }

    /// The argument of the selection kernels, for stored logits.
    fn filter_call(&self, stored: LogitStore, rows: &FilteredRows, is_transformed: bool, count: usize) -> FilterCall {
        let call = rows.call((stored.logits, self.stride), self.tokens.clone(), count);
        FilterCall { is_transformed: is_transformed.into(), block_maxima: stored.block_maxima, ..call }
    }
}

/// Clears memory for the next launches on the stream. Returns whether later launches outside of a captured graph find
/// zeros too: a captured graph clears the memory only when it runs.
fn clear(queue: Queue<'_>, address: DeviceAddress<u8>, size: usize) -> Result<bool, CudaError> {
    queue.fill(address, 0, size)?;
    let status = queue.stream().capture_status().map_err(CudaError::driver("clear the memory of a failed launch"))?;
    Ok(status == CUstreamCaptureStatus::CU_STREAM_CAPTURE_STATUS_NONE)
}

/// The maximum bytes of stored logits in a launch with filters of more than one row.
const FILTER_BYTES: usize = 256 << 20;

/// The number of rows whose logits fit into [`FILTER_BYTES`], at least 1.
pub(crate) fn rows_within(tokens: usize) -> usize {
    (FILTER_BYTES / (tokens.next_multiple_of(8) * DType::F32.block_bytes())).max(1)
}
