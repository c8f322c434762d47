//! One of several GPUs with a shard of the vocabulary each.

mod asking;

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

/// How draws cross between GPUs.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum GpuExchange {
    /// Each GPU stores to the memory of the others (NVLink or PCIe peers, paper Alg. 1), in one process, or in several on
    /// one machine.
    #[default]
    Peers,
    /// One max all-reduce of NCCL, 8 bytes a row; a GPU for each rank. Logits are given as score minus noise. Needs the
    /// feature `nccl` and the library `libnccl.so`.
    Nccl,
}

/// Which GPU a rank is on, and how it meets the others.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct CudaRankOptions {
    /// The GPU's number, 0 the first. For tests a GPU may have a few ranks; their streams then need a queue each
    /// (`CUDA_DEVICE_MAX_CONNECTIONS=32`), or a copy of one rank may keep back the kernel that another waits for, until
    /// the time limit. Blocks of rows with filters wait for other ranks: all ranks of a GPU together should have no more such
    /// rows than two a multiprocessor.
    pub device: usize,
    /// How draws cross.
    pub exchange: GpuExchange,
    /// For debugging: the results of every call are compared on all ranks, over the transport, as
    /// [`ShardOptions::check_tokens`] says.
    pub check_tokens: bool,
}

/// One rank of several GPUs, with one shard of the vocabulary: a sampler over the whole, exact pathwise.
///
/// The draws of all ranks meet on the GPUs: a call launches the fused kernel and the exchange behind it, and copies the
/// same draws down on every rank, which have token, score and logit of a sampler without shards. Rows with min-p, top-k and
/// top-p that ask for draws alone are decided on the GPUs too, on Hopper by peers, where every shard has tokens: the largest
/// logits of every shard, or sums of masses, cross as draws do ([`CudaTiled::can_filter_sharded`] says which rows; the few that
/// stay open go the other way, and so do all where the hidden states have another type than the weight). The first such call
/// loads what it needs, and ends with an error on every rank where one cannot.
///
/// Calls with a row that asks for log-probabilities or for a list without replacement, or that has other filters, and all
/// calls of a canonical plan, exchange summaries and surveys over the transport instead, which every rank finds from the rows
/// alike. A GPU surveys the filters' rows itself, from logits that it stores; a canonical plan refuses them.
///
/// The transport is any that the ranks have: [`Loopback`](flash_sampling_distributed::Loopback) where each is a thread,
/// `Mpi` where each is a process. It carries the handshake, so that ranks that were planned otherwise are named.
///
/// There is one time limit, the [transport's](Transport::time_limit) when ranks meet: a rank learns within it what went wrong.
/// Half of it an exchange waits on the GPUs; a rank that nobody met there, or that met another call, asks over the transport
/// for as long as is left, and for an eighth at least, as giving NCCL up may take all the rest. Where ranks are called with
/// different rows or parameters, all of them ask, also where one of them goes by the transport alone, and each learns of which
/// row and what: [`ShardError::Params`] or [`ShardError::Mismatch`]. A rank that comes when another has given
/// the call up still draws, alone; where its next exchange over the transport meets the one that waited it learns so:
/// [`ShardError::Late`].
///
/// A rank that fails before the exchange (a driver's error, inputs of another shape) takes no part in it; the others name
/// it when their time is over, and the group is done. If it then calls again, it finds what they sent for the call before,
/// and has [`CudaError::OtherCall`].
#[derive(Debug)]
pub struct CudaRank<'w, T> {
    local: Arc<Mutex<CudaTiled<'w>>>,
    exchange: CudaExchange,
    by_host: ShardSampler<'w, T>,
    check_tokens: bool,
    /// Whether all ranks have loaded what rows with filters need.
    is_prepared: bool,
    /// Bytes of lists and masks for which all ranks have made room.
    room: usize,
    /// Rows that the GPUs left open, their hidden states and what became of them; and the other rows of the call.
    open: Vec<usize>,
    gathered: Vec<u8>,
    asked: Vec<RowParams<'static>>,
    rest: Samples,
    decided: Samples,
}

