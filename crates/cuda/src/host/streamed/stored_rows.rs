//! Log-probabilities of a streamed head: the transformed logits of the rows that ask for them are stored block by block,
//! and asked when the last block is there.
#![allow(unsafe_code)]

use crate::abi::{Draw, Row};
use crate::device::fused_hopper::MAX_ROWS;
use crate::device::gpu::Device;
use crate::device::head::DeviceHead;
use crate::device::matrix::DeviceMatrix;
use crate::device::row_features::KernelChoice;
use crate::device::stored_rows::StoredRows;
use crate::device::tiled::DeviceTiled;
use crate::error::CudaError;
use crate::host::staging::Staging;
use crate::host::stored_results::{StoredRequest, StoredResults};
use cudarc::driver::{CudaSlice, CudaStream, DevicePtr};
use flash_sampling_core::{Candidate, MassHistogram, Matrix, RowError, RowParams, Samples, params};
use std::sync::Arc;

/// The rows of a call that ask, and what they come to.
#[derive(Debug)]
pub(super) struct Asked {
    device: Arc<Device>,
    max_rows: usize,
    /// Stores logits; of the block that it was moved to last.
    fused: DeviceTiled,
    /// Made when the first rows ask, and more when more do.
    stored: Vec<StoredRows>,
    staging: Staging,
    inputs: CudaSlice<u8>,
    /// Results of the storing launches, which nobody reads.
    draws: CudaSlice<u8>,
    hidden: Option<DeviceMatrix>,
    asking: Vec<StoredRequest>,
    answers: StoredResults,
}

impl Asked {
    /// Plans for heads like this one, at any place of a vocabulary of this size, and up to `max_rows` rows.
    pub(super) fn new(
        head: &DeviceHead,
        vocab_size: u32,
        max_rows: usize,
        device: &Arc<Device>,
        stream: &Arc<CudaStream>,
    ) -> Result<Self, CudaError> {
        let most = max_rows.min(MAX_ROWS);
        // SAFETY: every launch is of a head that it was moved to.
        let fused = unsafe { DeviceTiled::unplanned(*head, most, device, KernelChoice::Portable) }?;
        let failed = CudaError::driver("allocate what log-probabilities need");
        Ok(Asked {
            device: device.clone(),
            max_rows,
            fused,
            stored: Vec::new(),
            staging: Staging::of(0..vocab_size, vocab_size),
            inputs: stream.alloc_zeros(16).map_err(&failed)?,
            draws: stream.alloc_zeros(most * size_of::<Draw>()).map_err(&failed)?,
            hidden: None,
            asking: Vec::new(),
            answers: StoredResults::default(),
        })
    }

    /// A call begins.
    pub(super) fn clear(&mut self) {
        self.staging.clear();
        self.asking.clear();
        self.answers.clear();
        self.hidden = None;
    }

    /// Takes a row that asks, with `hidden` in rows of `stride` bytes.
    pub(super) fn push(
        &mut self,
        params: &RowParams<'_>,
        row: &params::Row<'_>,
        hidden: &[u8],
        stride: usize,
    ) -> Result<(), CudaError> {
        self.staging.push_hidden(hidden, stride);
        self.staging.push(params, row, [row.first_draw])?;
        self.asking.push(StoredRequest::new(params, row, None));
        Ok(())
    }

    /// Copies the rows up, of which the hidden states are `row_stride` elements apart, and makes room for their logits.
    pub(super) fn begin(
        &mut self,
        input: &Matrix<'_>,
        row_stride: usize,
        vocab_size: u32,
        stream: &Arc<CudaStream>,
    ) -> Result<(), CudaError> {
        let rows = self.asking.len();
        if rows == 0 {
            return Ok(());
        }
        let failed = CudaError::driver("copy the rows that ask");
        while self.stored.iter().map(StoredRows::rows).sum::<usize>() < rows {
            self.stored.push(StoredRows::new(0..vocab_size, self.max_rows, &self.device, stream)?);
        }
        if self.staging.len() > self.inputs.len() {
            self.inputs = stream.alloc_zeros(self.staging.len().next_power_of_two()).map_err(&failed)?;
        }
        let address = self.inputs.device_ptr(stream).0;
        stream.memcpy_htod(self.staging.finish(address), &mut self.inputs).map_err(&failed)?;
        self.hidden = Some(DeviceMatrix { address, dtype: input.dtype(), rows, cols: input.cols(), row_stride });
        Ok(())
    }

