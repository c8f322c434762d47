//! The options of a rank, and the connection of its GPU to the GPUs of the other ranks.

use crate::build::BuildError;
use core::time::Duration;
use flash_sampling_cuda::{CudaExchange, Device, PeerEndpoint};
use flash_sampling_distributed::{ShardError, Transport};
use std::sync::Arc;

/// The exchange of draws between GPUs.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum GpuExchange {
    /// Each GPU stores its draws to the memory of the other GPUs (NVLink or PCIe peers, paper Alg. 1). The ranks are in
    /// one process, or in several processes on one machine.
    #[default]
    Peers,
    /// One max all-reduce of NCCL, with 8 bytes per row and one GPU per rank. The logit of a draw is its score minus
    /// the noise. Needs the feature `nccl` and the library `libnccl.so`.
    Nccl,
}

/// The GPU of a rank, and its exchange with the other ranks.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct CudaRankOptions {
    /// The GPU's number, from 0.
    ///
    /// Tests may put a few ranks on one GPU. Each rank's stream then needs its own hardware queue
    /// (`CUDA_DEVICE_MAX_CONNECTIONS=32`). Otherwise a copy of one rank may delay the kernel that another rank waits
    /// for, until the time limit. Blocks of rows with filters wait for other ranks: the ranks of one GPU should have at
    /// most two such rows per multiprocessor in total.
    pub device: usize,
    /// The exchange of draws.
    pub exchange: GpuExchange,
}

/// The divisor of the time limit for waits on the GPU.
///
/// After a mismatch, one rank may query over the transport at once while another rank still waits on its GPU. The other
/// rank then still queries within the limit.
const ON_GPUS: u32 = 2;

/// Connects this rank's GPU to the GPUs of the other ranks.
pub(super) fn connect(
    transport: &mut impl Transport,
    rows: usize,
    device: &Arc<Device>,
    options: &CudaRankOptions,
) -> Result<CudaExchange, BuildError> {
    let (rank, world) = (transport.rank(), transport.world());
    let limit = transport.time_limit() / ON_GPUS;
    Ok(match options.exchange {
        GpuExchange::Peers => {
            let endpoint = PeerEndpoint::new(rank, world, rows, device)?;
            let mut descriptors = Vec::new();
            transport.all_gather(&endpoint.descriptor(), &mut descriptors).map_err(ShardError::from)?;
            CudaExchange::from(endpoint.connect(&descriptors, limit)?)
        }
        GpuExchange::Nccl => by_nccl(transport, rows, device, limit)?,
    })
}

/// Connects to the NCCL group of rank 0's id.
#[cfg(feature = "nccl")]
fn by_nccl(
    transport: &mut impl Transport,
    rows: usize,
    device: &Arc<Device>,
    limit: Duration,
) -> Result<CudaExchange, BuildError> {
    use flash_sampling_cuda::{CudaError, NcclEndpoint, NcclId};
    let (rank, world) = (transport.rank(), transport.world());
    // A rank that cannot take part fails here, before the other ranks wait for it in NCCL.
    let endpoint = NcclEndpoint::new(rank, world, rows, device)?;
    let id = if rank == 0 { Some(NcclId::new()) } else { None }.transpose();
    // If there is no id, an empty message reports this to the waiting ranks.
    let message = id.as_ref().ok().and_then(Option::as_ref).map_or([].as_slice(), NcclId::as_bytes);
    let mut messages = Vec::new();
    transport.all_gather(message, &mut messages).map_err(ShardError::from)?;
    id?;
    let id = messages.first().and_then(|bytes| NcclId::from_bytes(bytes));
    let id = id.ok_or_else(|| CudaError::Rank { rank: 0, what: "has no id for the group of NCCL".into() })?;
    Ok(CudaExchange::from(endpoint.connect(&id, limit)?))
}

#[cfg(not(feature = "nccl"))]
fn by_nccl(_: &mut impl Transport, _: usize, _: &Arc<Device>, _: Duration) -> Result<CudaExchange, BuildError> {
    Err(BuildError::NotBuilt { feature: "nccl" })
}
