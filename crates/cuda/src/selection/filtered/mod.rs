//! The fused tiled variant with filters, over device memory: the draw without them, which stores the logits, and then the
//! selection, a block a row, or all blocks together for the few rows that top-p draws anew.
#![allow(unsafe_code)]

mod sharded_filters;

use crate::abi::{
    DeviceAddress, Draw, FilterCall, FilterListCall, LIST_COUNTERS_BYTES, LIST_POSTS, LIST_ROOM, LogitStore, Row,
    RowFilters, RowLists, UNDECIDED_ROWS_SUMMED, UndecidedRows, block_maxima_bytes,
};
use crate::compile::kernels::{self, KernelSource};
use crate::device::alignment::check_aligned;
use crate::device::entries;
use crate::device::fused_hopper::{self, FusedOutput, MAX_ROWS};
use crate::device::gpu::Device;
use crate::device::launch::Queue;
use crate::device::launch_config::ConfiguredKernel;
use crate::device::matrix::DeviceMatrix;
use crate::device::row_features::RowFeatures;
use crate::device::scratch::Scratch;
use crate::device::tiled::{DeviceTiled, RowsAndDraws};
use crate::error::CudaError;
use crate::selection::top_p::{self, TopP};
use core::ops::Range;
use cudarc::driver::CudaStream;
use cudarc::driver::sys::CUstreamCaptureStatus;
use flash_sampling_core::{DType, Knob};
pub(crate) use sharded_filters::NOT_PREPARED;
use sharded_filters::Together;
use std::sync::Arc;

pub(crate) static FILTER_LIST: KernelSource = KernelSource::single_cold("filter_list.cu", kernels::any);
pub(crate) static FILTER_LIST_RANKS: KernelSource =
    KernelSource::single_cold("filter_list_ranks.cu", fused_hopper::serves);
pub(crate) static FILTER_ROW: KernelSource = KernelSource::single_cold("filter_row.cu", kernels::any);

/// The device addresses of a call: rows and their filters, and room for the draws.
#[derive(Clone, Copy, Debug)]
pub(crate) struct FilteredRows {
    pub(crate) rows: DeviceAddress<Row>,
    pub(crate) filters: DeviceAddress<RowFilters>,
    pub(crate) draws: DeviceAddress<Draw>,
}

impl FilteredRows {
    fn unfiltered(&self) -> RowsAndDraws {
        (self.rows, self.draws)
    }
}

/// Draws with min-p, top-k and top-p after a [`DeviceTiled`]: two to four launches a call on the caller's
/// stream, which wait for nothing and, but for the first of each kind, allocate nothing and load nothing
/// ([`DeviceFilters::prepare`] does it before). What is kept is what core's selector keeps.
///
/// A draw may come back as [`UNDECIDED`](crate::abi::status::UNDECIDED): its filters keep more than 2048 tokens before a
/// top-k or a top-p can be tried, or a mass meets its limit to within rounding. [`CudaTiled`](crate::CudaTiled) decides
/// such rows on the host.
#[derive(Debug)]
pub struct DeviceFilters {
    /// Filters a row, except rows that have top-p first.
    by_row: ConfiguredKernel<(FilterCall,)>,
    by_mass: TopP<top_p::OneGpu>,
    tokens: Range<u32>,
    stride: usize,
    max_rows: usize,
    device: Arc<Device>,
    /// Room for the logits of `max_rows` rows, and then for the largest of their granules, once they are needed.
    logits: Option<Scratch>,
    /// Filters a row by its list.
    by_list: ConfiguredKernel<(FilterListCall,)>,
    /// The keys of lists, then their counters and posts; these are zeros but after a launch that failed half-way.
    lists: Scratch,
    are_zeros: bool,
    /// Rows that one pass of top-p leaves open: zeros too.
    open: Scratch,
    are_open_zeros: bool,
    /// For launches of ranks, once they are prepared.
    together: Option<Together>,
}

