//! A rank of several GPUs, with one shard of the vocabulary per rank.

mod connect;
mod enqueue;
mod failure;
mod shared;

use crate::build::{BuildError, shard_starts};
use connect::connect;
pub use connect::{CudaRankOptions, GpuExchange};
use core::mem::take;
use enqueue::Prepared;
use flash_sampling_core::backend::{Candidate, Winner, reuse_vec};
use flash_sampling_core::{
    Capabilities, DType, Description, Draw, Head, Knobs, Matrix, PerturbedArgmax, Plan, RowError, RowParams,
    SampleError, Samples,
};
use flash_sampling_cuda::{CudaError, CudaExchange, CudaTiled, Device, DeviceHidden, DeviceMatrix, DeviceSampler};
use flash_sampling_distributed::{
    CallStatus, ShardError, ShardMerge, ShardOptions, ShardSampler, Transforms, Transport,
};
use shared::Shared;
use std::time::Instant;

/// A rank of several GPUs, with one shard of the vocabulary. It samples from the whole vocabulary, exact pathwise.
///
/// # Exchange on the GPUs
/// A call launches the fused kernel and the exchange of draws. Every rank copies the same draws to its host. Token,
/// score and logit equal those of a sampler without shards.
///
/// On Hopper, GPUs that exchange by peers also decide rows with min-p, top-k and top-p, if these rows request only
/// draws and every shard has tokens. [`CudaTiled::can_filter_sharded`] selects these rows. Shards exchange their
/// largest logits or sums of masses. Undecided rows take the exchange over the transport, and so do all rows if the
/// hidden states have another type than the weight, or are misaligned. The first such call loads kernels. If one rank
/// cannot load them, every rank has an error.
///
/// # Device memory
/// [`CudaRank::in_place`] reads the caller's weight in place, and [`CudaRank::sample_device`] the caller's hidden
/// states. Results, routes and failures are the same as with host memory. In one call, all ranks have their hidden
/// states in host memory, or all in device memory; otherwise the exchange on the GPUs fails with
/// [`CudaError::OtherCall`].
///
/// Calls of [`CudaRank::enqueue`] do not wait: also the parameters and the tokens are in device memory.
///
/// # Exchange over the transport
/// Some calls exchange summaries of rows over the transport: all calls of a canonical plan, and calls with a row that
/// requests log-probabilities or a list without replacement, or has other filters. Every rank makes the same choice
/// from the parameters. A GPU summarizes rows with filters from stored logits. A canonical plan does not support
/// filters.
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
///   ranks name this rank after their timeout, and the group is unusable. The next call of the failed rank
///   receives their data for the failed call, and fails with [`CudaError::OtherCall`].
#[derive(Debug)]
pub struct CudaRank<'w, T> {
    local: Shared<'w>,
    exchange: CudaExchange,
    by_host: ShardSampler<'w, T>,
    /// Whether all ranks have loaded the kernels for rows with filters.
    is_prepared: bool,
    /// The calls that do not wait and that all ranks have prepared.
    enqueues: Option<Prepared>,
    /// The bytes that all ranks have allocated for lists and masks.
    room: usize,
    /// The rows that the GPUs leave undecided, with the parameters and results of their exchange over the transport.
    open: Vec<usize>,
    open_params: Vec<RowParams<'static>>,
    rest: Samples,
    /// The results of all rows from the GPUs.
    decided: Samples,
    /// The input of calls whose hidden states are on the device.
    zeros: Vec<u8>,
}

