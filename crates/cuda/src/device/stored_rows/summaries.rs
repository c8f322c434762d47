//! The masses and the largest logits of rows, made when their logits are stored.
#![allow(unsafe_code)]

use super::{StoredRows, by_item};
use crate::abi::{
    self, KeptToken, KeptTokens, PART_MASSES_BYTES, RowSummaries, SUMMARY_COUNTERS_BYTES, SUMMARY_LISTED,
    SUMMARY_TOKENS, SummaryRequest,
};
use crate::device::matrix::DeviceMatrix;
use crate::device::pinned::Pinned;
use crate::error::CudaError;
use core::cmp::Reverse;
use core::mem::take;
use cudarc::driver::{CudaSlice, CudaStream, DevicePtr, result};
use flash_sampling_core::{Candidate, DType, MassHistogram, Winner};
use std::sync::Arc;

/// The longest list that is made with a summary: the blocks of a row list a little more each.
pub(crate) const LONGEST_LIST: u32 = 128;
/// Bytes of a row's masses and of its invalid key.
const ROW: usize = 8 * MassHistogram::WORDS + 8;
/// Tokens of all lists that are copied with the masses: a little more than the lists' lengths.
const fn tokens_for(limit: usize) -> usize {
    limit + limit / 4 + 8
}

/// The logits that a pass reads.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct SummaryInput {
    /// Raw logits in other memory; without them the stored ones are read.
    pub(crate) raw: Option<DeviceMatrix>,
    /// Device address of the raw row of each row, u32; 0 = its number.
    pub(crate) sources: u64,
    /// Device address of the rows, whose transforms are applied; 0 = the logits are transformed.
    pub(crate) rows: u64,
}

/// Memory of the passes.
#[derive(Debug)]
pub(super) struct Summaries {
    /// Of the last pass, one request for each row.
    input: SummaryInput,
    requests: Vec<SummaryRequest>,
    requests_there: CudaSlice<u64>,
    /// Invalid keys of all rows, then their masses.
    words: CudaSlice<u64>,
    parts: CudaSlice<u8>,
    listed: CudaSlice<u8>,
    counters: CudaSlice<u8>,
    /// Invalid keys, masses, the count of listed tokens, and the tokens.
    results: Pinned,
    /// Listed tokens by rows, each row's the largest first, and the end of each row's; no ends: lists were lost.
    tokens: Vec<KeptToken>,
    ends: Vec<usize>,
}

impl Summaries {
    pub(super) fn new(rows: usize, tokens: usize, stream: &Arc<CudaStream>) -> Result<Self, CudaError> {
        let allocate = CudaError::driver("allocate room for summaries");
        let blocks = tokens.div_ceil(SUMMARY_TOKENS);
        Ok(Summaries {
            input: SummaryInput::default(),
            requests: Vec::new(),
            requests_there: stream.alloc_zeros(rows).map_err(&allocate)?,
            words: stream.alloc_zeros(rows * ROW / 8).map_err(&allocate)?,
            parts: stream.alloc_zeros(rows * blocks * PART_MASSES_BYTES).map_err(&allocate)?,
            listed: stream.alloc_zeros(rows * SUMMARY_LISTED * size_of::<KeptToken>()).map_err(&allocate)?,
            counters: stream.alloc_zeros(rows * SUMMARY_COUNTERS_BYTES).map_err(&allocate)?,
            results: Pinned::new(
                rows * ROW + 16 + rows * tokens_for(LONGEST_LIST as usize) * size_of::<KeptToken>(),
                stream,
            )?,
            tokens: Vec::new(),
            ends: Vec::new(),
        })
    }

    /// Where the count of listed tokens begins in the results.
    fn count_at(&self) -> usize {
        self.requests.len() * ROW
    }
}

impl StoredRows {
    /// The requests of the next pass, one for each row.
    pub(crate) fn requests(&mut self) -> &mut Vec<SummaryRequest> {
        &mut self.summaries.requests
    }

    /// Enqueues a pass over the first rows, as many as there are requests, and copies of what it finds.
    pub(crate) fn summarize(&mut self, input: &SummaryInput, stream: &Arc<CudaStream>) -> Result<(), CudaError> {
        if self.summaries.requests.is_empty() {
            return Ok(());
        }
        self.summaries.input = *input;
        let requests = take(&mut self.summaries.requests);
        let launched = self.launch_summaries(input, &requests, stream);
        self.summaries.requests = requests;
        let (words, count, kept) = launched?;
        let (at, expected) = (self.summaries.count_at(), self.summaries.expected());
        let results = &mut self.summaries.results;
        // SAFETY: words, count and tokens are this value's, and as many.
        unsafe {
            results.copy_down(words, 0, at, stream)?;
            results.copy_down(count, at, size_of::<u64>(), stream)?;
            results.copy_down(kept, at + 16, expected * size_of::<KeptToken>(), stream)
        }
    }

