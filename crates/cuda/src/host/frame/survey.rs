//! Surveys of a shard's rows for a merge of shards: the logits are stored on the GPU and copied down, and the host, on all its
//! threads, sees in them what the merge asks. It is the plain survey of core, of the kernels' logits, for the rows that
//! have filters or raw log-probabilities; it allocates room for their logits in each call.
#![allow(unsafe_code)]

use super::Frame;
use crate::abi::Draw;
use crate::device::stored_rows::StoredRows;
use crate::error::CudaError;
use crate::host::resident::Resident;
use crate::host::results::candidate;
use crate::host::staging::Staging;
use cudarc::driver::CudaStream;
use flash_sampling_core::survey::check_survey;
use flash_sampling_core::{Inquiry, Matrix, RowError, RowParams, RowSurvey, SampleError, params};
use std::sync::Arc;
use std::thread;

/// A row to be surveyed: its place in the call, itself, what is asked, and where the answer goes.
struct Member<'a> {
    at: usize,
    row: params::Row<'a>,
    inquiry: Inquiry<'a>,
    out: &'a mut RowSurvey,
}

impl Frame<'_> {
    /// See [`Survey`](flash_sampling_core::Survey); not of a canonical plan.
    pub(crate) fn survey(
        &mut self,
        input: Matrix<'_>,
        rows: &[RowParams<'_>],
        inquiries: &[Inquiry<'_>],
        out: &mut [RowSurvey],
    ) -> Result<(), SampleError> {
        check_survey(&input, rows, inquiries, out, &self.shape(), &self.plan)?;
        self.adjustments.collect(rows);
        let (can, vocab_size, tokens) = (self.can, self.head.vocab_size(), self.head.tokens());
        let mut members = Vec::new();
        for (at, out) in out.iter_mut().enumerate().filter(|(at, _)| inquiries[*at] != Inquiry::Nothing) {
            out.clear();
            match rows[at].check(self.adjustments.row(at), &can, &self.plan, vocab_size) {
                Ok(row) => members.push(Member { at, row, inquiry: inquiries[at], out }),
                Err(error) => out.error = Some(error),
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
        let Frame { staging, draws, stream, .. } = self;
        let mut store = Store { resident, stored, staging, draws, stream, input: &input, vocab_size };
        let most = store.stored.rows().min(store.resident.most());
        let mut members = members.as_mut_slice();
        while !members.is_empty() {
            let (part, rest) = members.split_at_mut(most.min(members.len()));
            members = rest;
            let logits = store.logits(part.iter().map(|member| (member.at, &rows[member.at], member.row)));
            let logits = logits.map_err(failed)?;
            let of_raw: Vec<_> = part.iter().filter(|member| member.row.raw_logprobs.is_some()).collect();
            let raw_rows = of_raw.iter().map(|member| (member.at, &rows[member.at], raw));
            let mut raw_logits = store.logits(raw_rows).map_err(failed)?.into_iter();
            let mut jobs = Vec::with_capacity(part.len());
            for (member, (outcome, logits)) in part.iter_mut().zip(logits) {
                let raw = member.row.raw_logprobs.and_then(|_| raw_logits.next()).unwrap_or((Ok(()), Vec::new()));
                match outcome.and(raw.0) {
                    // Other shards may have a finite logit.
                    Ok(()) | Err(RowError::NoFiniteLogit) => jobs.push((member, logits, raw.1)),
                    Err(error) => member.out.error = Some(error),
                }
            }
            let threads = thread::available_parallelism().map_or(1, usize::from).min(jobs.len().max(1));
            let each = jobs.len().div_ceil(threads).max(1);
            thread::scope(|scope| {
                for jobs in jobs.chunks_mut(each) {
                    scope.spawn(|| {
                        jobs.iter_mut().for_each(|(member, logits, raw)| member.look(tokens.start, logits, raw));
                    });
                }
            });
        }
        Ok(())
    }
}

impl Member<'_> {
    fn look(&mut self, first: u32, logits: &[f32], raw: &[f32]) {
        self.out.of(&self.row, self.inquiry, first, logits);
        self.out.of_raw(&self.row, self.inquiry, first, raw);
    }
}

/// A row's outcome as its draw tells, and its logits.
type Stored = (Result<(), RowError>, Vec<f32>);

/// What stores the logits of rows.
struct Store<'a> {
    resident: &'a mut Resident,
    stored: &'a mut StoredRows,
    staging: &'a mut Staging,
    draws: &'a mut Vec<Draw>,
    stream: &'a Arc<CudaStream>,
    input: &'a Matrix<'a>,
    vocab_size: u32,
}

impl Store<'_> {
    /// The logits of rows of the input, transformed as each row says; as many rows as are stored at a time.
    fn logits<'r>(
        &mut self,
        rows: impl Iterator<Item = (usize, &'r RowParams<'r>, params::Row<'r>)>,
    ) -> Result<Vec<Stored>, CudaError> {
        self.staging.clear();
        let mut count = 0;
        for (at, params, row) in rows {
            let bytes = self.resident.row_stride() * self.input.dtype().size();
            self.staging.push_hidden(self.input.row_bytes(at), bytes);
            self.staging.push(params.seed, params.position, &row, row.first_draw, self.vocab_size);
            count += 1;
        }
        if count == 0 {
            return Ok(Vec::new());
        }
        let (there, stride) = self.stored.place(self.stream);
        self.resident.store(self.staging, self.input, there, stride, self.draws, self.stream)?;
        let mut logits = Vec::with_capacity(count);
        for (row, draw) in self.draws.iter().enumerate().take(count) {
            logits.push((candidate(draw).map(drop), self.stored.read(row, self.stream)?.to_vec()));
        }
        Ok(logits)
    }
}
