//! Draws with filters that ranks make together: the draws without them meet first, by peers, and then what the filters
//! need of every shard.

use super::{DeviceFilters, FILTER_LIST_RANKS, FilteredRows};
use crate::abi::{FilterListCall, PeerRecords};
use crate::device::entries;
use crate::device::fused_hopper::FusedOutput;
use crate::device::gpu::Device;
use crate::device::launch::Queue;
use crate::device::launch_config::ConfiguredKernel;
use crate::device::matrix::DeviceMatrix;
use crate::device::row_features::RowFeatures;
use crate::device::tiled::DeviceTiled;
use crate::error::CudaError;
use crate::exchange::peers::DevicePeers;
use crate::selection::top_p::{self, TopP};

/// A call before [`DeviceFilters::prepare_sharded`], or the host's way to it.
pub(crate) const NOT_PREPARED: CudaError = CudaError::NotTogether { reason: "filters are not prepared" };

/// The kernels of ranks.
#[derive(Debug)]
pub(super) struct Together {
    by_list: ConfiguredKernel<(FilterListCall, PeerRecords)>,
    by_mass: TopP<top_p::Ranks>,
}

impl Together {
    fn load(device: &Device) -> Result<Self, CudaError> {
        let by_list = ConfiguredKernel::load(device, &FILTER_LIST_RANKS, &entries::FILTER_LIST_RANKS)?;
        Ok(Together { by_list, by_mass: TopP::<top_p::Ranks>::load(device)? })
    }
}

impl DeviceFilters {
    /// Loads and allocates what launches of ranks need of `sampler`: none does so afterwards, while another rank waits.
    pub(crate) fn prepare_sharded(&mut self, sampler: &mut DeviceTiled) -> Result<(), CudaError> {
        if self.together.is_none() {
            self.together = Some(Together::load(&self.device)?);
        }
        self.prepare(sampler)
    }

    fn together(&self) -> Result<&Together, CudaError> {
        self.together.as_ref().ok_or(NOT_PREPARED)
    }

    /// As [`DeviceFilters::launch_listed`], of the whole vocabulary of which the sampler has a shard, where it
    /// [lists](DeviceTiled::lists): every rank gets the same draws, and the same rows come back as
    /// [`UNDECIDED`](crate::abi::status::UNDECIDED). The call's mark is computed when the sampler is under way.
    pub(crate) fn enqueue_listed_ranks(
        &mut self,
        queue: Queue<'_>,
        sampler: &mut DeviceTiled,
        hidden: &DeviceMatrix,
        rows: FilteredRows,
        (peers, mark): (&mut DevicePeers, impl FnOnce() -> u64),
    ) -> Result<(), CudaError> {
        self.check(hidden, sampler, rows.filters)?;
        self.together()?;
        if !sampler.lists(hidden) {
            return Err(CudaError::NotTogether {
                reason: "lists are left on Hopper, of hidden states of the weight's type",
            });
        }
        let (lists, are_zeros) = self.begin_lists(queue, rows.filters)?;
        sampler.launch_any(queue, hidden, rows.unfiltered(), FusedOutput::Lists(lists))?;
        peers.set_mark(mark());
        peers.enqueue(queue, rows.unfiltered(), hidden.rows)?;
        if hidden.rows > 0 {
            let call = FilterListCall { lists, rows: rows.rows, draws: rows.draws };
            self.together()?.by_list.launch(queue, hidden.rows as u32, (call, peers.records()))?;
        }
        self.are_zeros = are_zeros;
        Ok(())
    }

    /// As [`DeviceFilters::launch_kinds`] for rows of these kinds with top-p alone or no filters, of the whole vocabulary of
    /// which the sampler has a shard that begins at a multiple of 4; the mark as there.
    pub(crate) fn enqueue_by_mass_ranks(
        &mut self,
        queue: Queue<'_>,
        sampler: &mut DeviceTiled,
        hidden: &DeviceMatrix,
        (rows, kinds): (FilteredRows, RowFeatures),
        (peers, mark): (&mut DevicePeers, impl FnOnce() -> u64),
    ) -> Result<(), CudaError> {
        self.check(hidden, sampler, rows.filters)?;
        self.together()?;
        if !self.tokens.start.is_multiple_of(4) {
            return Err(CudaError::NotTogether { reason: "for top-p alone the shards begin at multiples of 4" });
        }
        // Ranks may go different ways, where a bias is of one shard alone: sums and bins cross in the same records.
        let has_maxima = kinds == RowFeatures::Bare && sampler.stores_block_maxima(hidden);
        let (stored, output) = self.logit_store(has_maxima)?;
        let is_transformed = sampler.launch_any(queue, hidden, rows.unfiltered(), output)?;
        peers.set_mark(mark());
        peers.enqueue(queue, rows.unfiltered(), hidden.rows)?;
        if hidden.rows == 0 {
            return Ok(());
        }
        let call = self.filter_call(stored, &rows, is_transformed, hidden.rows);
        let (open, are_zeros) = self.begin_open(queue)?;
        self.together()?.by_mass.launch(queue, &call, (call, open, peers.records()), hidden.rows as u32)?;
        self.are_open_zeros = are_zeros;
        Ok(())
    }
}