impl DeviceFilters {
    /// Plans for the tokens of a head and calls of up to `max_rows` rows: loads the kernels, and allocates room for lists,
    /// 33 KiB a row. The first [`launch`](DeviceFilters::launch) allocates room for the logits of as many rows, float32, and
    /// loads kernels; before a capture [`prepare`](DeviceFilters::prepare) does.
    ///
    /// # Errors
    /// * [`CudaError::EmptyPlan`]: no rows. [`CudaError::TooLarge`]: more than 256. [`CudaError::Layout`]: no tokens.
    /// * [`CudaError::Compile`], [`CudaError::Driver`].
    pub fn new(tokens: Range<u32>, max_rows: usize, device: &Arc<Device>) -> Result<Self, CudaError> {
        if max_rows == 0 {
            return Err(CudaError::EmptyPlan { knob: Knob::MaxRows });
        }
        if max_rows > MAX_ROWS {
            return Err(CudaError::TooLarge { what: "rows", found: max_rows, limit: MAX_ROWS });
        }
        if tokens.is_empty() {
            return Err(CudaError::Layout { what: "logits", reason: "they have no tokens" });
        }
        let stride = tokens.len().next_multiple_of(8);
        let zeros = 8 * LIST_ROOM * max_rows..(8 * LIST_ROOM + LIST_COUNTERS_BYTES + 4 * LIST_POSTS) * max_rows;
        let lists = Scratch::new(zeros.end, &[zeros], device)?;
        let bytes = UndecidedRows::bytes(max_rows);
        let open = Scratch::new(bytes, std::slice::from_ref(&(0..bytes)), device)?;
        let by_row = ConfiguredKernel::load(device, &FILTER_ROW, &entries::FILTER_ROW)?;
        let by_list = ConfiguredKernel::load(device, &FILTER_LIST, &entries::FILTER_LIST)?;
        let by_mass = TopP::<top_p::OneGpu>::load(device)?;
        Ok(DeviceFilters {
            by_row,
            by_mass,
            tokens,
            stride,
            max_rows,
            device: device.clone(),
            logits: None,
            by_list,
            lists,
            are_zeros: true,
            open,
            are_open_zeros: true,
            together: None,
        })
    }

    /// The most rows of a call.
    pub fn max_rows(&self) -> usize {
        self.max_rows
    }

    /// Every launch has run: see [`Scratch::settle`].
    pub(crate) fn settle(&mut self) {
        self.logits.iter_mut().for_each(Scratch::settle);
        self.lists.settle();
        self.open.settle();
    }

    /// Allocates the room for logits, and loads the kernels of `sampler` that these launches use, for every number of rows of
    /// its plan: no launch does then, and each can be captured. That is of hidden states of the weight's type, and on Hopper at
    /// addresses and strides that are multiples of 16 bytes; of others the first launch loads the portable kernel.
    ///
    /// # Errors
    /// [`CudaError::Driver`], [`CudaError::Compile`].
    pub fn prepare(&mut self, sampler: &mut DeviceTiled) -> Result<(), CudaError> {
        sampler.prepare(RowFeatures::Any)?;
        sampler.prepare_leaving(&FusedOutput::Lists(RowLists::default()))?;
        if sampler.has_block_maxima() {
            sampler.prepare_leaving(&FusedOutput::StoreLogits(LogitStore::default()))?;
        }
        self.room().map(drop)
    }

    /// Bytes of the logits, in whole octets of rows.
    fn logits_bytes(&self) -> usize {
        4 * self.stride * self.max_rows.next_multiple_of(8)
    }

    /// Where logits are stored.
    fn room(&mut self) -> Result<&mut Scratch, CudaError> {
        let bytes = self.logits_bytes() + block_maxima_bytes(self.max_rows, self.tokens.len());
        match &mut self.logits {
            Some(room) => Ok(room),
            none => Ok(none.insert(Scratch::new(bytes, &[], &self.device)?)),
        }
    }

    fn check(
        &self,
        hidden: &DeviceMatrix,
        sampler: &DeviceTiled,
        filters: DeviceAddress<RowFilters>,
    ) -> Result<(), CudaError> {
        check_aligned("filters", filters)?;
        if hidden.rows > self.max_rows {
            return Err(CudaError::TooLarge { what: "rows", found: hidden.rows, limit: self.max_rows });
        }
        if sampler.tokens() != self.tokens {
            return Err(CudaError::Layout { what: "logits", reason: "they have other tokens than the head" });
        }
        Ok(())
    }

