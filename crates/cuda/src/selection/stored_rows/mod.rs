//! Transformed logits in the GPU's memory, and queries of them: masses, the best tokens by score or by logit, draws,
//! and canonical scores of near ties.
//!
//! ```text
//! store -> masses, the largest logits: row_summary
//!       -> draws: standalone -> near_ties -> canonical      (the last two for a canonical plan)
//!       -> lists: top_list               -> canonical
//!       -> frontiers, tokens above cutoffs, sums: stored_scan
//! ```
#![allow(unsafe_code)]

mod launches;
mod query_results;
mod reads;
mod summaries;
mod sums;

use crate::abi::{DeviceAddress, Draw, Item, KeptToken, LogitStore, Row, StoredLogits, block_maxima_bytes};
use crate::device::{Device, DeviceStandalone, Pinned, Queue};
use crate::error::CudaError;
use crate::selection::stored_kernels::StoredKernels;
use crate::selection::stored_scan::StoredScanKernels;
use core::ops::Range;
use cudarc::driver::{CudaSlice, CudaStream};
use flash_sampling_core::DType;
use flash_sampling_core::backend::MassHistogram;
use std::sync::Arc;
use summaries::Summaries;
pub(crate) use summaries::{LONGEST_LIST, SummaryInput};

/// Bytes of stored logits, and of scores, beyond the first row of each.
const LOGITS_BYTES: usize = 256 << 20;
const SCORES_BYTES: usize = 64 << 20;
/// The fused kernel stores a multiple of this many rows.
const OCTET: usize = 8;
/// The maximum number of stored rows.
pub(crate) const MAX_ROWS: usize = 256;
const MAX_ITEMS: usize = 4096;
/// Bytes of a kept token, and the offset of the first token after the count.
const KEPT: usize = size_of::<KeptToken>();
const KEPT_AT: usize = 16;

/// Memory for the transformed logits of some rows, and the kernels over these logits.
#[derive(Debug)]
pub(crate) struct StoredRows {
    device: Arc<Device>,
    /// The stream of all launches.
    pub(crate) stream: Arc<CudaStream>,
    tokens: Range<u32>,
    rows: usize,
    stride: usize,
    kernels: StoredKernels,
    /// Loaded for the first scan of rows with filters, or of tokens.
    scans: Option<StoredScanKernels>,
    draw: DeviceStandalone,
    logits: CudaSlice<f32>,
    /// The largest logits of blocks, for the kernel that stores both.
    block_maxima: CudaSlice<u16>,
    summaries: Summaries,
    /// Prefix sums and moments.
    words: CudaSlice<u64>,
    /// The inputs of a launch: noise, items, sources.
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
    /// The count of kept tokens, then the tokens.
    results: Pinned,
    /// The number of kept tokens to copy with their count, for items with an unknown number of tokens.
    expected: usize,
    /// Kept tokens in the order of their items, and the end of each item's tokens.
    kept_here: Vec<KeptToken>,
    kept_ends: Vec<usize>,
    words_here: Vec<u64>,
    logits_here: Vec<f32>,
    /// The logits of some tokens.
    some_here: Vec<f32>,
}

impl StoredRows {
    /// Allocates memory for the logits of `tokens` in up to `max_rows` rows, or as many rows as fit into 256 MiB.
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
            stream: stream.clone(),
            rows,
            stride,
            kernels,
            scans: None,
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

    pub(crate) fn rows(&self) -> usize {
        self.rows
    }

    /// The tokens of the logits.
    pub(crate) fn tokens(&self) -> Range<u32> {
        self.tokens.clone()
    }

    /// The memory for logits from row `first` on.
    pub(crate) fn place(&self, first: usize) -> LogitStore {
        let logits = DeviceAddress::of(&self.logits, &self.stream).add(first * self.stride);
        let block_maxima = DeviceAddress::of(&self.block_maxima, &self.stream);
        LogitStore { logits, stride: self.stride as u64, block_maxima, ..LogitStore::default() }
    }

    /// A queue for the kernels over this value's memory.
    fn queue(stream: &CudaStream) -> Queue<'_> {
        // SAFETY: *Memory*: a `StoredRows` owns logits, items and room for results. `new` sizes them, and they are
        // freed after the work on the same stream. A sampler copied raw logits and canonical inputs on this stream, or
        // its own contract covers them. *Order*: all work uses one stream. *Rows*: `Staging` makes the rows.
        unsafe { Queue::new(stream) }
    }

    fn logits(&self) -> StoredLogits {
        let (logits, row_stride) = (DeviceAddress::of(&self.logits, &self.stream), self.stride as u64);
        let (first_token, tokens) = (self.tokens.start, self.tokens.len() as u32);
        StoredLogits { logits, row_stride, first_token, tokens }
    }
}

/// Sorts kept tokens by item with a counting sort, so later sorts cover one item each. `ends` receives the end of each
/// item's tokens.
fn by_item(
    kept: &[KeptToken],
    items: usize,
    sorted: &mut Vec<KeptToken>,
    ends: &mut Vec<usize>,
) -> Result<(), CudaError> {
    if kept.iter().any(|kept| kept.item as usize >= items) {
        return Err(CudaError::Corrupt { what: "a token with an invalid item" });
    }
    // `ends` first has the number of each item's tokens, then their begin. Placing the tokens advances it to the end.
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
