//! The draws with filters from lists of the largest logits of several ranks: its kernel and its launch.
#![allow(unsafe_code)]

use crate::abi::{PeerRecords, SelectLists};
use crate::compile::kernels::{Instance, KernelSource};
use crate::device::fused_hopper;
use crate::device::gpu::Device;
use crate::device::launch::argument;
use crate::device::launch_config::ConfiguredKernel;
use crate::error::CudaError;
use cudarc::driver::CudaStream;

pub(crate) static SOURCE: KernelSource =
    KernelSource { file: "join_lists.cu", serves: fused_hopper::serves, instances: || vec![instance()] };

/// Its functions that are called seldom are calls, which keep registers in memory.
fn instance() -> Instance {
    Instance::new(&[]).cold()
}

/// The kernel in a device.
#[derive(Debug)]
pub(crate) struct JoinLists(ConfiguredKernel);

impl JoinLists {
    /// Compiled and loaded at first use.
    pub(crate) fn load(device: &Device) -> Result<Self, CudaError> {
        Ok(JoinLists(ConfiguredKernel::load(device, &SOURCE, &instance(), "join_lists")?))
    }

    /// Puts the draws with filters in place of those without, or says that a row is undecided or which rank did not come.
    ///
    /// # Safety
    /// As [`SelectList::launch`](crate::device::select_list::SelectList::launch); and the exchange of the draws of the same
    /// rows stands before it on the stream, with the same peers.
    pub(crate) unsafe fn launch(
        &self,
        stream: &CudaStream,
        call: &SelectLists,
        records: &PeerRecords,
        draws: u32,
    ) -> Result<(), CudaError> {
        // SAFETY: the kernel takes a SelectLists and a PeerRecords by value, whose layouts abi asserts; mailboxes and state are
        // the peers', with room for as many rows; the rest is the caller's.
        unsafe { self.0.launch(stream, draws, [argument(call), argument(records)]) }
    }
}
