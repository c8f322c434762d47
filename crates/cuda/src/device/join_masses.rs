//! The draws with top-p alone from the logits of several ranks, after the draws without filters: its kernels and their launches.
#![allow(unsafe_code)]

use crate::abi::{OpenRows, PeerRecords, SelectRows};
use crate::compile::kernels::{Instance, KernelSource};
use crate::device::fused_hopper;
use crate::device::gpu::Device;
use crate::device::launch::{Grid, argument, launch, launch_clusters};
use crate::device::launch_config::{allow_shared, told};
use crate::device::select_mass::blocks_of;
use crate::error::CudaError;
use cudarc::driver::{CudaFunction, CudaStream};

pub(crate) static SOURCE: KernelSource =
    KernelSource { file: "join_masses.cu", serves: fused_hopper::serves, instances: || vec![instance()] };

/// One instance.
fn instance() -> Instance {
    Instance::new(&[]).cold()
}

/// How many blocks read the tops of `draws` draws: as many as there are multiprocessors for, two each, in whole octets of draws;
/// each with 64 granules at least (tops_sums.cuh).
fn tops_blocks(tokens: u32, draws: u32, multiprocessors: u32) -> u32 {
    let octets = draws.div_ceil(8).max(1);
    octets * (2 * multiprocessors / octets).min(tokens / (2 * 32 * 16)).max(1)
}

/// The kernels in a device.
#[derive(Debug)]
pub(crate) struct JoinMasses {
    masses: CudaFunction,
    by_tops: CudaFunction,
    open: CudaFunction,
    open_bytes: u32,
    tops_bytes: u32,
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
        let [threads, step, open_bytes, tops_bytes] = told(&module, "join_masses_launch", device)?;
        allow_shared(&open, open_bytes)?;
        allow_shared(&by_tops, tops_bytes)?;
        let multiprocessors = device.multiprocessors();
        Ok(JoinMasses { masses, by_tops, open, open_bytes, tops_bytes, threads, step, multiprocessors })
    }

    /// Puts the draws with top-p in place of those without, or says that a row is undecided or which rank did not come. Blocks
    /// wait for other ranks: of `join_by_tops` the last, of the other kernels at most one a draw. So there are to be no more
    /// draws than the GPU holds blocks at a time, two a multiprocessor, for all ranks that are on it.
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
            let grid = Grid { shared_bytes: self.tops_bytes, ..Grid::of(blocks, self.threads) };
            // SAFETY: see above.
            unsafe { launch(&self.by_tops, stream, grid, arguments) }?;
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_octet_of_draws_has_as_many_blocks_for_its_tops() {
        let of = |draws| tops_blocks(151_936, draws, 132);
        assert_eq!([1, 8, 9, 64, 65, 250, 256].map(of), [148, 148, 264, 264, 261, 256, 256]);
        assert_eq!([1, 1023, 4096].map(|tokens| tops_blocks(tokens, 17, 132)), [3, 3, 12]);
    }
}
