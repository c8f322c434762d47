//! A rank of several GPUs, with one shard of the vocabulary per rank.

mod failure;

use crate::build::{BuildError, shard_starts};
use core::mem::take;
use core::time::Duration;
use flash_sampling_core::backend::{Batch, Request, RowSummary};
use flash_sampling_core::sampler::reuse_vec;
use flash_sampling_core::{
    Candidate, Capabilities, Draw, Head, Knob, Knobs, Matrix, PerturbedArgmax, Plan, RowError, RowParams, SampleError,
    Samples, Scan, Shape, Winner,
};
use flash_sampling_cuda::{CudaError, CudaExchange, CudaTiled, Device, PeerEndpoint};
use flash_sampling_distributed::{CallStatus, ShardError, ShardMerge, ShardOptions, ShardSampler, Transport};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Instant;

/// The exchange of draws between GPUs.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum GpuExchange {
    /// Each GPU stores its draws to the memory of the other GPUs (NVLink or PCIe peers, paper Alg. 1). The ranks are in
    /// one process, or in several processes on one machine.
    #[default]
    Peers,
    /// One max all-reduce of NCCL, 8 bytes a row, with one GPU per rank. The logit of a draw is its score minus the
    /// noise. Needs the feature `nccl` and the library `libnccl.so`.
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
    /// Compares the results of every call on all ranks, over the transport, for debugging; see
    /// [`ShardOptions::check_tokens`].
    pub check_tokens: bool,
}

/// A rank of several GPUs, with one shard of the vocabulary. It samples from the whole vocabulary, exact pathwise.
///
/// # Exchange on the GPUs
/// A call launches the fused kernel and the exchange of draws. Every rank copies the same draws to its host. Token,
/// score and logit are those of a sampler without shards.
///
/// On Hopper, GPUs that exchange by peers also decide rows with min-p, top-k and top-p, if these rows request only
/// draws and every shard has tokens. [`CudaTiled::can_filter_sharded`] selects these rows. Shards exchange their
/// largest logits or sums of masses. Undecided rows take the exchange over the transport, and so do all rows if the
/// hidden states have another type than the weight. The first such call loads kernels. If one rank cannot load them,
/// every rank has an error.
///
/// # Exchange over the transport
/// Some calls exchange summaries of rows over the transport: all calls of a canonical plan, and calls with a row that
/// requests log-probabilities or a list without replacement, or has other filters. Every rank makes the same choice
/// from the parameters. A GPU summarizes rows with filters from stored logits. A canonical plan refuses filters.
///
/// The transport can be any [`Transport`]: [`Loopback`](flash_sampling_distributed::Loopback) for ranks in threads,
/// `Mpi` for ranks in processes. Its handshake names ranks with another plan.
///
/// # Failures
/// The time limit is the [transport's](Transport::time_limit) at construction. Each rank reports an error within this
/// limit:
/// * An exchange on the GPUs waits for half of the limit. After a timeout or a mismatch there, a rank queries the other
///   ranks over the transport. The query takes the rest of the limit, and at least an eighth, because aborting NCCL may
///   take all the rest.
/// * If ranks are called with different rows or parameters, every rank names the row and the parameter:
///   [`ShardError::Params`] or [`ShardError::Mismatch`]. One of these calls may use the transport alone.
/// * A rank that arrives after the timeout of another rank still draws. Its next exchange over the transport with that
///   rank fails with [`ShardError::Late`].
/// * A rank that fails before the exchange (a driver's error, inputs of another shape) takes no part in it. The other
///   ranks name this rank after their timeout, and the group is of no further use. The next call of the failed rank
///   receives their data for the failed call, and fails with [`CudaError::OtherCall`].
#[derive(Debug)]
pub struct CudaRank<'w, T> {
    local: Arc<Mutex<CudaTiled<'w>>>,
    exchange: CudaExchange,
    by_host: ShardSampler<'w, T>,
    check_tokens: bool,
    /// Whether all ranks have loaded the kernels for rows with filters.
    is_prepared: bool,
    /// The bytes that all ranks have allocated for lists and masks.
    room: usize,
    /// The rows that the GPUs leave undecided, with their hidden states, parameters and results.
    open: Vec<usize>,
    gathered: Vec<u8>,
    open_params: Vec<RowParams<'static>>,
    rest: Samples,
    /// The results of all rows from the GPUs.
    decided: Samples,
}

/// The divisor of the time limit for waits on the GPU.
///
/// After a mismatch, one rank may query over the transport at once while another rank still waits on its GPU. The other
/// rank then still queries within the limit.
const ON_GPUS: u32 = 2;

