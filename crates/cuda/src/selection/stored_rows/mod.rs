//! Transformed logits that are stored on the GPU, and what is requested of them: masses, the best tokens by score or by
//! logit, draws, and near ties evaluated canonically.
//!
//! ```text
//! store -> masses, the largest logits: row_summary
//!       -> draws: standalone -> near_ties -> canonical      (the last two for a canonical plan)
//!       -> lists: top_list               -> canonical
//!       -> frontiers, tokens above floors, sums: stored_scan
//! ```
#![allow(unsafe_code)]

mod launches;
mod query_results;
mod reads;
mod summaries;
mod sums;

use crate::abi::{DeviceAddress, Draw, Item, KeptToken, LogitStore, Row, StoredLogits, block_maxima_bytes};
use crate::device::gpu::Device;
use crate::device::launch::Queue;
use crate::device::pinned::Pinned;
use crate::device::standalone::DeviceStandalone;
use crate::error::CudaError;
use crate::selection::stored_kernels::StoredKernels;
use crate::selection::stored_scan::StoredScanKernels;
use core::ops::Range;
use cudarc::driver::{CudaSlice, CudaStream};
use flash_sampling_core::{DType, MassHistogram};
use std::sync::Arc;
use summaries::Summaries;
pub(crate) use summaries::{LONGEST_LIST, SummaryInput};

/// Bytes of stored logits, and of scores, beyond the first row of each.
const LOGITS_BYTES: usize = 256 << 20;
const SCORES_BYTES: usize = 64 << 20;
/// The fused kernel stores whole octets of rows.
const OCTET: usize = 8;
/// The most rows that are stored at a time.
pub(crate) const MAX_ROWS: usize = 256;
/// The most items of a launch.
const MAX_ITEMS: usize = 4096;
/// Bytes of a kept token, and where they begin behind their count.
const KEPT: usize = size_of::<KeptToken>();
const KEPT_AT: usize = 16;

/// Room for the transformed logits of some rows, and the kernels over them.
#[derive(Debug)]
pub(crate) struct StoredRows {
    device: Arc<Device>,
    tokens: Range<u32>,
    rows: usize,
    stride: usize,
    kernels: StoredKernels,
    /// Loaded when a shard is surveyed.
    surveys: Option<StoredScanKernels>,
    draw: DeviceStandalone,
    logits: CudaSlice<f32>,
    /// Beside the logits, for the kernel that stores both.
    block_maxima: CudaSlice<u16>,
    summaries: Summaries,
    /// Sums of places and moments.
    words: CudaSlice<u64>,
    /// The items of a launch: their noise, themselves, their sources.
    inputs: CudaSlice<u8>,
    draws: CudaSlice<Draw>,
    /// `[list_blocks, tokens]`.
    scores: CudaSlice<u32>,
    list_blocks: usize,
    kept: CudaSlice<KeptToken>,
    count: CudaSlice<u64>,
    capacity: usize,
    staged: Vec<u8>,
    draws_here: Vec<Draw>,
    /// The count of kept tokens, and behind it the tokens.
    results: Pinned,
    /// How many kept tokens are fetched with their count, of items whose number is not known.
    expected: usize,
    /// Kept tokens by items, and where each item's end.
    kept_here: Vec<KeptToken>,
    kept_ends: Vec<usize>,
    words_here: Vec<u64>,
    logits_here: Vec<f32>,
    /// The logits of some tokens.
    some_here: Vec<f32>,
}