/// An error of the CUDA backend, or of a matrix for it.
fn failed(error: impl std::error::Error + Send + Sync + 'static) -> SampleError {
    SampleError::Backend { backend: "cuda", source: Box::new(error) }
}

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
    /// Makes this rank's sampler from its shard of the vocabulary. A collective call of all ranks of the transport.
    ///
    /// # Errors
    /// * [`BuildError::Cuda`]: there is no GPU, the backend does not support the plan or head, or a rank is
    ///   unreachable.
    /// * [`BuildError::Shard`]: the shards do not form one vocabulary, the plans differ, or ranks are absent.
    pub fn new(shard: Head<'w>, plan: Plan, mut transport: T, options: &CudaRankOptions) -> Result<Self, BuildError> {
        let device = Device::new(options.device)?;
        let local = CudaTiled::new(shard, plan, &device)?;
        let exchange = connect(&mut transport, CudaTiled::max_exchange_rows(&plan), &device, options)?;
        CudaRank::join(local, (shard.weight().dtype(), Transforms::of(&shard)), transport, exchange)
    }

    /// Makes this rank's sampler from a shard whose weight is in the caller's device memory. A collective call.
    ///
    /// The head of the shard has the shard's tokens, and its vocabulary is the whole vocabulary. Ranks with weights in
    /// host memory may be in the same group.
    ///
    /// # Errors
    /// As [`CudaRank::new`]; [`CudaError::NotSharded`] if the options name another GPU than the shard's, or if the shard
    /// is a sampler of logits.
    pub fn in_place(shard: DeviceSampler, mut transport: T, options: &CudaRankOptions) -> Result<Self, BuildError> {
        let (head, plan, device) = (shard.head().copied(), shard.description().plan, shard.device().clone());
        let head = head.ok_or(CudaError::NotSharded { reason: "the shard is a sampler of logits" })?;
        if device.context().ordinal() != options.device {
            return Err(CudaError::NotSharded { reason: "the shard is on another GPU than that of the options" }.into());
        }
        // An allocation in a call could wait for the kernel of another rank.
        let mut shard = CudaTiled::try_from(shard)?;
        shard.reserve_lists(CudaTiled::LIST_ROOM)?;
        let exchange = connect(&mut transport, CudaTiled::max_exchange_rows(&plan), &device, options)?;
        let transforms = Transforms { bias: head.bias.is_some(), soft_cap: head.soft_cap, scale: head.scale };
        CudaRank::join(shard, (head.weight.dtype, transforms), transport, exchange)
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

    /// Makes this rank's sampler with a connected exchange of the same rank number, on the exchange's GPU.
    ///
    /// The exchange comes from an earlier sampler, by [`CudaRank::into_exchange`]. A collective call.
    ///
    /// # Errors
    /// As [`CudaRank::new`]; [`CudaError::TooLarge`] if the plan has more rows than the exchange.
    pub fn with_exchange(
        shard: Head<'w>,
        plan: Plan,
        transport: T,
        exchange: CudaExchange,
    ) -> Result<Self, BuildError> {
        let (found, limit) = (CudaTiled::max_exchange_rows(&plan), exchange.max_rows());
        if found > limit {
            return Err(CudaError::TooLarge { what: "rows", found, limit }.into());
        }
        let local = CudaTiled::new(shard, plan, exchange.device())?;
        CudaRank::join(local, (shard.weight().dtype(), Transforms::of(&shard)), transport, exchange)
    }

    /// Returns the exchange, for a sampler with another head or plan. All ranks of a group must call this after the
    /// same calls.
    pub fn into_exchange(self) -> CudaExchange {
        self.exchange
    }

    fn join(
        local: CudaTiled<'w>,
        (weight, transforms): (DType, Transforms),
        mut transport: T,
        mut exchange: CudaExchange,
    ) -> Result<Self, BuildError> {
        let mut support = Vec::new();
        transport.all_gather(&local.encode_support(), &mut support).map_err(ShardError::from)?;
        exchange.agree(&support)?;
        let local = Shared::new(local);
        let of_shards = ShardOptions { merge: ShardMerge::Winners, weight: Some(weight), transforms: Some(transforms) };
        // The handshake. No rank draws before every rank has connected.
        let by_host = ShardSampler::new(Box::new(local.clone()), transport, of_shards)?;
        Ok(CudaRank {
            local,
            exchange,
            by_host,
            is_prepared: false,
            enqueues: None,
            room: CudaTiled::LIST_ROOM,
            open: Vec::new(),
            open_params: Vec::new(),
            rest: Samples::new(),
            decided: Samples::new(),
            zeros: Vec::new(),
        })
    }
}