/// The part of the time limit that a rank waits on its GPU. Of ranks that are called otherwise one may find so at once, and ask
/// over the transport, while another waits on its GPU before it asks: it still comes in time.
const ON_GPUS: u32 = 2;

/// How a call is made.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Way {
    /// The GPUs exchange draws.
    Draws,
    /// And decide filters.
    Filters,
    /// Over the transport.
    Host,
}

impl<'w, T: Transport + 'w> CudaRank<'w, T> {
    /// This rank's sampler, from its shard of the vocabulary. A collective call: every rank of the transport makes it.
    ///
    /// # Errors
    /// [`BuildError::Cuda`]: no GPU, what the backend refuses, a rank that cannot be reached; [`BuildError::Shard`]: ranks
    /// that do not make up one vocabulary, or differ in their plans, or do not come.
    pub fn new(shard: Head<'w>, plan: Plan, mut transport: T, options: &CudaRankOptions) -> Result<Self, BuildError> {
        let device = Device::new(options.device)?;
        let local = CudaTiled::new(shard, plan, &device)?;
        let rows = CudaTiled::max_exchange_rows(&plan);
        let exchange = CudaRank::meet(&mut transport, rows, &device, options)?;
        CudaRank::join(shard, local, transport, exchange, options)
    }

    /// [`CudaRank::new`] from the whole head, which is cut into near-equal shards at multiples of 64 tokens, one for each rank
    /// of the transport. Shards may begin elsewhere, with the same draws; on Hopper one that begins at no multiple of 4 waits
    /// at one more barrier a tile, as noise comes in fours.
    ///
    /// # Errors
    /// As [`CudaRank::new`].
    pub fn of_head(head: Head<'w>, plan: Plan, transport: T, options: &CudaRankOptions) -> Result<Self, BuildError> {
        let starts = shard_starts(head.tokens(), transport.world());
        CudaRank::new(head.split(&starts).swap_remove(transport.rank()), plan, transport, options)
    }

    /// [`CudaRank::new`] on the GPU of an exchange whose ranks have met, this one with the same number: that of a sampler
    /// that is done, from [`CudaRank::into_exchange`]. A collective call.
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

    /// The exchange, for a sampler of another head or plan. Ranks of a group end together, after the same calls.
    pub fn into_exchange(self) -> CudaExchange {
        self.exchange
    }

    /// The exchange that the options ask for.
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
        let mut told = Vec::new();
        transport.all_gather(&local.encode_support(), &mut told).map_err(ShardError::from)?;
        exchange.agree(&told)?;
        let local = Arc::new(Mutex::new(local));
        let of_shards = ShardOptions {
            check_tokens: options.check_tokens,
            ..ShardOptions::new(ShardMerge::Winners).of_head(&shard)
        };
        // The handshake; nobody draws before every rank has connected.
        let by_host = ShardSampler::new(Box::new(Shared(local.clone())), transport, of_shards)?;
        Ok(CudaRank {
            local,
            exchange,
            by_host,
            check_tokens: options.check_tokens,
            is_prepared: false,
            room: CudaTiled::ROOM_TOGETHER,
            open: Vec::new(),
            gathered: Vec::new(),
            asked: Vec::new(),
            rest: Samples::new(),
            decided: Samples::new(),
        })
    }
}