impl StoredRows {
    /// Plans for the tokens `tokens` and up to `max_rows` rows, fewer where they do not fit into 256 MiB.
    pub(crate) fn new(
        tokens: Range<u32>,
        max_rows: usize,
        device: &Arc<Device>,
        stream: &Arc<CudaStream>,
    ) -> Result<Self, CudaError> {
        let kernels = StoredKernels::load(device)?;
        let stride = tokens.len().next_multiple_of(8);
        let fitting = |bytes: usize| (bytes / (4 * stride)).max(1);
        let rows = max_rows.min(MAX_ROWS).min(fitting(LOGITS_BYTES));
        let list_blocks = fitting(SCORES_BYTES).min(device.multiprocessors() as usize).min(max_rows.saturating_mul(2));
        let capacity = tokens.len().max(1 << 16);
        let allocate = CudaError::driver("allocate room for stored logits");
        let draw = DeviceStandalone::new(tokens.clone(), DType::F32, MAX_ITEMS, device)?;
        let each = size_of::<Row>() + size_of::<Item>() + size_of::<u32>();
        Ok(StoredRows {
            device: device.clone(),
            rows,
            stride,
            kernels,
            surveys: None,
            draw,
            logits: stream.alloc_zeros((rows.next_multiple_of(OCTET) + OCTET) * stride).map_err(&allocate)?,
            block_maxima: stream.alloc_zeros(block_maxima_bytes(rows, tokens.len()) / 2).map_err(&allocate)?,
            summaries: Summaries::new(rows, tokens.len(), stream)?,
            words: stream.alloc_zeros(rows * MassHistogram::WORDS).map_err(&allocate)?,
            inputs: stream.alloc_zeros(MAX_ITEMS * each).map_err(&allocate)?,
            draws: stream.alloc_zeros(MAX_ITEMS).map_err(&allocate)?,
            scores: stream.alloc_zeros(list_blocks * tokens.len()).map_err(&allocate)?,
            list_blocks,
            kept: stream.alloc_zeros(capacity).map_err(&allocate)?,
            count: stream.alloc_zeros(1).map_err(&allocate)?,
            capacity,
            tokens,
            staged: Vec::new(),
            draws_here: Vec::new(),
            results: Pinned::new(KEPT_AT + capacity * KEPT, stream)?,
            expected: 0,
            kept_here: Vec::new(),
            kept_ends: Vec::new(),
            words_here: Vec::new(),
            logits_here: Vec::new(),
            some_here: Vec::new(),
        })
    }

    /// What is in the place, or is made there by [`StoredRows::new`].
    pub(crate) fn made_in<'s>(
        place: &'s mut Option<StoredRows>,
        tokens: Range<u32>,
        max_rows: usize,
        device: &Arc<Device>,
        stream: &Arc<CudaStream>,
    ) -> Result<&'s mut StoredRows, CudaError> {
        match place {
            Some(stored) => Ok(stored),
            empty => Ok(empty.insert(StoredRows::new(tokens, max_rows, device, stream)?)),
        }
    }

    /// How many rows are stored at a time.
    pub(crate) fn rows(&self) -> usize {
        self.rows
    }

    /// Which tokens.
    pub(crate) fn tokens(&self) -> Range<u32> {
        self.tokens.clone()
    }

    /// Where the logits are to be stored, from row `first` on.
    pub(crate) fn place(&self, first: usize, stream: &CudaStream) -> LogitStore {
        let logits = DeviceAddress::of(&self.logits, stream).add(first * self.stride);
        LogitStore { logits, stride: self.stride as u64, block_maxima: DeviceAddress::of(&self.block_maxima, stream) }
    }

    /// For the kernels over this value's memory.
    fn queue(stream: &CudaStream) -> Queue<'_> {
        // SAFETY: *Memory*: logits, items and room for results are those of a `StoredRows`, sized by `new` and freed behind
        // the work on the same stream; raw logits and canonical inputs are those that a sampler copied on it, or of which
        // its own contract is. *Order*: one stream is used. *Rows*: `Staging` makes them.
        unsafe { Queue::new(stream) }
    }

    fn logits(&self, stream: &Arc<CudaStream>) -> StoredLogits {
        let (logits, row_stride) = (DeviceAddress::of(&self.logits, stream), self.stride as u64);
        let (first_token, tokens) = (self.tokens.start, self.tokens.len() as u32);
        StoredLogits { logits, row_stride, first_token, tokens }
    }
}

/// Puts kept tokens into the order of their items, by counting, so that no sort is longer than an item's; `ends` are those of
/// the items' tokens.
fn by_item(
    kept: &[KeptToken],
    items: usize,
    sorted: &mut Vec<KeptToken>,
    ends: &mut Vec<usize>,
) -> Result<(), CudaError> {
    if kept.iter().any(|kept| kept.item as usize >= items) {
        return Err(CudaError::Corrupt { what: "the item of a token" });
    }
    // First how many each item has, then where it begins, and as its tokens come, where it ends.
    ends.clear();
    ends.resize(items, 0);
    kept.iter().for_each(|kept| ends[kept.item as usize] += 1);
    let mut begin = 0;
    for place in &mut *ends {
        begin += core::mem::replace(place, begin);
    }
    sorted.resize(kept.len(), KeptToken::default());
    for kept in kept {
        let place = &mut ends[kept.item as usize];
        sorted[*place] = *kept;
        *place += 1;
    }
    Ok(())
}
