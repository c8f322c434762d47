//! Log-probabilities of a streamed head. The logits of rows that request them are stored block by block, and summarized
//! after the last block.

use crate::abi::{DeviceAddress, Draw, SummaryRequest, status};
use crate::device::{Device, DeviceHead, DeviceMatrix, DeviceTiled, KernelChoice, MAX_ROWS, Queue};
use crate::error::CudaError;
use crate::sampler::row_scan::{ScanRow, StoredQueries, StoredScan};
use crate::sampler::{CallRows, Staging, idle, row_stride};
use crate::selection::{StoredRows, SummaryInput};
use core::mem::take;
use cudarc::driver::{CudaSlice, CudaStream};
use flash_sampling_core::Matrix;
use flash_sampling_core::backend::{Request, Row, RowSummary, Stage, reuse_vec};
use std::sync::Arc;

/// A row with log-probabilities.
#[derive(Clone, Copy, Debug)]
struct StoredRow {
    /// The row's index in the call, and the index of its first draw among the call's draws.
    at: usize,
    first_draw: usize,
}

/// The rows of a call with log-probabilities, and their summaries.
#[derive(Debug)]
pub(super) struct StreamedLogprobs {
    device: Arc<Device>,
    max_rows: usize,
    /// Stores the logits of the current block.
    fused: DeviceTiled,
    /// Allocated for the first row, and extended for more rows.
    stored: Vec<StoredRows>,
    staging: Staging,
    inputs: CudaSlice<u8>,
    /// The draws of the storing launches, which are not used.
    draws: CudaSlice<Draw>,
    hidden: Option<DeviceMatrix>,
    rows: Vec<StoredRow>,
    /// At least one summary per row.
    summaries: Vec<RowSummary>,
    members: Vec<ScanRow<'static>>,
    queries: StoredQueries,
    /// The drawn tokens of the call.
    tokens: Vec<u32>,
}

impl StreamedLogprobs {
    /// Plans for heads like this one, anywhere in a vocabulary of this size, and up to `max_rows` rows.
    pub(super) fn new(
        head: &DeviceHead,
        vocab_size: u32,
        max_rows: usize,
        device: &Arc<Device>,
        stream: &Arc<CudaStream>,
    ) -> Result<Self, CudaError> {
        let most = max_rows.min(MAX_ROWS);
        let fused = DeviceTiled::unplanned(*head, most, device, KernelChoice::Portable)?;
        let failed = CudaError::driver("allocate what log-probabilities need");
        Ok(StreamedLogprobs {
            device: device.clone(),
            max_rows,
            fused,
            stored: Vec::new(),
            staging: Staging::of(0..vocab_size, vocab_size),
            inputs: stream.alloc_zeros(16).map_err(&failed)?,
            draws: stream.alloc_zeros(most).map_err(&failed)?,
            hidden: None,
            rows: Vec::new(),
            summaries: Vec::new(),
            members: Vec::new(),
            queries: StoredQueries::default(),
            tokens: Vec::new(),
        })
    }

    /// Begins a call.
    pub(super) fn clear(&mut self) {
        self.staging.clear();
        self.rows.clear();
        self.hidden = None;
    }

    /// Adds row `at` of the call if it requests log-probabilities. `first_draw` is the index of its first draw among
    /// the call's draws.
    pub(super) fn push(
        &mut self,
        rows: &CallRows<'_, '_>,
        at: usize,
        row: &Row<'_>,
        first_draw: usize,
    ) -> Result<(), CudaError> {
        match row.raw_logprobs {
            Some(_) => self.staging.push_of(at, &idle(), &rows.raw()?, [0])?,
            None if row.logprobs.is_none() => return Ok(()),
            None => self.staging.push_of(at, &rows.batch.params[at], row, [row.first_draw])?,
        }
        self.rows.push(StoredRow { at, first_draw });
        Ok(())
    }