/// The group that rank 0 names.
#[cfg(feature = "nccl")]
fn by_nccl(
    transport: &mut impl Transport,
    rows: usize,
    device: &Arc<Device>,
    limit: Duration,
) -> Result<CudaExchange, BuildError> {
    use flash_sampling_cuda::{NcclEndpoint, NcclId};
    let (rank, world) = (transport.rank(), transport.world());
    // A rank that cannot take part leaves before the others wait for it in the library.
    let offer = NcclEndpoint::new(rank, world, rows, device)?;
    let id = if rank == 0 { Some(NcclId::new()) } else { None }.transpose();
    // The ranks that wait for the name learn, too, that there is none.
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
    /// Whether the GPUs' exchange carries all that these rows ask for. Every rank finds the same.
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

    /// How a call is made. Every rank finds the same.
    fn way(&self, rows: &[RowParams<'_>]) -> Way {
        match self.is_carried(rows) {
            true => Way::Draws,
            false if lock(&self.local).can_filter_sharded(&self.exchange, rows) => Way::Filters,
            false => Way::Host,
        }
    }

    /// Loads and allocates what a call on the GPUs takes, where none before it did. Every rank does so in the same call.
    fn prepare(&mut self, input: Matrix<'_>, rows: &[RowParams<'_>], way: Way) -> Result<(), SampleError> {
        let mut local = lock(&self.local);
        let (loads, needed) = (way == Way::Filters && !self.is_prepared, local.lists_together(rows));
        if !loads && needed <= self.room {
            return Ok(());
        }
        let room = self.room.max(needed.next_power_of_two());
        let loaded = if loads { local.prepare_sharded() } else { Ok(()) };
        let prepared = loaded.and_then(|()| local.reserve_together(room));
        drop(local);
        let failure = prepared.as_ref().err().map(CudaError::to_string);
        let standing = failure.as_deref().map_or(CallStatus::Ready, CallStatus::Failed);
        // Nobody waits on a GPU for a rank that loads, nor for one that cannot.
        self.by_host.can_call(input, rows, standing)?;
        prepared.map_err(|error| SampleError::Backend { backend: "cuda", source: error.into() })?;
        (self.is_prepared, self.room) = (self.is_prepared || loads, room);
        Ok(())
    }

    /// Has the GPUs draw and decide, and the hosts what they leave open.
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
        let mut asked = reuse_vec(take(&mut self.asked));
        asked.extend(self.open.iter().map(|&r| rows[r]));
        let some = Matrix::from_bytes(&self.gathered, input.dtype(), asked.len(), input.cols(), input.cols());
        let some = some.map_err(|error| failed(error.into()))?;
        let drawn = self.by_host.sample(some, &asked, &mut self.rest);
        self.asked = reuse_vec(asked);
        drawn?;
        core::mem::swap(out, &mut self.decided);
        out.clear();
        let mut open = self.open.iter().zip(self.rest.iter()).peekable();
        for (r, decided) in self.decided.iter().enumerate() {
            let of_host = open.next_if(|(at, _)| **at == r).map(|(_, row)| row);
            // The GPUs' try counts.
            let tries = u32::from(of_host.is_some());
            match of_host.unwrap_or(decided) {
                Err(error) => out.push_error(error),
                Ok(row) => {
                    let candidate =
                        |draw: &Draw| Candidate { winner: Winner::new(draw.score, draw.token), logit: draw.logit };
                    out.push_row(row.draws.iter().map(candidate), None, &[]);
                    out.set_passes(row.passes + tries);
                }
            }
        }
        Ok(())
    }
}

/// No code panics while it holds the sampler half-way.
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
        let way = self.way(rows);
        if way == Way::Host {
            return self.by_host.sample(input, rows, out);
        }
        out.clear();
        self.by_host.begin_elsewhere();
        self.prepare(input, rows, way)?;
        let begun = Instant::now();
        let drawn = match way {
            Way::Host => Ok(()),
            Way::Draws => lock(&self.local).sample_sharded(&mut self.exchange, input, rows, out),
            Way::Filters => self.sample_filtered(input, rows, out),
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
            Err(error) => Err(self.ask(error, begun.elapsed(), input, rows)),
            Ok(()) => Ok(()),
        }
    }
}

/// The shard's sampler, which both ways use by turns.
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
