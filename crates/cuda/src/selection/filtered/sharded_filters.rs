//! Draws with filters over the shards of several ranks. Ranks first exchange their draws without filters by peers, and
//! then the lists or sums of every shard.

use super::{DeviceFilters, FILTER_LIST_RANKS, FilteredRows};
use crate::abi::{DeviceAddress, FilterListCall, PeerRecords};
use crate::device::{ConfiguredKernel, Device, DeviceMatrix, DeviceTiled, FusedOutput, Queue, RowFeatures, entries};
use crate::error::CudaError;
use crate::exchange::peers::DevicePeers;
use crate::selection::top_p;
use crate::selection::top_p::TopP;

/// The error of a call before [`DeviceFilters::prepare_sharded`].
const NOT_PREPARED: CudaError = CudaError::NotSharded { reason: "filters are not prepared" };

/// The kernels that filter over ranks.
#[derive(Debug)]
pub(super) struct RankKernels {
    by_list: ConfiguredKernel<(FilterListCall, PeerRecords)>,
    by_mass: TopP<top_p::Ranks>,
}

impl RankKernels {
    fn load(device: &Device) -> Result<Self, CudaError> {
        let by_list = ConfiguredKernel::load(device, &FILTER_LIST_RANKS, &entries::FILTER_LIST_RANKS)?;
        Ok(RankKernels { by_list, by_mass: TopP::<top_p::Ranks>::load(device)? })
    }
}

impl DeviceFilters {
    /// Loads kernels and allocates memory for launches of ranks. Later launches do neither, so they do not delay other
    /// ranks.
    pub(crate) fn prepare_sharded(&mut self, sampler: &mut DeviceTiled) -> Result<(), CudaError> {
        if self.of_ranks.is_none() {
            self.of_ranks = Some(RankKernels::load(&self.device)?);
        }
        self.prepare(sampler)
    }

    fn rank_kernels(&self) -> Result<&RankKernels, CudaError> {
        self.of_ranks.as_ref().ok_or(NOT_PREPARED)
    }

    /// Draws as [`DeviceFilters::launch_listed`] does, over the shards of all ranks.
    ///
    /// The sampler must [write lists](DeviceTiled::can_list). Every rank has the same draws, and the same rows are
    /// [`UNDECIDED`](crate::abi::status::UNDECIDED). The host computes the call's fingerprint while the sampler runs.
    pub(crate) fn enqueue_listed_ranks(
        &mut self,
        queue: Queue<'_>,
        sampler: &mut DeviceTiled,
        hidden: &DeviceMatrix,
        rows: FilteredRows,
        (peers, mark): (&mut DevicePeers, impl FnOnce() -> u64),
    ) -> Result<(), CudaError> {
        self.check(hidden, sampler, rows.filters)?;
        self.rank_kernels()?;
        if !sampler.can_list(hidden) {
            return Err(CudaError::NotSharded {
                reason: "lists need the Hopper kernel, and aligned hidden states of the weight's type",
            });
        }
        let (lists, are_zeros) = self.begin_lists(queue, rows.filters)?;
        sampler.launch_any(queue, hidden, rows.unfiltered(), FusedOutput::Lists(lists))?;
        peers.set_mark(mark());
        peers.enqueue(queue, rows.unfiltered(), hidden.rows)?;
        if hidden.rows > 0 {
            let call = FilterListCall { lists, rows: rows.rows, draws: rows.draws, passes: DeviceAddress::NULL };
            self.rank_kernels()?.by_list.launch(queue, hidden.rows as u32, (call, peers.records()))?;
        }
        self.are_zeros = are_zeros;
        Ok(())
    }

    /// Draws as [`DeviceFilters::launch`] does, over the shards of all ranks, for rows with top-p alone or no
    /// filters.
    ///
    /// The sampler's shard begins at a multiple of 4. The host computes the call's fingerprint while the sampler runs.
    pub(crate) fn enqueue_by_mass_ranks(
        &mut self,
        queue: Queue<'_>,
        sampler: &mut DeviceTiled,
        hidden: &DeviceMatrix,
        (rows, features): (FilteredRows, RowFeatures),
        (peers, mark): (&mut DevicePeers, impl FnOnce() -> u64),
    ) -> Result<(), CudaError> {
        self.check(hidden, sampler, rows.filters)?;
        self.rank_kernels()?;
        if !self.tokens.start.is_multiple_of(4) {
            return Err(CudaError::NotSharded { reason: "top-p alone needs shards that begin at multiples of 4" });
        }
        // Ranks may use different kernels, for example if only one shard has a bias. All kernels exchange sums and bins
        // in the same records.
        let has_maxima = features == RowFeatures::Bare && sampler.stores_block_maxima(hidden);
        let (stored, output) = self.logit_store(has_maxima, rows.filters)?;
        let is_transformed = sampler.launch_any(queue, hidden, rows.unfiltered(), output)?;
        peers.set_mark(mark());
        peers.enqueue(queue, rows.unfiltered(), hidden.rows)?;
        if hidden.rows == 0 {
            return Ok(());
        }
        let call = self.filter_call(stored, &rows, is_transformed, hidden.rows);
        let (open, are_zeros) = self.by_logits.begin_open(queue)?;
        self.rank_kernels()?.by_mass.launch(queue, &call, (call, open, peers.records()), hidden.rows as u32)?;
        self.by_logits.are_open_zeros = are_zeros;
        Ok(())
    }
}
