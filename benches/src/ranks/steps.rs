//! The contenders on every rank: the fused shard with each exchange, and cuBLAS with gathered logits.

use super::rank::Rank;
use super::{ALONE, CUBLAS, Group, SHARD, name};
use crate::args::GpuTransport;
use crate::gpu::read::{driver, failed};
use crate::rivals::Matmul;
use cudarc::driver::{CudaSlice, CudaStream};
use flash_sampling::cuda::DeviceAddress;
use flash_sampling::cuda::abi::{Draw, status};
use flash_sampling::cuda::{DeviceDraws, DeviceMatrix, DevicePeers, DeviceStandalone, DeviceTiled, RowFeatures};
use flash_sampling_cli::bench::record::{Entry, Section};
use flash_sampling_cli::bench::timing::Timing;
use flash_sampling_cli::error::CommandError;
#[cfg(feature = "nccl")]
use {
    crate::rivals::Gather,
    flash_sampling::cuda::{DeviceNccl, NcclEndpoint, NcclId},
};

/// The id of a group of NCCL, which rank 0 makes.
#[cfg(feature = "nccl")]
fn named(rank: &mut Rank) -> Result<NcclId, CommandError> {
    let id = if rank.number() == 0 { Some(NcclId::new().map_err(failed)?) } else { None };
    let names = rank.gather(id.as_ref().map_or([].as_slice(), NcclId::as_bytes))?;
    let id = names.first().and_then(|name| NcclId::from_bytes(name));
    id.ok_or_else(|| CommandError::usage("rank 0 named no group of NCCL"))
}

/// All contenders of a rank, planned once.
#[derive(Debug)]
pub struct Steps {
    // Dropped first: they end GPU work that waits for a missing rank. The other fields would wait for it without a
    // limit.
    #[cfg(feature = "nccl")]
    nccl: Option<DeviceNccl>,
    #[cfg(feature = "nccl")]
    gather: Option<Gather>,
    rank: Rank,
    transports: Vec<GpuTransport>,
    shard: DeviceTiled,
    /// The whole head, on rank 0.
    whole: Option<DeviceTiled>,
    peers: DevicePeers,
    /// `None` if cuBLAS is missing.
    matmul: Option<Matmul>,
    standalone: DeviceStandalone,
    draws: CudaSlice<Draw>,
    draws_at: DeviceAddress<Draw>,
    /// The logits of this rank, and of all ranks.
    logits: [DeviceAddress<u8>; 2],
    _logits: [CudaSlice<u8>; 2],
}

impl Steps {
    /// Plans the contenders; a collective call.
    ///
    /// # Errors
    /// Errors of the backend and the driver.
    pub fn new(mut rank: Rank, group: &Group, peers: DevicePeers) -> Result<Steps, CommandError> {
        let (allocate, most, world) = (driver("allocate memory"), rank.most(), rank.world());
        let (stream, device) = (rank.stream.clone(), rank.device.clone());
        let (tokens, dtype) = (rank.shard.weight.rows, rank.shard.weight.dtype);
        // SAFETY: the weights are device memory of these sizes, which `rank` holds and no code writes to.
        let plan = |head| unsafe { DeviceTiled::new(head, most, &device) }.map_err(failed);
        let (mut shard, whole) = (plan(rank.shard)?, rank.whole.map(plan).transpose()?);
        if group.transports.contains(&GpuTransport::Peers) {
            shard.prepare_fan_out().map_err(failed)?;
        }
        let draws = stream.alloc_zeros(world * most).map_err(&allocate)?;
        let room =
            |ranks: usize| stream.alloc_zeros::<u8>(ranks * most * tokens * dtype.block_bytes()).map_err(&allocate);
        let held = [room(1)?, room(world)?];
        let (draws_at, logits) =
            (DeviceAddress::of(&draws, &stream), held.each_ref().map(|held| DeviceAddress::of(held, &stream)));
        let matmul = Matmul::new(&stream)?;
        let standalone = DeviceStandalone::new(0..tokens as u32, dtype, world * most, &device).map_err(failed)?;
        #[cfg(feature = "nccl")]
        let (nccl, gather) = {
            let (number, limit) = (rank.number(), super::GPU_LIMIT);
            if group.transports.contains(&GpuTransport::Nccl) {
                let id = named(&mut rank)?;
                let offer = NcclEndpoint::new(number, world, most, &device);
                let ours = offer.and_then(|offer| offer.connect(&id, limit)).map_err(failed)?;
                let gather = Gather::new(&named(&mut rank)?, number, world, &stream)?;
                (Some(ours), Some(gather))
            } else {
                (None, None)
            }
        };
        stream.synchronize().map_err(driver("allocate memory"))?;
        // After this, no rank waits on the GPU for a rank that still compiles.
        rank.gather(&[])?;
        Ok(Steps {
            rank,
            transports: group.transports.clone(),
            shard,
            whole,
            peers,
            #[cfg(feature = "nccl")]
            nccl,
            #[cfg(feature = "nccl")]
            gather,
            matmul,
            standalone,
            draws,
            draws_at,
            logits,
            _logits: held,
        })
    }

