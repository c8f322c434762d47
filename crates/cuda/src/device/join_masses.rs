//! The draws with top-p alone from the logits of several ranks, after the draws without filters: its kernels and their launches.
#![allow(unsafe_code)]

use crate::abi::{OpenRows, PeerRecords, SelectRows};
use crate::compile::kernels::{Instance, KernelSource};
use crate::device::fused_hopper;
use crate::device::gpu::Device;
use crate::device::launch::{Grid, argument, launch, launch_clusters};
use crate::device::select_mass::{blocks_of, tops_blocks};
use crate::device::told::{allow_shared, told};
use crate::error::CudaError;
use cudarc::driver::{CudaFunction, CudaStream};

pub(crate) static SOURCE: KernelSource =
    KernelSource { file: "join_masses.cu", serves: fused_hopper::serves, instances: || vec![instance()] };

/// One instance.
fn instance() -> Instance {
    Instance::new(&[]).cold()
}

/// The kernels in a device.
#[derive(Debug)]
pub(crate) struct JoinMasses {
    masses: CudaFunction,
    by_tops: CudaFunction,
    open: CudaFunction,
    open_bytes: u32,
    threads: u32,
    step: u32,
    multiprocessors: u32,
}

impl JoinMasses {
    /// Compiled and loaded at first use.
    pub(crate) fn load(device: &Device) -> Result<Self, CudaError> {
        let failed = CudaError::driver("load a kernel");
        let module = device.module(&SOURCE, &instance())?;
        let masses = module.load_function("join_masses").map_err(&failed)?;
        let by_tops = module.load_function("join_by_tops").map_err(&failed)?;
        let open = module.load_function("join_open").map_err(&failed)?;
        let [threads, step, open_bytes] = told(&module, "join_masses_launch", device)?;
        allow_shared(&open, open_bytes)?;
        Ok(JoinMasses { masses, by_tops, open, open_bytes, threads, step, multiprocessors: device.multiprocessors() })
    }

    /// Puts the draws with top-p in place of those without, or says that a row is undecided or which rank did not come. Blocks
    /// wait for other ranks: those of a launch that do, one a draw, are to be no more than the GPU holds at a time, two a
    /// multiprocessor, for all ranks that are on it.
    ///
    /// # Safety
    /// * As [`SelectMass::launch`](crate::device::select_mass::SelectMass::launch), for rows with top-p alone or no filters; the
    ///   logits may be written to, lie at multiples of 16 bytes, and the first token is a multiple of 4, with tops or without.
    /// * The exchange of the draws of the same rows stands before it on the stream, with the same peers.
    pub(crate) unsafe fn launch(
        &self,
        stream: &CudaStream,
        call: &SelectRows,
        open: &OpenRows,
        records: &PeerRecords,
        draws: u32,
    ) -> Result<(), CudaError> {
        let arguments = [argument(call), argument(open), argument(records)];
        // SAFETY (of all): the kernels take a SelectRows, an OpenRows and a PeerRecords by value, whose layouts abi asserts; the
        // rest is the caller's.
        if call.tops != 0 {
            let blocks = tops_blocks(call.tokens, draws, self.multiprocessors);
            // SAFETY: see above.
            unsafe { launch(&self.by_tops, stream, Grid::of(blocks, self.threads), arguments) }?;
        } else {
            let blocks = blocks_of(call.tokens, self.step, draws, self.multiprocessors);
            // SAFETY: see above.
            unsafe {
                launch_clusters(&self.masses, stream, Grid::of(draws * blocks, self.threads), blocks, arguments)
            }?;
        }
        // Two blocks a multiprocessor, and one a draw at least: each open row has one.
        let blocks = (2 * self.multiprocessors).max(draws);
        let grid = Grid { shared_bytes: self.open_bytes, ..Grid::of(blocks, self.threads) };
        // SAFETY: as above.
        unsafe { launch(&self.open, stream, grid, arguments) }
    }
}