/// The route of a call.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum CallRoute {
    /// The GPUs exchange draws.
    Draws,
    /// The GPUs exchange draws and decide filters.
    Filters,
    /// The ranks exchange summaries over the transport.
    Host,
}

impl<'w, T: Transport + 'w> CudaRank<'w, T> {
    /// Makes this rank's sampler from its shard of the vocabulary. A collective call: every rank of the transport makes
    /// it.
    ///
    /// # Errors
    /// * [`BuildError::Cuda`]: no GPU, a plan or head that the backend refuses, a rank that cannot be reached.
    /// * [`BuildError::Shard`]: shards that do not form one vocabulary, ranks with different plans, absent ranks.
    pub fn new(shard: Head<'w>, plan: Plan, mut transport: T, options: &CudaRankOptions) -> Result<Self, BuildError> {
        let device = Device::new(options.device)?;
        let local = CudaTiled::new(shard, plan, &device)?;
        let rows = CudaTiled::max_exchange_rows(&plan);
        let exchange = CudaRank::meet(&mut transport, rows, &device, options)?;
        CudaRank::join(shard, local, transport, exchange, options)
    }

    /// Makes this rank's sampler from the whole head, with near-equal shards that begin at multiples of 64 tokens.
    ///
    /// Shards of [`CudaRank::new`] may begin at any token, with the same draws. Noise comes in groups of four tokens,
    /// so on Hopper a shard that begins at no multiple of 4 takes one more barrier per tile.
    ///
    /// # Errors
    /// As [`CudaRank::new`].
    pub fn of_head(head: Head<'w>, plan: Plan, transport: T, options: &CudaRankOptions) -> Result<Self, BuildError> {
        let starts = shard_starts(head.tokens(), transport.world());
        CudaRank::new(head.split(&starts).swap_remove(transport.rank()), plan, transport, options)
    }

    /// [`CudaRank::new`] on the GPU of an exchange whose ranks have met, this one with the same number: that of a
    /// sampler that is done, from [`CudaRank::into_exchange`]. A collective call.
    ///
    /// # Errors
    /// As [`CudaRank::new`]; [`CudaError::TooLarge`] where the plan has more rows than the exchange.
    pub fn with_exchange(
        shard: Head<'w>,
        plan: Plan,
        transport: T,
        exchange: CudaExchange,
        options: &CudaRankOptions,
    ) -> Result<Self, BuildError> {
        let (found, limit) = (CudaTiled::max_exchange_rows(&plan), exchange.max_rows());
        if found > limit {
            return Err(CudaError::TooLarge { what: "rows", found, limit }.into());
        }
        let local = CudaTiled::new(shard, plan, exchange.device())?;
        CudaRank::join(shard, local, transport, exchange, options)
    }

    /// Returns the exchange, for a sampler with another head or plan. All ranks of a group must call this after the
    /// same calls.
    pub fn into_exchange(self) -> CudaExchange {
        self.exchange
    }

    /// Connects the exchange of `options`.
    fn meet(
        transport: &mut T,
        rows: usize,
        device: &Arc<Device>,
        options: &CudaRankOptions,
    ) -> Result<CudaExchange, BuildError> {
        let (rank, world) = (transport.rank(), transport.world());
        let limit = transport.time_limit() / ON_GPUS;
        Ok(match options.exchange {
            GpuExchange::Peers => {
                let offer = PeerEndpoint::new(rank, world, rows, device)?;
                let mut cards = Vec::new();
                transport.all_gather(&offer.card(), &mut cards).map_err(ShardError::from)?;
                CudaExchange::from(offer.connect(&cards, limit)?)
            }
            GpuExchange::Nccl => by_nccl(transport, rows, device, limit)?,
        })
    }

    fn join(
        shard: Head<'w>,
        local: CudaTiled<'w>,
        mut transport: T,
        mut exchange: CudaExchange,
        options: &CudaRankOptions,
    ) -> Result<Self, BuildError> {
        let mut support = Vec::new();
        transport.all_gather(&local.encode_support(), &mut support).map_err(ShardError::from)?;
        exchange.agree(&support)?;
        let local = Arc::new(Mutex::new(local));
        let of_shards = ShardOptions {
            check_tokens: options.check_tokens,
            ..ShardOptions::new(ShardMerge::Winners).of_head(&shard)
        };
        // The handshake. No rank draws before every rank has connected.
        let by_host = ShardSampler::new(Box::new(Shared(local.clone())), transport, of_shards)?;
        Ok(CudaRank {
            local,
            exchange,
            by_host,
            check_tokens: options.check_tokens,
            is_prepared: false,
            room: CudaTiled::LIST_ROOM,
            open: Vec::new(),
            gathered: Vec::new(),
            open_params: Vec::new(),
            rest: Samples::new(),
            decided: Samples::new(),
        })
    }
}