    /// As [`DeviceFilters::launch`] without logits in memory: the draw lists the largest logits of rows whose filters are
    /// [listed](crate::abi::RowFilters::is_listed), at a fraction of the cost. Other rows with filters come back as
    /// [`UNDECIDED`](crate::abi::status::UNDECIDED), and so do the few whose list does not tell: [`DeviceFilters::launch`]
    /// decides them. False, and nothing is launched, where the Hopper kernel does not take the call.
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
        // SAFETY: the bullets of this function and of [`DeviceTiled::new`]; the scratch is this value's and the sampler's.
        let queue = unsafe { Queue::new(stream) };
        self.enqueue_listed(queue, sampler, hidden, FilteredRows { rows, filters, draws })
    }

    /// [`DeviceFilters::launch_listed`].
    pub(crate) fn enqueue_listed(
        &mut self,
        queue: Queue<'_>,
        sampler: &mut DeviceTiled,
        hidden: &DeviceMatrix,
        rows: FilteredRows,
    ) -> Result<bool, CudaError> {
        self.check(hidden, sampler, rows.filters)?;
        if !sampler.lists(hidden) {
            return Ok(false);
        }
        let (lists, are_zeros) = self.begin_lists(queue, rows.filters)?;
        sampler.launch_any(queue, hidden, rows.unfiltered(), FusedOutput::Lists(lists))?;
        if hidden.rows > 0 {
            let call = FilterListCall { lists, rows: rows.rows, draws: rows.draws };
            self.by_list.launch(queue, hidden.rows as u32, (call,))?;
        }
        self.are_zeros = are_zeros;
        Ok(true)
    }

    /// Where lists go, whose counters and posts are zeros for the launches that follow; and whether they are outside of a capture
    /// too, once these leave zeros.
    fn begin_lists(
        &mut self,
        queue: Queue<'_>,
        filters: DeviceAddress<RowFilters>,
    ) -> Result<(RowLists, bool), CudaError> {
        let keys = self.lists.lend::<u64>();
        let counters = keys.add(LIST_ROOM * self.max_rows).cast();
        let posted = counters.add(self.max_rows).cast::<u32>();
        let size = (LIST_COUNTERS_BYTES + 4 * LIST_POSTS) * self.max_rows;
        let are_zeros = std::mem::replace(&mut self.are_zeros, false) || clear(queue, counters.cast(), size)?;
        Ok((RowLists { filters, counters, posted, keys }, are_zeros))
    }

    /// The same of where open rows go.
    fn begin_open(&mut self, queue: Queue<'_>) -> Result<(UndecidedRows, bool), CudaError> {
        let (base, size) = (self.open.lend(), self.open.len());
        let are_zeros = std::mem::replace(&mut self.are_open_zeros, false) || clear(queue, base, size)?;
        Ok((UndecidedRows::at(base, self.max_rows), are_zeros))
    }

    /// Draws for `hidden [rows, hidden]`, as [`DeviceTiled::launch`] does, with filters: `filters` has one
    /// [`abi::RowFilters`](crate::abi::RowFilters) a row.
    ///
    /// # Errors
    /// * [`CudaError::TooLarge`]: more rows than planned.
    /// * [`CudaError::Layout`]: another number of tokens than planned; filters whose address is not a multiple of 8.
    /// * [`CudaError::Driver`]: no memory for the logits, at the first call.
    /// * Those of [`DeviceTiled::launch`].
    ///
    /// # Safety
    /// * As [`DeviceTiled::launch`] with [`RowFeatures::Any`](crate::RowFeatures::Any), for the filters and for this value too.
    /// * No top-k is above [`abi::TOP_K_MAX`](crate::abi::TOP_K_MAX), and no row that has filters is greedy; greedy rows, as
    ///   all others without filters, have [`RowFilters::OFF`].
    pub unsafe fn launch(
        &mut self,
        stream: &CudaStream,
        sampler: &mut DeviceTiled,
        hidden: &DeviceMatrix,
        (rows, filters): (DeviceAddress<Row>, DeviceAddress<RowFilters>),
        draws: DeviceAddress<Draw>,
    ) -> Result<(), CudaError> {
        // SAFETY: the bullets of this function; all rows are of these kinds.
        unsafe { self.launch_kinds(stream, sampler, hidden, (rows, filters), draws, FilterKinds::ALL) }
    }

    /// As [`DeviceFilters::launch`], where the host knows what the rows and filters of a call need: a launch less, and a
    /// faster one for rows with top-p alone.
    ///
    /// # Errors
    /// As [`DeviceFilters::launch`].
    ///
    /// # Safety
    /// As [`DeviceFilters::launch`]; every row, and every row's filters, are of these kinds.
    pub unsafe fn launch_kinds(
        &mut self,
        stream: &CudaStream,
        sampler: &mut DeviceTiled,
        hidden: &DeviceMatrix,
        (rows, filters): (DeviceAddress<Row>, DeviceAddress<RowFilters>),
        draws: DeviceAddress<Draw>,
        kinds: FilterKinds,
    ) -> Result<(), CudaError> {
        // SAFETY: the bullets of this function and of [`DeviceTiled::new`]; the scratch is this value's and the sampler's.
        let queue = unsafe { Queue::new(stream) };
        self.enqueue_kinds(queue, sampler, hidden, FilteredRows { rows, filters, draws }, kinds)
    }

    /// [`DeviceFilters::launch_kinds`].
    pub(crate) fn enqueue_kinds(
        &mut self,
        queue: Queue<'_>,
        sampler: &mut DeviceTiled,
        hidden: &DeviceMatrix,
        rows: FilteredRows,
        kinds: FilterKinds,
    ) -> Result<(), CudaError> {
        self.check(hidden, sampler, rows.filters)?;
        let has_maxima =
            kinds.is_by_block_maxima() && self.by_mass.takes_block_maxima() && sampler.stores_block_maxima(hidden);
        let (stored, output) = self.logit_store(has_maxima)?;
        let is_transformed = sampler.launch_any(queue, hidden, rows.unfiltered(), output)?;
        if hidden.rows == 0 {
            return Ok(());
        }
        let (call, draws) = (self.filter_call(stored, &rows, is_transformed, hidden.rows), hidden.rows as u32);
        if kinds.by_mass {
            let (open, are_zeros) = self.begin_open(queue)?;
            self.by_mass.launch(queue, &call, (call, open), draws)?;
            self.are_open_zeros = are_zeros;
        }
        if kinds.gathered {
            self.by_row.launch(queue, draws, (call,))?;
        }
        Ok(())
    }

    /// Room for the logits of a call, with block maxima or without, and the output that stores them there.
    fn logit_store(&mut self, has_maxima: bool) -> Result<(LogitStore, FusedOutput), CudaError> {
        let (bytes, stride) = (self.logits_bytes(), self.stride as u64);
        let base = self.room()?.lend::<u8>();
        let block_maxima = if has_maxima { base.add(bytes).cast() } else { DeviceAddress::NULL };
        let stored = LogitStore { logits: base.cast(), stride, block_maxima };
        let output = if has_maxima { FusedOutput::StoreLogits(stored) } else { FusedOutput::MasksPenalties(stored) };
        Ok((stored, output))
    }

    /// The argument of the selections over logits that were just stored.
    fn filter_call(&self, stored: LogitStore, rows: &FilteredRows, is_transformed: bool, count: usize) -> FilterCall {
        FilterCall {
            logits: stored.logits,
            row_stride: stored.stride,
            sources: DeviceAddress::NULL,
            rows: rows.rows,
            filters: rows.filters,
            draws: rows.draws,
            first_token: self.tokens.start,
            tokens: self.tokens.len() as u32,
            is_transformed: is_transformed.into(),
            count: count as u32,
            block_maxima: stored.block_maxima,
        }
    }
}

