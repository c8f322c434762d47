//! The masses and largest logits of rows, computed by the pass that stores the logits.

use super::StoredRows;
use crate::abi::{
    self, DeviceAddress, KeptToken, PART_MASSES_BYTES, Row, RowSummaries, SUMMARY_LISTED, SUMMARY_TOKENS,
    SummaryRequest, SummaryResult,
};
use crate::device::{DeviceMatrix, Pinned};
use crate::error::CudaError;
use cudarc::driver::{CudaSlice, CudaStream};
use flash_sampling_core::DType;
use flash_sampling_core::backend::{Candidate, LogMass, MassHistogram, Winner};
use std::sync::Arc;

/// The longest list of a summary. Each block of a row lists a few more tokens.
pub(crate) const LONGEST_LIST: u32 = 128;
/// Bytes of a row's result, of a token of its list, and of its masses.
const RESULT: usize = size_of::<SummaryResult>();
const TOKEN: usize = size_of::<KeptToken>();
const MASSES: usize = 8 * MassHistogram::WORDS;

/// The logits that a pass reads.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct SummaryInput {
    /// Raw logits in other memory; `None` = read the stored logits.
    pub(crate) raw: Option<DeviceMatrix>,
    /// The index of each row's raw logits; null = the row's own index.
    pub(crate) sources: DeviceAddress<u32>,
    /// The rows with the transforms to apply; null = the logits are already transformed.
    pub(crate) rows: DeviceAddress<Row>,
}

/// The byte offsets in a pass's output: the results of all rows, then their lists, then their masses.
#[derive(Clone, Copy, Debug, Default)]
struct Layout {
    /// The length of the longest list; each row has room for this many tokens.
    list_len: usize,
    lists: usize,
    masses: usize,
    /// The end of the copied bytes, with the masses of all rows or without masses.
    end: usize,
}

impl Layout {
    fn of(requests: &[SummaryRequest]) -> Self {
        let list_len = requests.iter().map(|request| request.limit as usize).max().unwrap_or(0);
        let lists = requests.len() * RESULT;
        let masses = lists + requests.len() * list_len * TOKEN;
        let has_masses = requests.iter().any(|request| request.masses == 1);
        Layout { list_len, lists, masses, end: if has_masses { masses + requests.len() * MASSES } else { masses } }
    }
}

/// The memory of the passes.
#[derive(Debug)]
pub(super) struct Summaries {
    /// The input of the last pass.
    input: SummaryInput,
    /// The requests of the last pass, one per row.
    requests: Vec<SummaryRequest>,
    layout: Layout,
    device_requests: CudaSlice<u32>,
    output: CudaSlice<u64>,
    weights: CudaSlice<f64>,
    parts: CudaSlice<u8>,
    listed: CudaSlice<u8>,
    listed_counts: CudaSlice<u32>,
    /// A copy of the last pass's output.
    results: Pinned,
}

impl Summaries {
    pub(super) fn new(rows: usize, tokens: usize, stream: &Arc<CudaStream>) -> Result<Self, CudaError> {
        let allocate = CudaError::driver("allocate room for summaries");
        let blocks = tokens.div_ceil(SUMMARY_TOKENS);
        let output = rows * (RESULT + LONGEST_LIST as usize * TOKEN + MASSES);
        Ok(Summaries {
            input: SummaryInput::default(),
            requests: Vec::new(),
            layout: Layout::default(),
            device_requests: stream.alloc_zeros(rows * size_of::<SummaryRequest>() / 4).map_err(&allocate)?,
            output: stream.alloc_zeros(output / 8).map_err(&allocate)?,
            weights: stream.clone_htod(MassHistogram::weights()).map_err(&allocate)?,
            parts: stream.alloc_zeros(rows * blocks * PART_MASSES_BYTES).map_err(&allocate)?,
            listed: stream.alloc_zeros(rows * SUMMARY_LISTED * TOKEN).map_err(&allocate)?,
            listed_counts: stream.alloc_zeros(rows).map_err(&allocate)?,
            results: Pinned::new(output, stream)?,
        })
    }

    fn result(&mut self, row: usize) -> Result<SummaryResult, CudaError> {
        Ok(bytemuck::pod_read_unaligned(&self.results.bytes()?[row * RESULT..][..RESULT]))
    }
}

impl StoredRows {
    /// The requests of the next pass, one per row.
    pub(crate) fn requests(&mut self) -> &mut Vec<SummaryRequest> {
        &mut self.summaries.requests
    }

    /// Uploads the requests of the next pass, before the logits are computed. So the GPU does not wait for the requests
    /// between the two passes.
    pub(crate) fn upload_requests(&mut self) -> Result<(), CudaError> {
        let StoredRows {
            summaries: Summaries { requests, device_requests, output, listed_counts, layout, .. },
            stream,
            ..
        } = self;
        *layout = Layout::of(requests);
        if requests.is_empty() {
            return Ok(());
        }
        let words: &[u32] = bytemuck::cast_slice(requests);
        let mut uploaded = device_requests.slice_mut(..words.len());
        stream.memcpy_htod(words, &mut uploaded).map_err(CudaError::driver("copy requests to the GPU"))?;
        let (queue, counts) = (StoredRows::queue(stream), requests.len() * size_of::<u32>());
        queue.fill(DeviceAddress::of(listed_counts, stream).cast::<u8>(), 0, counts)?;
        queue.fill(DeviceAddress::of(output, stream).cast::<u8>(), 0xff, layout.lists)
    }