/// Connects to the NCCL group of rank 0's id.
#[cfg(feature = "nccl")]
fn by_nccl(
    transport: &mut impl Transport,
    rows: usize,
    device: &Arc<Device>,
    limit: Duration,
) -> Result<CudaExchange, BuildError> {
    use flash_sampling_cuda::{NcclEndpoint, NcclId};
    let (rank, world) = (transport.rank(), transport.world());
    // A rank that cannot take part fails here, before the other ranks wait for it in NCCL.
    let offer = NcclEndpoint::new(rank, world, rows, device)?;
    let id = if rank == 0 { Some(NcclId::new()) } else { None }.transpose();
    // If there is no id, an empty message reports this to the waiting ranks.
    let name = id.as_ref().ok().and_then(Option::as_ref).map_or([].as_slice(), NcclId::as_bytes);
    let mut names = Vec::new();
    transport.all_gather(name, &mut names).map_err(ShardError::from)?;
    id?;
    let id = names.first().and_then(|name| NcclId::from_bytes(name));
    let id = id.ok_or_else(|| CudaError::Rank { rank: 0, what: "has no name for the group of NCCL".into() })?;
    Ok(CudaExchange::from(offer.connect(&id, limit)?))
}

#[cfg(not(feature = "nccl"))]
fn by_nccl(_: &mut impl Transport, _: usize, _: &Arc<Device>, _: Duration) -> Result<CudaExchange, BuildError> {
    Err(BuildError::NotBuilt { feature: "nccl" })
}