/// Zeros for the launches that follow on the stream. Whether those of other streams find them too: not where a graph captures this,
/// which clears when it runs.
fn clear(queue: Queue<'_>, address: DeviceAddress<u8>, size: usize) -> Result<bool, CudaError> {
    queue.fill(address, 0, size)?;
    let status = queue.stream().capture_status().map_err(CudaError::driver("clear what a failed launch left"))?;
    Ok(status == CUstreamCaptureStatus::CU_STREAM_CAPTURE_STATUS_NONE)
}

/// Which selections the rows of a call need.
#[derive(Clone, Copy, Debug)]
pub struct FilterKinds {
    by_mass: bool,
    gathered: bool,
    /// Every row has top-p alone, or no filters.
    is_top_p_alone: bool,
    rows: RowFeatures,
}

impl FilterKinds {
    /// Any rows, any filters.
    pub const ALL: FilterKinds =
        FilterKinds { by_mass: true, gathered: true, is_top_p_alone: false, rows: RowFeatures::Any };

    /// What these filters need, of any rows.
    pub fn of(filters: &[RowFilters]) -> FilterKinds {
        let gathered = |f: &RowFilters| !f.is_by_mass() && *f != RowFilters { rescale: f.rescale, ..RowFilters::OFF };
        FilterKinds {
            by_mass: filters.iter().any(RowFilters::is_by_mass),
            gathered: filters.iter().any(gathered),
            is_top_p_alone: filters.iter().all(RowFilters::is_top_p_alone),
            ..FilterKinds::ALL
        }
    }

    /// The same of rows of which more is known.
    pub fn with_rows(self, rows: RowFeatures) -> FilterKinds {
        FilterKinds { rows, ..self }
    }

    /// Whether few logits decide, found by the largest of their granules.
    fn is_by_block_maxima(&self) -> bool {
        self.by_mass && self.is_top_p_alone && self.rows == RowFeatures::Bare
    }
}

const _: () = assert!(MAX_ROWS <= UNDECIDED_ROWS_SUMMED, "there is room for the sums of every row");

/// Bytes of logits that are stored for a launch with filters, beyond the first row.
const FILTER_BYTES: usize = 256 << 20;

/// The most rows whose logits fit into those, one at least.
pub(crate) fn rows_within(tokens: usize) -> usize {
    (FILTER_BYTES / (tokens.next_multiple_of(8) * DType::F32.size())).max(1)
}
