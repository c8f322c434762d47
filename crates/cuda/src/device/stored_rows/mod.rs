//! Transformed logits that are stored on the GPU, and what is asked of them: masses, the best tokens by score or by
//! logit, draws, and near ties evaluated canonically.
//!
//! ```text
//! store -> masses
//!       -> draws: standalone -> near_ties -> canonical      (the last two for a canonical plan)
//!       -> lists: top_list               -> canonical
//!       -> surveys: frontiers, tokens above floors, sums
//! ```
#![allow(unsafe_code)]

mod launches;
mod query_results;
mod reads;
mod sums;

use crate::abi::{Draw, Item, KeptToken, Row, StoredLogits};
use crate::device::gpu::Device;
use crate::device::pinned::Pinned;
use crate::device::standalone::DeviceStandalone;
use crate::device::stored_kernels::StoredKernels;
use crate::device::stored_scan::StoredScanKernels;
use crate::error::CudaError;
use core::ops::Range;
use cudarc::driver::{CudaSlice, CudaStream, DevicePtr};
use flash_sampling_core::{DType, MassHistogram};
use std::sync::Arc;

/// Bytes of stored logits, and of scores, beyond the first row of each.
const SCRATCH: usize = 64 << 20;
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
    tops: CudaSlice<u32>,
    words: CudaSlice<u64>,
    /// The items of a launch: their noise, themselves, their sources.
    inputs: CudaSlice<u8>,
    draws: CudaSlice<u8>,
    /// `[list_blocks, tokens]`.
    scores: CudaSlice<u32>,
    list_blocks: usize,
    kept: CudaSlice<u8>,
    count: CudaSlice<u64>,
    capacity: usize,
    staged: Vec<u8>,
    draws_here: Vec<Draw>,
    /// What comes down: masses, or the count of kept tokens and behind it the tokens.
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
    /// Plans for the tokens `tokens` and up to `max_rows` rows, fewer where they do not fit into 64 MiB.
    pub(crate) fn new(
        tokens: Range<u32>,
        max_rows: usize,
        device: &Arc<Device>,
        stream: &Arc<CudaStream>,
    ) -> Result<Self, CudaError> {
        let kernels = StoredKernels::load(device)?;
        let stride = tokens.len().next_multiple_of(4);
        let fitting = (SCRATCH / (4 * stride)).max(1);
        let rows = max_rows.min(MAX_ROWS).min(fitting);
        let list_blocks = fitting.min(device.multiprocessors() as usize).min(max_rows.saturating_mul(2));
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
            logits: stream.alloc_zeros(rows * stride).map_err(&allocate)?,
            tops: stream.alloc_zeros(rows).map_err(&allocate)?,
            words: stream.alloc_zeros(rows * MassHistogram::WORDS).map_err(&allocate)?,
            inputs: stream.alloc_zeros(MAX_ITEMS * each).map_err(&allocate)?,
            draws: stream.alloc_zeros(MAX_ITEMS * size_of::<Draw>()).map_err(&allocate)?,
            scores: stream.alloc_zeros(list_blocks * tokens.len()).map_err(&allocate)?,
            list_blocks,
            kept: stream.alloc_zeros(capacity * size_of::<KeptToken>()).map_err(&allocate)?,
            count: stream.alloc_zeros(1).map_err(&allocate)?,
            capacity,
            tokens,
            staged: Vec::new(),
            draws_here: Vec::new(),
            results: Pinned::new((KEPT_AT + capacity * KEPT).max(8 * rows * MassHistogram::WORDS), stream)?,
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

    /// Where the transformed logits are to be stored: device address of the first row, floats from one row to the next.
    pub(crate) fn place(&self, stream: &Arc<CudaStream>) -> (u64, usize) {
        (self.logits.device_ptr(stream).0, self.stride)
    }

    fn logits(&self, stream: &Arc<CudaStream>) -> StoredLogits {
        let (logits, stride) = self.place(stream);
        let (first_token, tokens) = (self.tokens.start, self.tokens.len() as u32);
        StoredLogits { logits, row_stride: stride as u64, first_token, tokens }
    }

    /// The masses of each of the first `rows` stored rows, as words for [`MassHistogram::from_words`]. Waits.
    pub(crate) fn masses(&mut self, rows: usize, stream: &Arc<CudaStream>) -> Result<&[u64], CudaError> {
        let failed = CudaError::driver("sum the masses of stored logits");
        stream.memset_zeros(&mut self.tops).map_err(&failed)?;
        stream.memset_zeros(&mut self.words).map_err(&failed)?;
        let stored = self.logits(stream);
        let (tops, words) = (self.tops.device_ptr(stream).0, self.words.device_ptr(stream).0);
        // SAFETY: logits, tops and words are this value's, sized by `new`; the last two were just cleared.
        unsafe { self.kernels.sum_masses(stream, &stored, rows as u32, tops, words) }?;
        let bytes = 8 * rows.min(self.rows) * MassHistogram::WORDS;
        // SAFETY: the words are this value's, and as many.
        unsafe { self.results.copy_down(words, 0, bytes, stream) }?;
        stream.synchronize().map_err(&failed)?;
        Ok(bytemuck::cast_slice(&self.results.bytes()?[..bytes]))
    }
}