    /// Times every step on the first rows; a collective call. The compared draws come from a replayed graph.
    ///
    /// # Errors
    /// A draw that differs from that of one GPU, errors of the driver, a missing rank.
    pub fn time(&mut self, section: &mut Section) -> Result<(), CommandError> {
        let rows = section.rows;
        section.entries.push(Entry::new(ALONE, self.alone(rows)?));
        // The expected draws of every rank, from rank 0.
        let drawn = self.drawn(rows)?;
        let expected = self.rank.gather(&drawn)?[0].clone();
        section.entries.push(Entry::new(SHARD, self.shard(rows, None)?));
        for transport in self.transports.clone() {
            let timing = self.shard(rows, Some(transport))?;
            let found = self.drawn(rows)?;
            if found != expected {
                let row = found.chunks(8).zip(expected.chunks(8)).position(|(a, b)| a != b).unwrap_or(0);
                let (rank, name) = (self.rank.number(), name(transport));
                return Err(CommandError::usage(format!(
                    "rank {rank} drew row {row} otherwise by {name} than one GPU"
                )));
            }
            section.entries.push(Entry::new(name(transport), timing));
        }
        for (stage, name) in CUBLAS.into_iter().enumerate() {
            if let Some(timing) = self.rival(rows, stage)? {
                section.entries.push(Entry::new(name, timing));
            }
        }
        Ok(())
    }

    /// Times the whole head on rank 0.
    fn alone(&mut self, rows: usize) -> Result<Timing, CommandError> {
        let (hidden, params, draws) = (self.rank.states(rows), self.rank.rows, self.draws_at);
        let Some(whole) = &mut self.whole else { return self.rank.time(None, None) };
        let mut step = |stream: &CudaStream| {
            // SAFETY: hidden states, parameters and draws of at least `rows` rows, held by this value; one stream.
            unsafe { whole.launch(stream, &hidden, params, draws, RowFeatures::Bare) }.map_err(failed)
        };
        self.rank.time(Some(&mut step), Some(&mut self.draws))
    }

    /// Times the fused shard, with or without an exchange.
    fn shard(&mut self, rows: usize, transport: Option<GpuTransport>) -> Result<Timing, CommandError> {
        let (hidden, params, draws) = (self.rank.states(rows), self.rank.rows, self.draws_at);
        let (shard, peers) = (&mut self.shard, &mut self.peers);
        #[cfg(feature = "nccl")]
        let nccl = &mut self.nccl;
        let mut step = |stream: &CudaStream| {
            // SAFETY: hidden states, parameters and draws of at least `rows` rows, held by this value; one stream.
            // Every rank makes the same calls.
            unsafe {
                if transport == Some(GpuTransport::Peers) {
                    return shard
                        .launch_sharded(stream, &hidden, params, draws, RowFeatures::Bare, peers)
                        .map_err(failed);
                }
                shard.launch(stream, &hidden, params, draws, RowFeatures::Bare).map_err(failed)?;
                match transport {
                    None | Some(GpuTransport::Peers) => Ok(()),
                    #[cfg(feature = "nccl")]
                    Some(GpuTransport::Nccl) => match nccl {
                        Some(nccl) => nccl.launch(stream, params, draws, rows).map_err(failed),
                        None => Ok(()),
                    },
                    #[cfg(not(feature = "nccl"))]
                    Some(GpuTransport::Nccl) => Ok(()),
                }
            }
        };
        self.rank.time(Some(&mut step), Some(&mut self.draws))
    }

    /// Times cuBLAS on the shard; with the gather of logits; with a draw from all of them.
    ///
    /// The draw reads the gathered logits in place, one run of rows per rank. This saves it a copy and a merge of the
    /// ranks' draws.
    fn rival(&mut self, rows: usize, stage: usize) -> Result<Option<Timing>, CommandError> {
        let (hidden, weight, params, draws) =
            (self.rank.states(rows), self.rank.shard.weight, self.rank.rows, self.draws_at);
        let ([mine, all], world) = (self.logits, self.rank.world());
        let Some(matmul) = &self.matmul else { return Ok(None) };
        #[cfg(feature = "nccl")]
        let gather = &mut self.gather;
        #[cfg(feature = "nccl")]
        let can_gather = gather.is_some();
        #[cfg(not(feature = "nccl"))]
        let can_gather = false;
        if stage > 0 && !can_gather {
            return Ok(None);
        }
        let standalone = &mut self.standalone;
        let of_all =
            DeviceMatrix { address: all, rows: world * rows, cols: weight.rows, row_stride: weight.rows, ..weight };
        let mut step = |stream: &CudaStream| {
            // SAFETY: operands that `rank` holds; memory for the logits of `rows` rows, of this rank and of all, and
            // for a draw of each of their rows; one stream.
            unsafe {
                matmul.launch(&weight, &hidden, mine.get())?;
                #[cfg(feature = "nccl")]
                if let Some(gather) = gather.as_mut().filter(|_| stage > 0) {
                    let bytes = rows * weight.rows * weight.dtype.block_bytes();
                    gather.launch(stream, mine.get(), all.get(), bytes)?;
                }
                if stage > 1 {
                    let draws = DeviceDraws { count: world * rows, rows: params, sources: None, draws };
                    standalone.launch(stream, &of_all, &draws).map_err(failed)?;
                }
                Ok(())
            }
        };
        self.rank.time(Some(&mut step), None).map(Some)
    }

    /// Reads token and score of every row, as bytes.
    fn drawn(&self, rows: usize) -> Result<Vec<u8>, CommandError> {
        let stream = &self.rank.stream;
        let draws = stream.clone_dtoh(&self.draws.slice(..rows)).map_err(driver("copy the draws"))?;
        stream.synchronize().map_err(driver("copy the draws"))?;
        let is_drawn = self.rank.whole.is_none() || draws.iter().all(|draw| draw.status == status::DRAWN);
        if !is_drawn {
            return Err(CommandError::usage("a row of the benchmark was not drawn"));
        }
        let bytes = |draw: &Draw| [draw.token.to_le_bytes(), draw.score.to_bits().to_le_bytes()].concat();
        Ok(draws.iter().flat_map(bytes).collect())
    }
}