impl<T> CudaRank<'_, T>
where
    T: Transport,
{
    /// Whether the GPUs' exchange supports all requests of these rows. Every rank has the same result.
    fn is_carried(&self, rows: &[RowParams<'_>]) -> bool {
        let plan = self.by_host.plan();
        let can = self.by_host.capabilities();
        let can = Capabilities { knobs: can.knobs.intersection(Knobs::ADJUSTMENTS), ..can };
        let vocab_size = self.by_host.shape().vocab_size;
        let is_plain = |row: &RowParams<'_>| {
            let refused = matches!(row.check(&[], &can, &plan, vocab_size), Err(RowError::Unsupported { .. }));
            row.logprobs.is_none() && !row.without_replacement && !refused
        };
        !plan.canonical && rows.iter().all(is_plain)
    }

    /// The route of a call. Every rank has the same result.
    fn route(&self, rows: &[RowParams<'_>]) -> CallRoute {
        match self.is_carried(rows) {
            true => CallRoute::Draws,
            false if lock(&self.local).can_filter_sharded(&self.exchange, rows) => CallRoute::Filters,
            false => CallRoute::Host,
        }
    }

    /// Loads kernels and allocates memory for a call on the GPUs, if no earlier call did. All ranks do so in the same
    /// call.
    fn prepare(&mut self, input: Matrix<'_>, rows: &[RowParams<'_>], route: CallRoute) -> Result<(), SampleError> {
        let mut local = lock(&self.local);
        let (loads, needed) = (route == CallRoute::Filters && !self.is_prepared, local.list_bytes(rows));
        if !loads && needed <= self.room {
            return Ok(());
        }
        let room = self.room.max(needed.next_power_of_two());
        let loaded = if loads { local.prepare_sharded() } else { Ok(()) };
        let prepared = loaded.and_then(|()| local.reserve_lists(room));
        drop(local);
        let failure = prepared.as_ref().err().map(CudaError::to_string);
        let status = failure.as_deref().map_or(CallStatus::Ready, CallStatus::Failed);
        // No rank launches before all ranks have loaded, so no GPU waits for a rank that loads or fails to load.
        self.by_host.can_call(input, rows, status)?;
        prepared.map_err(|error| SampleError::Backend { backend: "cuda", source: error.into() })?;
        (self.is_prepared, self.room) = (self.is_prepared || loads, room);
        Ok(())
    }

    /// Draws and filters on the GPUs. The undecided rows take an exchange over the transport.
    fn sample_filtered(
        &mut self,
        input: Matrix<'_>,
        rows: &[RowParams<'_>],
        out: &mut Samples,
    ) -> Result<(), SampleError> {
        let failed = |error| SampleError::Backend { backend: "cuda", source: error };
        let CudaRank { local, exchange, open, .. } = self;
        lock(local).sample_sharded_filters(exchange, input, rows, open, out)?;
        if self.open.is_empty() {
            return Ok(());
        }
        self.gathered.clear();
        self.open.iter().for_each(|&r| self.gathered.extend_from_slice(input.row_bytes(r)));
        let mut params = reuse_vec(take(&mut self.open_params));
        params.extend(self.open.iter().map(|&r| rows[r]));
        let some = Matrix::from_bytes(&self.gathered, input.dtype(), params.len(), input.cols(), input.cols());
        let some = some.map_err(|error| failed(error.into()))?;
        let drawn = self.by_host.sample(some, &params, &mut self.rest);
        self.open_params = reuse_vec(params);
        drawn?;
        core::mem::swap(out, &mut self.decided);
        out.clear();
        let mut open = self.open.iter().zip(self.rest.iter()).peekable();
        for (r, decided) in self.decided.iter().enumerate() {
            let of_host = open.next_if(|(at, _)| **at == r).map(|(_, row)| row);
            // The pass on the GPU counts too.
            let gpu_passes = u32::from(of_host.is_some());
            match of_host.unwrap_or(decided) {
                Err(error) => out.push_error(error),
                Ok(row) => {
                    let candidate =
                        |draw: &Draw| Candidate { winner: Winner::new(draw.score, draw.token), logit: draw.logit };
                    out.push_row(row.draws.iter().map(candidate), None, &[]);
                    out.set_passes(row.passes + gpu_passes);
                }
            }
        }
        Ok(())
    }
}

/// Locks the sampler. No code panics while the sampler is in an inconsistent state, so a poisoned lock is harmless.
fn lock<'l, 'w>(local: &'l Mutex<CudaTiled<'w>>) -> MutexGuard<'l, CudaTiled<'w>> {
    local.lock().unwrap_or_else(PoisonError::into_inner)
}

impl<T: Transport> PerturbedArgmax for CudaRank<'_, T> {
    fn capabilities(&self) -> Capabilities {
        Capabilities { backend: "cuda", ..self.by_host.capabilities() }
    }

    fn shape(&self) -> Shape {
        self.by_host.shape()
    }

    fn plan(&self) -> Plan {
        self.by_host.plan()
    }

    fn sample(&mut self, input: Matrix<'_>, rows: &[RowParams<'_>], out: &mut Samples) -> Result<(), SampleError> {
        let route = self.route(rows);
        if route == CallRoute::Host {
            return self.by_host.sample(input, rows, out);
        }
        out.clear();
        self.by_host.begin_elsewhere();
        self.prepare(input, rows, route)?;
        let begun = Instant::now();
        let drawn = match route {
            CallRoute::Host => Ok(()),
            CallRoute::Draws => lock(&self.local).sample_sharded(&mut self.exchange, input, rows, out),
            CallRoute::Filters => self.sample_filtered(input, rows, out),
        };
        if drawn.is_err() {
            out.clear();
        }
        match drawn {
            Ok(()) if self.check_tokens => {
                let agreed = self.by_host.check_tokens(input, rows, out);
                if agreed.is_err() {
                    out.clear();
                }
                Ok(agreed?)
            }
            Err(error) => Err(self.explain(error, begun.elapsed(), input, rows)),
            Ok(()) => Ok(()),
        }
    }
}

/// The shard's sampler, shared by both exchanges.
struct Shared<'w>(Arc<Mutex<CudaTiled<'w>>>);

impl Shared<'_> {
    fn with<R>(&self, f: impl FnOnce(&mut CudaTiled<'_>) -> R) -> R {
        f(&mut lock(&self.0))
    }
}

impl PerturbedArgmax for Shared<'_> {
    fn capabilities(&self) -> Capabilities {
        self.with(|sampler| sampler.capabilities())
    }

    fn shape(&self) -> Shape {
        self.with(|sampler| sampler.shape())
    }

    fn plan(&self) -> Plan {
        self.with(|sampler| sampler.plan())
    }

    fn sample(&mut self, input: Matrix<'_>, rows: &[RowParams<'_>], out: &mut Samples) -> Result<(), SampleError> {
        self.with(|sampler| sampler.sample(input, rows, out))
    }

    fn scan(&mut self) -> Option<&mut dyn Scan> {
        let can = self.with(|sampler| PerturbedArgmax::scan(sampler).is_some());
        can.then_some(self as _)
    }
}

impl Scan for Shared<'_> {
    fn scan(
        &mut self,
        batch: &Batch<'_, '_>,
        requests: &[Request<'_>],
        out: &mut [RowSummary],
    ) -> Result<(), SampleError> {
        self.with(|sampler| match PerturbedArgmax::scan(sampler) {
            Some(scan) => scan.scan(batch, requests, out),
            None => Err(SampleError::Unsupported { knob: Knob::Canonical }),
        })
    }
}