    /// Copies the rows to the GPU, and allocates memory for their logits.
    pub(super) fn begin(
        &mut self,
        input: &Matrix<'_>,
        vocab_size: u32,
        stream: &Arc<CudaStream>,
    ) -> Result<(), CudaError> {
        let rows = self.rows.len();
        if rows == 0 {
            return Ok(());
        }
        while self.stored.iter().map(StoredRows::rows).sum::<usize>() < rows {
            self.stored.push(StoredRows::new(0..vocab_size, self.max_rows, &self.device, stream)?);
        }
        let address = self.staging.copy_to(&mut self.inputs, Some(input), stream)?;
        let (dtype, cols, row_stride) = (input.dtype(), input.cols(), row_stride(input.cols()));
        self.hidden = Some(DeviceMatrix { address, dtype, rows, cols, row_stride });
        Ok(())
    }

    /// Enqueues the launches that store the logits of a block, which is a part of the planned head.
    pub(super) fn store(&mut self, head: &DeviceHead, queue: Queue<'_>) -> Result<(), CudaError> {
        let Some(hidden) = self.hidden else { return Ok(()) };
        self.fused.move_to(*head);
        let stream = queue.stream();
        let rows_at = DeviceAddress::of(&self.inputs, stream).add(self.staging.rows_at()).cast();
        let draws = DeviceAddress::of(&self.draws, stream);
        let mut first = 0;
        for stored in &self.stored {
            let rows = stored.rows().min(hidden.rows - first);
            if rows == 0 {
                break;
            }
            let part = hidden.rows(first..first + rows);
            let place = stored.place(0);
            let (logits, stride) = (place.logits.add(head.first_token as usize), place.stride as usize);
            self.fused.enqueue_storing(queue, &part, (rows_at.add(first), draws), logits, stride)?;
            first += rows;
        }
        Ok(())
    }

    /// Summarizes the stored logits after all enqueued work of the stream, and waits.
    ///
    /// `draws` are the call's draws. A row whose draws are errors has no summary.
    pub(super) fn summarize(&mut self, rows: &CallRows<'_, '_>, draws: &[Draw]) -> Result<(), CudaError> {
        let most = self.rows.len().max(self.summaries.len());
        self.summaries.resize_with(most, RowSummary::default);
        self.tokens.clear();
        self.tokens.extend(draws.iter().map(|draw| draw.token));
        let StreamedLogprobs { rows: own, summaries, stored, queries, tokens, .. } = self;
        let mut next = own.iter().zip(summaries);
        let mut members = reuse_vec(take(&mut self.members));
        for stored in stored {
            members.clear();
            for (slot, (&StoredRow { at, first_draw }, out)) in next.by_ref().take(stored.rows()).enumerate() {
                let (Ok(row), params) = (rows.batch.rows[at], &rows.batch.params[at]) else { continue };
                let drawn = first_draw..first_draw + row.draws as usize;
                if draws[drawn.clone()].iter().all(|draw| draw.status == status::DRAWN) {
                    out.begin(&row);
                    let request = Request::Overview;
                    let (draws, finishes_log_z, bound) = (false, false, None);
                    let member = ScanRow { at, slot, params, row, request, draws, finishes_log_z, bound, out };
                    members.push(member);
                }
            }
            let requests = members.iter().map(|member| (member.slot, member.summary_request(member.is_raw(), true)));
            stored.requests().clear();
            for (slot, request) in requests {
                stored.requests().resize(slot, SummaryRequest::default());
                stored.requests().push(request);
            }
            stored.upload_requests()?;
            stored.summarize(&SummaryInput::default())?;
            stored.wait_for_summaries()?;
            let mut scan = StoredScan { part: &mut members, memory: queries, stored, canonical: None };
            scan.find()?;
            scan.find_raw()?;
            for member in members.iter_mut().filter(|member| member.is_raw()) {
                let first = own[own.partition_point(|row| row.at < member.at)].first_draw;
                let tokens = &tokens[first..first + member.row.draws as usize];
                member.request = Request::Logits { tokens, stage: Stage::Raw };
            }
            StoredScan { part: &mut members, memory: queries, stored, canonical: None }.find_raw()?;
        }
        self.members = reuse_vec(members);
        self.fused.mark_idle();
        Ok(())
    }

    /// The summary of row `at` of the call, if it has one.
    pub(super) fn summary(&self, at: usize) -> Option<&RowSummary> {
        let i = self.rows.binary_search_by_key(&at, |row| row.at).ok()?;
        self.summaries.get(i)
    }
}
