//! One local shard and its last summaries.

use crate::filtered::kept_list;
use crate::merge::ShardMerge;
use crate::rows::{Batch, surveyed};
use crate::tiling::Whole;
use core::fmt;
use flash_sampling_core::sampler::recycle;
use flash_sampling_core::{Matrix, PerturbedArgmax, Request, RowParams, RowSummary, SampleError, SampledRows, Stage};

/// A shard and its last summaries; keeps its memory from call to call.
pub(crate) struct Shard<'s> {
    sampler: Box<dyn PerturbedArgmax + 's>,
    summaries: Vec<RowSummary>,
    sampled: SampledRows,
    /// Only the memory lives from call to call.
    requests: Vec<Request<'static>>,
}

impl<'s> Shard<'s> {
    pub(crate) fn new(sampler: Box<dyn PerturbedArgmax + 's>) -> Self {
        Shard { sampler, summaries: Vec::new(), sampled: SampledRows::default(), requests: Vec::new() }
    }

    /// Summarizes the shard's tokens for every row, `input [rows, hidden]`: in one scan, which reads the weight once. A merge
    /// by log-mass, and samplers without scans, sample rows without filters instead.
    pub(crate) fn summarize(&mut self, batch: &Batch<'_, '_>, whole: &Whole) -> Result<(), SampleError> {
        let Batch { input, params, rows } = *batch;
        self.summaries.resize_with(rows.len().max(self.summaries.len()), RowSummary::default);
        let scans_all = whole.merge == ShardMerge::Winners && self.sampler.scan().is_some();
        let mut requests = recycle(core::mem::take(&mut self.requests));
        requests.extend(rows.iter().map(|row| match surveyed(row) {
            Some(_) => Request::Overview,
            None if scans_all && row.is_ok() => Request::Overview,
            None => Request::Skip,
        }));
        let scanned = match requests.iter().all(|request| *request == Request::Skip) {
            true => Ok(()),
            false => self.scan(input, params, &requests),
        };
        self.requests = recycle(requests);
        scanned?;
        if scans_all {
            return Ok(());
        }
        let params_of =
            |r: usize| rows[r].as_ref().ok().filter(|row| row.filters.is_none()).map(|_| whole.merge.asks(&params[r]));
        self.sampled.fill(&mut *self.sampler, input, rows.len(), params_of, &mut self.summaries)
    }

    /// A scan for the rows with a request.
    pub(crate) fn scan(
        &mut self,
        input: Matrix<'_>,
        rows: &[RowParams<'_>],
        requests: &[Request<'_>],
    ) -> Result<(), SampleError> {
        match self.sampler.scan() {
            Some(scan) => scan.scan(input, rows, requests, &mut self.summaries),
            // It had one when the shards met.
            None => Err(SampleError::Backend { backend: "distributed", source: "the shard has no scans".into() }),
        }
    }

    /// Gives the memory of long lists back.
    pub(crate) fn trim(&mut self, rows: usize) {
        self.summaries.iter_mut().for_each(|summary| summary.trim(kept_list(rows)));
    }

    /// The summary of a row by the last scan.
    pub(crate) fn summary(&self, row: usize) -> &RowSummary {
        &self.summaries[row]
    }

    /// The stage of the bad logit that a row's error names.
    pub(crate) fn stage(&self, row: usize) -> Stage {
        self.summaries[row].stage
    }
}

impl fmt::Debug for Shard<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (can, shape) = (self.sampler.capabilities(), self.sampler.shape());
        f.debug_struct("Shard").field("capabilities", &can).field("shape", &shape).finish_non_exhaustive()
    }
}
