//! Surveys of a shard's rows for a merge of shards: the logits are stored on the GPU, and what is asked of them is found there
//! ([`StoredScan`]). Only summaries come down.

use super::HostSampler;
use super::stored_scan::{ScanRow, StoredScan};
use crate::abi::Draw;
use crate::device::stored_rows::StoredRows;
use crate::error::CudaError;
use crate::host::results::candidate;
use crate::host::staging::Staging;
use crate::host::uploaded_head::UploadedHead;
use cudarc::driver::CudaStream;
use flash_sampling_core::backend::{Batch, Request, RowSummary, check_scan};
use flash_sampling_core::{Matrix, RowError, RowParams, SampleError, Stage, StagedError, params};
use std::sync::Arc;

impl HostSampler<'_> {
    /// See [`Scan`](flash_sampling_core::Scan); not of a canonical plan.
    pub(crate) fn survey(
        &mut self,
        batch: &Batch<'_, '_>,
        requests: &[Request<'_>],
        out: &mut [RowSummary],
    ) -> Result<(), SampleError> {
        check_scan(batch, requests, out, &self.shape(), &self.plan)?;
        let Batch { input, params: rows, .. } = *batch;
        self.adjustments.collect_within(rows, self.head.tokens());
        let (can, vocab_size, tokens) = (self.can, self.head.vocab_size(), self.head.tokens());
        let mut members = Vec::new();
        // There may be more entries than rows.
        for (at, (row, (&request, out))) in batch.rows.iter().zip(requests.iter().zip(out)).enumerate() {
            let (Ok(row), false) = (row, request == Request::Skip) else { continue };
            out.clear();
            // `SampledRows` draws rows without filters.
            if row.filters.is_some() || row.raw_logprobs.is_some() || !request.is_overview() {
                let row = row.with_adjustments(self.adjustments.row(at));
                members.push(ScanRow { at, params: &rows[at], row, request, out });
            }
        }
        let Some(resident) = &mut self.resident else {
            members.into_iter().for_each(|mut member| member.look(tokens.start, &[], &[]));
            return Ok(());
        };
        let failed = |error: CudaError| SampleError::Backend { backend: "cuda", source: Box::new(error) };
        let (rows_kept, device) = (self.plan.max_rows, resident.device());
        let stored = StoredRows::made_in(&mut self.stored, tokens.clone(), rows_kept, device, &self.stream);
        let stored = stored.map_err(failed)?;
        // Rows without transforms, whose transformed logits are the raw ones.
        let raw = RowParams::default().check(&[], &can, &self.plan, vocab_size);
        let raw = raw.map_err(|error| SampleError::Backend { backend: "cuda", source: error.into() })?;
        let HostSampler { staging, draws, stream, finder, .. } = self;
        let mut store = Store { resident, stored, staging, draws, stream, input: &input };
        let most = store.stored.rows().min(store.resident.most());
        members.chunks_mut(most).try_for_each(|part| store.survey(part, raw, finder, tokens.start)).map_err(failed)
    }
}

/// What stores the logits of rows.
struct Store<'a> {
    resident: &'a mut UploadedHead,
    stored: &'a mut StoredRows,
    staging: &'a mut Staging,
    draws: &'a mut Vec<Draw>,
    stream: &'a Arc<CudaStream>,
    input: &'a Matrix<'a>,
}

impl Store<'_> {
    /// Surveys rows, as many as are stored at a time; `raw` is a row without transforms.
    fn survey(
        &mut self,
        part: &mut [ScanRow<'_>],
        raw: params::Row<'_>,
        finder: &mut StoredScan,
        first: u32,
    ) -> Result<(), CudaError> {
        part.iter_mut().for_each(|member| member.out.begin(&member.row));
        if part.iter().any(|member| !matches!(member.request, Request::RawLogits(_))) {
            self.store(part.iter().map(|member| (member.at, member.params, member.row)))?;
            self.note_errors(part.iter_mut());
            finder.find(part, self.stored, first, self.stream)?;
        }
        let of_raw = |member: &ScanRow<'_>| member.row.raw_logprobs.is_some() && member.out.error.is_none();
        let rows = part.iter().filter(|member| of_raw(member)).map(|member| (member.at, member.params, raw));
        if self.store(rows)? > 0 {
            let mut members: Vec<_> = part.iter_mut().filter(|member| of_raw(member)).collect();
            self.note_errors(members.iter_mut().map(|member| &mut **member));
            finder.find_raw(&mut members, self.stored, first, self.stream)?;
        }
        Ok(())
    }

    /// Stores the logits of rows of the input, transformed as each row says; how many.
    fn store<'r>(
        &mut self,
        rows: impl Iterator<Item = (usize, &'r RowParams<'r>, params::Row<'r>)>,
    ) -> Result<usize, CudaError> {
        self.staging.clear();
        let mut count = 0;
        for (at, params, row) in rows {
            self.staging.push_of(at, params, &row, [row.first_draw])?;
            count += 1;
        }
        if count > 0 {
            let (there, stride) = self.stored.place(self.stream);
            self.resident.store(self.staging, self.input, there, stride, self.draws, self.stream)?;
        }
        Ok(count)
    }

    /// Gives the rows that were stored their errors. `NoFiniteLogit` is none: other shards may have one.
    fn note_errors<'m, 'a: 'm>(&self, members: impl Iterator<Item = &'m mut ScanRow<'a>>) {
        for (member, draw) in members.zip(&*self.draws) {
            if let Err(error @ (RowError::NaN { .. } | RowError::PositiveInfinity { .. })) = candidate(draw) {
                let stage = if draw.score == 0.0 { Stage::Raw } else { Stage::Transformed };
                member.out.error = Some(StagedError { stage, error });
            }
        }
    }
}