    /// Enqueues the launches that store the logits of a block.
    ///
    /// # Safety
    /// The head is a part of the planned one, on the GPU when the stream gets there, and stays until it has passed.
    pub(super) unsafe fn store(&mut self, head: &DeviceHead, stream: &Arc<CudaStream>) -> Result<(), CudaError> {
        let Some(hidden) = self.hidden else { return Ok(()) };
        // SAFETY: the same contract.
        unsafe { self.fused.move_to(*head) };
        let rows_at = self.inputs.device_ptr(stream).0 + self.staging.rows_at() as u64;
        let draws = self.draws.device_ptr(stream).0;
        let mut first = 0;
        for stored in &self.stored {
            let rows = stored.rows().min(hidden.rows - first);
            if rows == 0 {
                break;
            }
            let part = DeviceMatrix { address: hidden.address + first as u64 * hidden.stride_bytes(), rows, ..hidden };
            let (logits, stride) = stored.place(stream);
            let logits = logits + 4 * u64::from(head.first_token);
            let rows_at = rows_at + (first * size_of::<Row>()) as u64;
            // SAFETY: hidden states and rows are this value's, copied on this stream; there is room for as many draws and
            // logits; the head by this function's contract.
            unsafe { self.fused.launch_storing(stream, &part, rows_at, draws, logits, stride) }?;
            first += rows;
        }
        Ok(())
    }

    /// Asks the stored logits, all of which are there when the stream has passed what was enqueued; waits. `outcomes` tells
    /// of each row that asked whether it can be drawn from.
    pub(super) fn end(
        &mut self,
        mut outcomes: impl Iterator<Item = Result<(), RowError>>,
        stream: &Arc<CudaStream>,
    ) -> Result<(), CudaError> {
        let mut rest = self.asking.as_slice();
        for stored in &mut self.stored {
            let (part, after) = rest.split_at(rest.len().min(stored.rows()));
            rest = after;
            if !part.is_empty() {
                let outcomes = outcomes.by_ref().take(part.len());
                self.answers.ask(part, outcomes, false, None, stored, stream)?;
            }
        }
        self.fused.settle();
        Ok(())
    }

    /// The mass and the largest logits of the row that was pushed as number `i`.
    pub(super) fn extras(&self, i: usize) -> (Option<&MassHistogram>, &[Candidate]) {
        self.answers.extras(i)
    }

    /// Gives row `row` of `out`, which was drawn, its raw log-probabilities: those of the row that was pushed as number `i`.
    pub(super) fn note_raw(
        &mut self,
        i: usize,
        row: usize,
        stream: &Arc<CudaStream>,
        out: &mut Samples,
    ) -> Result<(), CudaError> {
        let mut at = i;
        let mut places = self.stored.iter_mut();
        let place = places.find(|place| {
            let is_here = at < place.rows();
            at -= if is_here { 0 } else { place.rows() };
            is_here
        });
        let (Some(mass), top) = self.answers.extras(i) else {
            return Err(CudaError::Corrupt { what: "masses" });
        };
        if let (Some(stored), Ok(drawn)) = (place, out.row(row)) {
            let logits = stored.read_some(at, drawn.draws.iter().map(|draw| draw.token), stream)?;
            out.set_raw(row, mass, top, logits.iter().copied());
        }
        Ok(())
    }
}