impl<T: Transport> CudaRank<'_, T> {
    /// Draws as [`PerturbedArgmax::sample`] does, for hidden states in device memory, and waits.
    ///
    /// # Errors
    /// As [`PerturbedArgmax::sample`]. [`SampleError::Backend`] with a [`CudaError`] also for a canonical plan, and for
    /// hidden states with an unsupported layout.
    ///
    /// The GPUs decide filters if the address and the row stride of the hidden states are multiples of 16 bytes.
    /// Otherwise, rows with filters take the exchange over the transport. If only some ranks have such hidden states, a
    /// call with filters fails on every rank, with [`CudaError::OtherCall`].
    pub fn sample_device(
        &mut self,
        hidden: &DeviceHidden,
        rows: &[RowParams<'_>],
        out: &mut Samples,
    ) -> Result<(), SampleError> {
        out.clear();
        let DeviceMatrix { rows: count, cols, dtype, .. } = hidden.matrix();
        let mut zeros = take(&mut self.zeros);
        zeros.resize(zeros.len().max(count * cols * dtype.block_bytes()), 0);
        let input = Matrix::from_bytes(&zeros, dtype, count, cols, cols).map_err(failed)?;
        let in_use = self.local.read_hidden(hidden).map_err(failed)?;
        let sampled = self.sample(input, rows, out);
        drop(in_use);
        self.zeros = zeros;
        sampled
    }

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
            false if self.local.lock().can_filter_sharded(&self.exchange, rows) => CallRoute::Filters,
            false => CallRoute::Host,
        }
    }

    /// Loads kernels and allocates memory for a call on the GPUs, if no earlier call did. All ranks do so in the same
    /// call.
    fn prepare(&mut self, input: Matrix<'_>, rows: &[RowParams<'_>], route: CallRoute) -> Result<(), SampleError> {
        let mut local = self.local.lock();
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
        prepared.map_err(failed)?;
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
        let CudaRank { local, exchange, open, .. } = self;
        local.lock().sample_sharded(exchange, input, rows, Some(open), out)?;
        if self.open.is_empty() {
            return Ok(());
        }
        let mut params = reuse_vec(take(&mut self.open_params));
        // A decided row takes no part, because it is not valid.
        params.resize(rows.len(), RowParams { temperature: f32::NAN, ..RowParams::default() });
        self.open.iter().for_each(|&r| params[r] = rows[r]);
        let drawn = self.by_host.sample(input, &params, &mut self.rest);
        self.open_params = reuse_vec(params);
        drawn?;
        core::mem::swap(out, &mut self.decided);
        out.clear();
        for (r, (decided, drawn)) in self.decided.iter().zip(self.rest.iter()).enumerate() {
            let is_open = self.open.contains(&r);
            // The pass on the GPU counts too.
            let gpu_passes = u32::from(is_open);
            match if is_open { drawn } else { decided } {
                Err(error) => out.push_error(error),
                Ok(row) => {
                    let candidate =
                        |draw: &Draw| Candidate { winner: Winner::new(draw.score, draw.token), logit: draw.logit };
                    out.push_row(row.draws.iter().map(candidate), None, &[]);
                    out.set_passes(row.passes + gpu_passes);
                }
            }
        }
        out.set_fallback_rows(self.decided.fallback_rows().max(self.rest.fallback_rows()));
        Ok(())
    }
}

impl<T: Transport> PerturbedArgmax for CudaRank<'_, T> {
    fn description(&self) -> Description {
        let of = self.by_host.description();
        Description { capabilities: Capabilities { backend: "cuda", ..of.capabilities }, ..of }
    }

    fn sample(&mut self, input: Matrix<'_>, rows: &[RowParams<'_>], out: &mut Samples) -> Result<(), SampleError> {
        let route = self.route(rows);
        if route == CallRoute::Host {
            return self.by_host.sample(input, rows, out);
        }
        out.clear();
        self.by_host.count_call();
        self.prepare(input, rows, route)?;
        let begun = Instant::now();
        let drawn = match route {
            CallRoute::Host => Ok(()),
            CallRoute::Draws => self.local.lock().sample_sharded(&mut self.exchange, input, rows, None, out),
            CallRoute::Filters => self.sample_filtered(input, rows, out),
        };
        drawn.map_err(|error| {
            out.clear();
            self.explain(error, begun.elapsed(), input, rows)
        })
    }
}