    /// Enqueues a pass over the first rows, one per uploaded request, and a copy of its output.
    pub(crate) fn summarize(&mut self, input: &SummaryInput) -> Result<(), CudaError> {
        if self.summaries.requests.is_empty() {
            return Ok(());
        }
        self.summaries.input = *input;
        let output = self.launch_summaries()?;
        let StoredRows { summaries: Summaries { layout, results, .. }, stream, .. } = self;
        results.copy_down(output, 0, layout.end, StoredRows::queue(stream))
    }

    /// Enqueues a pass. Returns the address of its output.
    fn launch_summaries(&mut self) -> Result<DeviceAddress<u8>, CudaError> {
        let stored = self.logits();
        let stream = &self.stream;
        let Summaries {
            input, requests, layout, device_requests, output, weights, parts, listed, listed_counts, ..
        } = &mut self.summaries;
        let Layout { list_len, lists, masses, .. } = *layout;
        let (queue, output) = (StoredRows::queue(stream), DeviceAddress::of(output, stream).cast::<u8>());
        let raw = input.raw.map_or((stored.logits.cast(), stored.row_stride, DType::F32), |raw| {
            (raw.address, raw.row_stride as u64, raw.dtype)
        });
        let call = RowSummaries {
            stored,
            raw: raw.0,
            sources: input.sources,
            rows: input.rows,
            requests: DeviceAddress::of(device_requests, stream).cast(),
            results: output.cast(),
            top: output.add(lists).cast(),
            words: output.add(masses).cast(),
            parts: DeviceAddress::of(parts, stream),
            listed: DeviceAddress::of(listed, stream),
            listed_counts: DeviceAddress::of(listed_counts, stream),
            weights: DeviceAddress::of(weights, stream),
            raw_stride: raw.1,
            element: abi::element(raw.2),
            top_stride: list_len as u32,
            before: DeviceAddress::NULL,
        };
        self.kernels.summaries.launch(queue, call, requests.len() as u32)?;
        Ok(output)
    }

    /// Stores the transformed logits that the last pass did not store. The input of that pass must still be valid.
    pub(crate) fn store_rest(&mut self) -> Result<(), CudaError> {
        let Summaries { requests, input, .. } = &mut self.summaries;
        if input.rows.is_null() || requests.iter().all(|request| request.stores == 1) {
            return Ok(());
        }
        // Stored logits were transformed in place, so a second pass must not transform them.
        let rest =
            |request: &SummaryRequest| SummaryRequest { stores: 1 - request.stores, ..SummaryRequest::default() };
        let rest = requests.iter().map(rest).collect();
        requests.iter_mut().for_each(|request| request.stores = 1);
        let made = (core::mem::replace(requests, rest), self.summaries.layout);
        let launched = self.upload_requests().and_then(|()| self.launch_summaries());
        (self.summaries.requests, self.summaries.layout) = made;
        launched.map(drop)
    }

    /// Waits for the last pass.
    pub(crate) fn wait_for_summaries(&mut self) -> Result<(), CudaError> {
        self.summaries.results.bytes().map(drop)
    }

    /// The first bad logit of a row of the last pass: stage, token, and whether the logit is infinite. All ones = none.
    pub(crate) fn invalid(&mut self, row: usize) -> Result<u64, CudaError> {
        Ok(self.summaries.result(row)?.invalid)
    }

    /// The whole mass of a row of the last pass: [`MassHistogram::log_mass`] of its logits.
    pub(crate) fn log_mass(&mut self, row: usize) -> Result<LogMass, CudaError> {
        let SummaryResult { max, sum, .. } = self.summaries.result(row)?;
        let is_mass = max.is_finite() && max == MassHistogram::edge(max) && sum.is_finite() && sum >= 1.0;
        match (is_mass, max) {
            (true, _) => Ok(LogMass { max, sum }),
            (false, f32::NEG_INFINITY) => Ok(LogMass::EMPTY),
            _ => Err(CudaError::Corrupt { what: "invalid mass of a row" }),
        }
    }

    /// The requested masses of a row of the last pass, as words for [`MassHistogram::from_words`].
    pub(crate) fn mass(&mut self, row: usize) -> Result<&[u64], CudaError> {
        let at = self.summaries.layout.masses + row * MASSES;
        Ok(bytemuck::cast_slice(&self.summaries.results.bytes()?[at..at + MASSES]))
    }

    /// The requested number of largest logits of a row of the last pass; `None` if the list is too long.
    pub(crate) fn list(&mut self, row: usize) -> Result<Option<impl Iterator<Item = Candidate>>, CudaError> {
        let (listed, limit) = (self.summaries.result(row)?.listed, self.summaries.requests[row].limit);
        if limit == 0 || listed > limit {
            return Ok(None);
        }
        let Layout { list_len, lists, .. } = self.summaries.layout;
        let at = lists + row * list_len * TOKEN;
        let own: &[KeptToken] =
            bytemuck::cast_slice(&self.summaries.results.bytes()?[at..at + listed as usize * TOKEN]);
        let candidate = |kept: &KeptToken| Candidate { winner: Winner::from_ordered_bits(kept.key), logit: kept.logit };
        Ok(Some(own.iter().map(candidate)))
    }
}
