//! One shard of this process, and its last summaries.

use crate::merge::ShardMerge;
use core::fmt;
use flash_sampling_core::backend::{Batch, Request, RowSummary, SampledRows, kept_list, reuse_vec};
use flash_sampling_core::{PerturbedArgmax, SampleError};

/// A shard and its last summaries. Its memory is reused between calls.
pub(crate) struct LocalShard<'s> {
    sampler: Box<dyn PerturbedArgmax + 's>,
    summaries: Vec<RowSummary>,
    sampled: SampledRows,
    /// Empty between calls; only its memory is reused.
    requests: Vec<Request<'static>>,
}

impl<'s> LocalShard<'s> {
    pub(crate) fn new(sampler: Box<dyn PerturbedArgmax + 's>) -> Self {
        LocalShard { sampler, summaries: Vec::new(), sampled: SampledRows::default(), requests: Vec::new() }
    }

    /// Summarizes the shard's tokens in one scan, which reads the weight once. A merge by log-mass, or a sampler
    /// without a scan, samples the rows instead; these rows have no filters.
    pub(crate) fn scan(
        &mut self,
        batch: &Batch<'_, '_>,
        requests: &[Request<'_>],
        merge: ShardMerge,
    ) -> Result<(), SampleError> {
        let LocalShard { sampler, summaries, sampled, requests: own } = self;
        let rows = batch.rows.len();
        summaries.resize_with(rows.max(summaries.len()), RowSummary::default);
        match sampler.scan().filter(|_| merge == ShardMerge::Winners) {
            Some(scan) => {
                // The tokens that a filter keeps depend on the other shards too.
                let mut shard = reuse_vec(core::mem::take(own));
                let request = |request: &Request<'_>| *request != Request::Decide;
                shard.extend(requests.iter().map(|r| if request(r) { *r } else { Request::Overview }));
                let skips = shard.iter().all(|request| *request == Request::Skip);
                let scanned = if skips { Ok(()) } else { scan.scan(batch, &shard, summaries) };
                *own = reuse_vec(shard);
                scanned
            }
            None => {
                let params_of = |r: usize| requests[r].is_overview().then(|| merge.shard_params(&batch.params[r]));
                sampled.fill(&mut **sampler, batch.input, rows, params_of, summaries)
            }
        }
    }

    /// Plans for another number of rows.
    pub(crate) fn replan(&mut self, max_rows: usize) -> Result<(), SampleError> {
        self.sampler.replan(max_rows)
    }

    /// Frees the memory of a row's long lists.
    pub(crate) fn trim(&mut self, row: usize, rows: usize) {
        self.summaries[row].trim(kept_list(rows));
    }

    /// The summary of a row from the last scan.
    pub(crate) fn summary(&self, row: usize) -> &RowSummary {
        &self.summaries[row]
    }
}

impl fmt::Debug for LocalShard<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (can, shape) = (self.sampler.capabilities(), self.sampler.shape());
        f.debug_struct("LocalShard").field("capabilities", &can).field("shape", &shape).finish_non_exhaustive()
    }
}
