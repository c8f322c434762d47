//! The launches of a call over existing logits that waits.
#![allow(unsafe_code)]

use super::kernels::{LogitKernels, MAX_DRAWS};
use crate::abi::{DeviceAddress, Draw, status};
use crate::device::{DeviceMatrix, Queue, results};
use crate::error::CudaError;
use crate::sampler::{CallRows, DrawItem, FilterSource, LogitSource};
use crate::selection::stored_rows::MAX_ROWS;
use crate::selection::{CanonicalInputs, StoredRows, SummaryInput};
use cudarc::driver::CudaStream;
use std::sync::Arc;

/// The logits of a call. Work on the sampler's own stream, `stream`, may read them.
#[derive(Debug)]
pub(super) struct ExistingLogits<'s> {
    pub(super) kernels: &'s mut LogitKernels,
    pub(super) logits: DeviceMatrix,
    pub(super) stream: &'s Arc<CudaStream>,
}

impl LogitSource for ExistingLogits<'_> {
    fn draw(
        &mut self,
        rows: &CallRows<'_, '_>,
        items: &[DrawItem],
        from: Option<FilterSource>,
        draws: &mut Vec<Draw>,
    ) -> Result<usize, CudaError> {
        let ExistingLogits { kernels, logits, stream } = self;
        draws.clear();
        for part in items.chunks(if from.is_some() { kernels.max_filtered() } else { MAX_DRAWS }) {
            kernels.staging.clear();
            for same in part.chunk_by(|a, b| a.row == b.row) {
                let tokens = 0..kernels.vocab_size();
                let row = rows.adjusted(same[0].row, &mut kernels.adjustments, tokens)?;
                let params = &rows.batch.params[same[0].row];
                kernels.staging.push(params, &row, same.iter().map(|item| item.draw))?;
            }
            let (rows, sources) = kernels.copy_rows(part.iter().map(|item| item.row), stream)?;
            let draws_at = DeviceAddress::of(&kernels.draws, stream);
            // SAFETY: *Memory*: rows and sources were just copied on this stream; `draws` has room for `MAX_DRAWS`. All
            // are freed after the launch; the sources are rows of the logits. The logits were copied on this stream, or
            // belong to the caller by `DeviceSampler::sample`. *Order*: all work is on the sampler's own stream, which
            // follows the stream of a call, and the call waits below. *Rows*: `Staging` makes rows from checked
            // parameters; checked greedy rows have no filters; `RowFilters::of` bounds top-k.
            let queue = unsafe { Queue::new(stream) };
            results::poison(draws_at, part.len(), queue)?;
            kernels.enqueue(queue, (logits, Some(sources)), (rows, draws_at), part.len())?;
            if from.is_some() {
                kernels.enqueue_filters(queue, (logits, sources), (rows, draws_at), part)?;
            }
            let from = draws.len();
            draws.resize(from + part.len(), Draw::default());
            let failed = CudaError::driver("copy the draws");
            stream.memcpy_dtoh(&kernels.draws.slice(..part.len()), &mut draws[from..]).map_err(&failed)?;
            stream.synchronize().map_err(&failed)?;
            kernels.mark_idle();
            results::written(&draws[from..])?;
        }
        Ok(0)
    }

    fn max_filtered(&self) -> usize {
        self.kernels.max_filtered()
    }

    fn max_stored(&self) -> usize {
        MAX_ROWS
    }

    fn store(
        &mut self,
        rows: &CallRows<'_, '_>,
        which: &[usize],
        is_raw: bool,
        stored: &mut StoredRows,
        draws: &mut Vec<Draw>,
    ) -> Result<Option<CanonicalInputs>, CudaError> {
        let ExistingLogits { kernels, logits, stream } = self;
        rows.stage_first(which, is_raw, &mut kernels.adjustments, &mut kernels.staging)?;
        let (rows, sources) = kernels.copy_rows(which.iter().copied(), stream)?;
        stored.summarize(&SummaryInput { raw: Some(*logits), sources, rows })?;
        stream.synchronize().map_err(CudaError::driver("transform logits"))?;
        draws.clear();
        for slot in 0..which.len() {
            draws.push(invalid(stored.invalid(slot)?));
        }
        Ok(None)
    }
}

/// Returns a row's result from the key of its first invalid logit: stage, token, and whether the logit is infinite. If
/// no logit is invalid, all bits of the key are ones.
fn invalid(key: u64) -> Draw {
    let status = match key {
        u64::MAX => status::DRAWN,
        _ if key & 1 == 1 => status::POSITIVE_INFINITY,
        _ => status::NAN,
    };
    Draw { token: (key >> 1) as u32, score: (key >> 33) as f32, status, ..Draw::default() }
}
