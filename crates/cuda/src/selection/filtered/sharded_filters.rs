//! Draws with filters that ranks make together: the draws without them meet first, by peers, and then what the filters
//! need of every shard.

use super::DeviceFilters;
use crate::abi::{FilterCall, FilterListCall, LogitStore};
use crate::device::fused_hopper::FusedOutput;
use crate::device::gpu::Device;
use crate::device::matrix::DeviceMatrix;
use crate::device::row_features::RowFeatures;
use crate::device::tiled::DeviceTiled;
use crate::error::CudaError;
use crate::exchange::peers::DevicePeers;
use crate::selection::filter_list_ranks::FilterListRanks;
use crate::selection::top_p_ranks::TopPRanks;
use cudarc::driver::CudaStream;

/// A call before [`DeviceFilters::prepare_sharded`], or the host's way to it.
pub(crate) const NOT_PREPARED: CudaError = CudaError::NotTogether { reason: "filters are not prepared" };

/// The kernels of ranks.
#[derive(Debug)]
pub(super) struct Together {
    lists: FilterListRanks,
    masses: TopPRanks,
}

impl Together {
    fn load(device: &Device) -> Result<Self, CudaError> {
        Ok(Together { lists: FilterListRanks::load(device)?, masses: TopPRanks::load(device)? })
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
    /// [`UNDECIDED`](crate::abi::status::UNDECIDED). The call's mark is asked for when the sampler is under way.
    ///
    /// # Safety
    /// As [`DeviceFilters::launch_listed`] and [`DevicePeers::launch`].
    pub(crate) unsafe fn launch_listed_together(
        &mut self,
        stream: &CudaStream,
        sampler: &mut DeviceTiled,
        hidden: &DeviceMatrix,
        (rows, filters): (u64, u64),
        draws: u64,
        (peers, mark): (&mut DevicePeers, impl FnOnce() -> u64),
    ) -> Result<(), CudaError> {
        self.check(hidden, sampler, filters)?;
        self.together()?;
        if !sampler.lists(hidden) {
            return Err(CudaError::NotTogether {
                reason: "lists are left on Hopper, of hidden states of the weight's type",
            });
        }
        let (lists, are_zeros) = self.begin_lists(stream, filters)?;
        // SAFETY: this function's contract; there is room for the lists of as many rows, and the last launch leaves zeros.
        unsafe {
            sampler.launch_leaving(stream, hidden, rows, draws, FusedOutput::Lists(lists))?;
            peers.set_mark(mark());
            peers.launch(stream, rows, draws, hidden.rows)?;
        }
        if hidden.rows > 0 {
            let call = FilterListCall { lists, rows, draws };
            // SAFETY: as above; the lists were left on the same stream.
            unsafe { self.together()?.lists.launch(stream, &call, &peers.records(), hidden.rows as u32) }?;
        }
        self.are_zeros = are_zeros;
        Ok(())
    }

    /// As [`DeviceFilters::launch_kinds`] for rows of these kinds with top-p alone or no filters, of the whole vocabulary of
    /// which the sampler has a shard that begins at a multiple of 4; the mark as there.
    ///
    /// # Safety
    /// As [`DeviceFilters::launch_kinds`] for such rows, and [`DevicePeers::launch`].
    pub(crate) unsafe fn launch_by_mass_together(
        &mut self,
        stream: &CudaStream,
        sampler: &mut DeviceTiled,
        hidden: &DeviceMatrix,
        (rows, filters): (u64, u64),
        (draws, kinds): (u64, RowFeatures),
        (peers, mark): (&mut DevicePeers, impl FnOnce() -> u64),
    ) -> Result<(), CudaError> {
        self.check(hidden, sampler, filters)?;
        self.together()?;
        if !self.tokens.start.is_multiple_of(4) {
            return Err(CudaError::NotTogether { reason: "for top-p alone the shards begin at multiples of 4" });
        }
        let logits = self.room()?.lend();
        // Ranks may go different ways, where a bias is of one shard alone: sums and bins cross in the same records.
        let by_block_maxima = kinds == RowFeatures::Bare && sampler.stores_block_maxima(hidden);
        let block_maxima = if by_block_maxima { logits + self.logits_bytes() as u64 } else { 0 };
        let stored = LogitStore { logits, stride: self.stride as u64, block_maxima };
        let more = if by_block_maxima { FusedOutput::StoreLogits(stored) } else { FusedOutput::MasksPenalties(stored) };
        // SAFETY: this function's contract; there is room for the logits of as many rows, and for their block maxima.
        let is_transformed = unsafe {
            let is_transformed = sampler.launch_leaving(stream, hidden, rows, draws, more)?;
            peers.set_mark(mark());
            peers.launch(stream, rows, draws, hidden.rows)?;
            is_transformed
        };
        if hidden.rows == 0 {
            return Ok(());
        }
        let call = FilterCall {
            is_transformed: is_transformed.into(),
            ..self.filter_call(stored, (rows, filters), draws, hidden.rows)
        };
        let (open, are_zeros) = self.begin_open(stream)?;
        // SAFETY: this function's contract; the logits were stored on the same stream; there is room for the open rows of as many
        // draws, and the launches leave zeros.
        unsafe { self.together()?.masses.launch(stream, &call, &open, &peers.records(), hidden.rows as u32) }?;
        self.are_open_zeros = are_zeros;
        Ok(())
    }

    /// The argument of the selections over raw logits that were just stored.
    fn filter_call(&self, stored: LogitStore, (rows, filters): (u64, u64), draws: u64, count: usize) -> FilterCall {
        FilterCall {
            logits: stored.logits,
            row_stride: stored.stride,
            sources: 0,
            rows,
            filters,
            draws,
            first_token: self.tokens.start,
            tokens: self.tokens.len() as u32,
            is_transformed: 0,
            count: count as u32,
            block_maxima: stored.block_maxima,
        }
    }
}