    /// Enqueues a pass. Returns where the invalid keys and masses, the count of listed tokens, and the tokens lie.
    fn launch_summaries(
        &mut self,
        input: &SummaryInput,
        requests: &[SummaryRequest],
        stream: &Arc<CudaStream>,
    ) -> Result<(u64, u64, u64), CudaError> {
        let failed = CudaError::driver("summarize stored logits");
        let stored = self.logits(stream);
        let Summaries { requests_there, words, parts, listed, counters, .. } = &mut self.summaries;
        let rows = requests.len();
        let bytes: &[u64] = bytemuck::cast_slice(requests);
        stream.memcpy_htod(bytes, &mut requests_there.slice_mut(..rows)).map_err(&failed)?;
        stream.memset_zeros(&mut self.count).map_err(&failed)?;
        let address = words.device_ptr(stream).0;
        // SAFETY: as many invalid keys lie there.
        unsafe { result::memset_d8_async(address, 0xff, 8 * rows, stream.cu_stream()) }.map_err(&failed)?;
        let (count, kept) = (self.count.device_ptr(stream).0, self.kept.device_ptr(stream).0);
        let raw = input.raw.map_or((stored.logits, stored.row_stride, DType::F32), |raw| {
            (raw.address, raw.row_stride as u64, raw.dtype)
        });
        let call = RowSummaries {
            stored,
            out: KeptTokens { tokens: kept, count, capacity: self.capacity as u64 },
            raw: raw.0,
            sources: input.sources,
            rows: input.rows,
            requests: requests_there.device_ptr(stream).0,
            invalid: address,
            words: address + 8 * rows as u64,
            parts: parts.device_ptr(stream).0,
            listed: listed.device_ptr(stream).0,
            counters: counters.device_ptr(stream).0,
            raw_stride: raw.1,
            element: abi::element(raw.2),
            padding: 0,
        };
        // SAFETY: everything but raw logits, sources and rows is this value's, sized by `new` for as many rows; those the
        // caller enqueued on the same stream, or were just copied on it.
        unsafe { self.kernels.row_summaries(stream, &call, rows as u32) }?;
        Ok((address, count, kept))
    }

    /// Enqueues the store of the transformed logits that the last pass did not store; its input is still there.
    pub(crate) fn store_rest(&mut self, stream: &Arc<CudaStream>) -> Result<(), CudaError> {
        let Summaries { requests, input, .. } = &mut self.summaries;
        if input.rows == 0 || requests.iter().all(|request| request.stores == 1) {
            return Ok(());
        }
        // Those that are stored were transformed in place.
        let rest = |request: &SummaryRequest| SummaryRequest { limit: 0, stores: 1 - request.stores };
        let (input, rest): (_, Vec<_>) = (*input, requests.iter().map(rest).collect());
        requests.iter_mut().for_each(|request| request.stores = 1);
        self.launch_summaries(&input, &rest, stream).map(drop)
    }

    /// Waits for a pass, and arranges its lists.
    pub(crate) fn finish_summaries(&mut self, stream: &Arc<CudaStream>) -> Result<(), CudaError> {
        let (at, expected) = (self.summaries.count_at(), self.summaries.expected());
        let kept = self.kept.device_ptr(stream).0;
        let Summaries { requests, results, tokens, ends, .. } = &mut self.summaries;
        if requests.is_empty() {
            return Ok(());
        }
        let count = bytemuck::pod_read_unaligned::<u64>(&results.bytes()?[at..at + size_of::<u64>()]) as usize;
        tokens.clear();
        ends.clear();
        if count > (results.len() - at - 16) / size_of::<KeptToken>() {
            return Ok(());
        }
        if count > expected {
            let (from, size) = (expected * size_of::<KeptToken>(), (count - expected) * size_of::<KeptToken>());
            // SAFETY: as many tokens were listed.
            unsafe { results.copy_down(kept + from as u64, at + 16 + from, size, stream) }?;
        }
        let listed = bytemuck::cast_slice(&results.bytes()?[at + 16..][..count * size_of::<KeptToken>()]);
        by_item(listed, requests.len(), tokens, ends)?;
        let mut from = 0;
        for &end in &*ends {
            tokens[from..end].sort_unstable_by_key(|kept| Reverse(kept.key));
            from = end;
        }
        Ok(())
    }

    /// The first bad logit of a row of the last pass: stage, token, and whether it is infinite; all ones without one.
    pub(crate) fn invalid(&mut self, row: usize) -> Result<u64, CudaError> {
        Ok(bytemuck::pod_read_unaligned(&self.summaries.results.bytes()?[8 * row..8 * row + 8]))
    }

    /// The masses of a row of the last pass, as words for [`MassHistogram::from_words`].
    pub(crate) fn mass(&mut self, row: usize) -> Result<&[u64], CudaError> {
        let at = 8 * (self.summaries.requests.len() + row * MassHistogram::WORDS);
        Ok(bytemuck::cast_slice(&self.summaries.results.bytes()?[at..at + 8 * MassHistogram::WORDS]))
    }

    /// The largest logits of a row of the last pass, as many as were requested; `None` where they are too many to be listed.
    pub(crate) fn list(&mut self, row: usize) -> Result<Option<impl Iterator<Item = Candidate>>, CudaError> {
        let is_empty = self.mass(row)?.first() == Some(&u64::from(f32::NEG_INFINITY.to_bits()));
        let Summaries { requests, tokens, ends, .. } = &self.summaries;
        let (limit, Some(&end)) = (requests[row].limit as usize, ends.get(row)) else { return Ok(None) };
        let own = &tokens[row.checked_sub(1).map_or(0, |before| ends[before])..end];
        let candidate = |kept: &KeptToken| Candidate { winner: Winner::from_ordered_bits(kept.key), logit: kept.logit };
        Ok((is_empty || !own.is_empty()).then(|| own.iter().take(limit).map(candidate)))
    }
}

impl Summaries {
    /// Tokens that are copied with their count.
    fn expected(&self) -> usize {
        self.requests
            .iter()
            .map(|request| if request.limit == 0 { 0 } else { tokens_for(request.limit as usize) })
            .sum()
    }
}
