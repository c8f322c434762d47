//! Draws with filters, from the lists of the largest logits of several ranks.
#![allow(unsafe_code)]

use crate::abi::{FilterListCall, PeerRecords};
use crate::compile::kernels::KernelSource;
use crate::device::fused_hopper;
use crate::device::gpu::Device;
use crate::device::launch::argument;
use crate::device::launch_config::ConfiguredKernel;
use crate::error::CudaError;
use cudarc::driver::CudaStream;

pub(crate) static SOURCE: KernelSource = KernelSource::single_cold("filter_list_ranks.cu", fused_hopper::serves);

/// The kernel in a device.
#[derive(Debug)]
pub(crate) struct FilterListRanks(ConfiguredKernel);

impl FilterListRanks {
    /// Compiled and loaded at first use.
    pub(crate) fn load(device: &Device) -> Result<Self, CudaError> {
        Ok(FilterListRanks(ConfiguredKernel::load(device, &SOURCE, "filter_list_ranks")?))
    }

    /// Replaces the draws of rows with filters by draws with filters, by `UNDECIDED`, or by the rank that is late.
    ///
    /// # Safety
    /// As [`FilterList::launch`](crate::selection::filter_list::FilterList::launch); and the exchange of the draws of the same
    /// rows stands before it on the stream, with the same peers.
    pub(crate) unsafe fn launch(
        &self,
        stream: &CudaStream,
        call: &FilterListCall,
        records: &PeerRecords,
        draws: u32,
    ) -> Result<(), CudaError> {
        // SAFETY: the kernel takes a FilterListCall and a PeerRecords by value, whose layouts abi asserts; mailboxes and state are
        // the peers', with room for as many rows; the rest is the caller's.
        unsafe { self.0.launch(stream, draws, [argument(call), argument(records)]) }
    }
}
