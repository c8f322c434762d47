//! Factories of ranks on GPUs: all ranks as one sampler, with a thread per rank and call.

use super::gpu_memory::{Copied, CopiedHidden, HeldHead};
use super::shard_starts;
use flash_sampling::distributed::{Loopback, TIME_LIMIT, Transport};
use flash_sampling::{CudaRank, CudaRankOptions, GpuExchange};
use flash_sampling_conformance::{BuildError, SamplerFactory};
use flash_sampling_core::backend::{Candidate, Winner};
use flash_sampling_core::reference::ReferenceVariant;
use flash_sampling_core::{Description, Draw, Head, Matrix, PerturbedArgmax, Plan, RowParams, SampleError, Samples};
use flash_sampling_cuda::cudarc::driver::CudaStream;
use flash_sampling_cuda::{CudaError, CudaExchange, CudaTiled, Device, NcclEndpoint, NcclId};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread;

/// The environment variable that sets the driver's number of queues on a GPU.
const QUEUES: &str = "CUDA_DEVICE_MAX_CONNECTIONS";

/// The GPUs of the ranks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Gpus {
    /// All ranks on the first GPU.
    One,
    /// One GPU per rank.
    Each,
}

impl Gpus {
    pub(crate) fn device(self, rank: usize) -> usize {
        if self == Gpus::One { 0 } else { rank }
    }
}

/// Shards on GPUs that exchange draws.
#[derive(Clone, Copy, Debug)]
pub(crate) struct GpuRanks {
    pub(crate) exchange: GpuExchange,
    pub(crate) gpus: Gpus,
    /// The number of equal shards; `None`: four unequal shards, one of them empty.
    pub(crate) equal: Option<u32>,
    /// Whether weight and hidden states are in device memory of the caller.
    pub(crate) in_place: bool,
}

impl SamplerFactory for GpuRanks {
    fn name(&self) -> String {
        let exchange = format!("{:?}", self.exchange).to_lowercase();
        let world = self.equal.map_or("uneven".into(), |n| n.to_string());
        let gpus = if self.gpus == Gpus::One { "one-gpu" } else { "gpus" };
        let memory = if self.in_place { "/in-place" } else { "" };
        format!("{gpus}/{exchange}/{world}{memory}")
    }

    fn unavailable(&self) -> Option<String> {
        let world = self.equal.unwrap_or(4) as usize;
        // Streams in one queue of the GPU wait for each other, and a rank would block the rank that it waits for.
        if self.gpus == Gpus::One && world > 1 && std::env::var(QUEUES).as_deref() != Ok("32") {
            return Some(format!("ranks that share a GPU need a queue each: set {QUEUES}=32"));
        }
        let last = self.gpus.device(world - 1);
        Device::new(last).err().map(|error: CudaError| error.to_string())
    }

    fn reference_variant(&self, _: &Head<'_>) -> Option<ReferenceVariant> {
        Some(ReferenceVariant::Tiled)
    }

    fn pace(&self) -> usize {
        4
    }

    // The ranks' shards must cover the whole vocabulary.
    fn takes_shards(&self) -> bool {
        false
    }

    fn build<'w>(&self, head: Head<'w>, plan: Plan) -> Result<Box<dyn PerturbedArgmax + 'w>, BuildError> {
        let heads = head.split(&shard_starts(&head, self.equal));
        let transports = Loopback::group(heads.len());
        let exchanges = self.idle_exchanges(transports.len());
        // The handshake is a collective call.
        let ranks: Result<Vec<_>, String> = thread::scope(|scope| {
            let join = |((shard, transport), exchange): ((Head<'w>, Loopback), Option<CudaExchange>)| {
                let options = CudaRankOptions { device: self.gpus.device(transport.rank()), exchange: self.exchange };
                let join = move || match exchange {
                    _ if self.in_place => in_place(shard, plan, transport, &options),
                    Some(exchange) => Ok(CudaRank::with_exchange(shard, plan, transport, exchange)?.into()),
                    None => Ok(CudaRank::new(shard, plan, transport, &options)?.into()),
                };
                scope.spawn(move || join().map_err(|e| e.to_string()))
            };
            let threads: Vec<_> = heads.into_iter().zip(transports).zip(exchanges).map(join).collect();
            threads.into_iter().map(|thread| thread.join().expect("a rank does not panic")).collect()
        });
        let alone = match self.exchange {
            GpuExchange::Nccl => Some(whole(head, plan).map_err(|error| BuildError(error.to_string()))?),
            _ => None,
        };
        ranks.map(|ranks| Box::new(RankGroup { ranks, alone }) as Box<dyn PerturbedArgmax + 'w>).map_err(BuildError)
    }
}

/// A rank. If its weight and hidden states are in device memory, also its stream and the weight.
pub(crate) struct Rank<'w> {
    pub(crate) sampler: CudaRank<'w, Loopback>,
    pub(crate) on_device: Option<(Arc<CudaStream>, HeldHead)>,
}

impl<'w> From<CudaRank<'w, Loopback>> for Rank<'w> {
    fn from(sampler: CudaRank<'w, Loopback>) -> Self {
        Rank { sampler, on_device: None }
    }
}

/// A rank that reads a copy of its shard in place.
pub(crate) fn in_place<'w>(
    shard: Head<'_>,
    plan: Plan,
    transport: Loopback,
    options: &CudaRankOptions,
) -> Result<Rank<'w>, flash_sampling::BuildError> {
    let device = Device::new(options.device)?;
    let stream = device.context().new_stream().expect("the GPU has streams");
    let Copied { sampler, stream, held } = Copied::on(&device, stream, shard, plan)?;
    Ok(Rank { sampler: CudaRank::in_place(sampler, transport, options)?, on_device: Some((stream, held)) })
}

impl Rank<'_> {
    /// Copies hidden states to the memory of a rank that reads them there.
    fn copy(&self, input: Matrix<'_>) -> Option<CopiedHidden> {
        self.on_device.as_ref().map(|(stream, _)| CopiedHidden::new(input, stream))
    }

    fn sample(
        &mut self,
        input: Matrix<'_>,
        copied: &Option<CopiedHidden>,
        rows: &[RowParams<'_>],
        out: &mut Samples,
    ) -> Result<(), SampleError> {
        match copied {
            Some(copied) => self.sampler.sample_device(&copied.hidden, rows, out),
            None => self.sampler.sample(input, rows, out),
        }
    }
}

/// Idle groups of NCCL. Laws build many samplers, and NCCL takes half a second to form a group.
static IDLE_GROUPS: Mutex<Vec<Vec<CudaExchange>>> = Mutex::new(Vec::new());

impl GpuRanks {
    /// Returns an idle group of NCCL or a new one; without NCCL, `None` for every rank.
    fn idle_exchanges(&self, world: usize) -> Vec<Option<CudaExchange>> {
        if self.exchange != GpuExchange::Nccl || self.in_place {
            return (0..world).map(|_| None).collect();
        }
        let mut idle = IDLE_GROUPS.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(at) = idle.iter().position(|group| group.len() == world) {
            return idle.swap_remove(at).into_iter().map(Some).collect();
        }
        drop(idle);
        let id = NcclId::new().expect("NCCL names a group");
        let connect = |rank| {
            let device = Device::new(self.gpus.device(rank)).expect("the GPU is there");
            NcclEndpoint::new(rank, world, 256, &device)
                .and_then(|rank| rank.connect(&id, TIME_LIMIT))
                .expect("ranks connect")
        };
        thread::scope(|scope| {
            let threads: Vec<_> = (0..world).map(|rank| scope.spawn(move || connect(rank))).collect();
            threads.into_iter().map(|thread| thread.join().ok().map(CudaExchange::from)).collect()
        })
    }
}

/// Builds a sampler of the whole vocabulary on one GPU.
fn whole<'w>(head: Head<'w>, plan: Plan) -> Result<CudaTiled<'w>, CudaError> {
    CudaTiled::new(head, plan, &Device::new(0)?)
}

/// All ranks of a group as one sampler. Every rank must have the same results.
struct RankGroup<'w> {
    ranks: Vec<Rank<'w>>,
    /// A sampler on one GPU that gives the logits, if the exchange does not transfer logits.
    alone: Option<CudaTiled<'w>>,
}

impl Drop for RankGroup<'_> {
    fn drop(&mut self) {
        // After a panic, the ranks may have made different numbers of calls.
        let is_in_place = self.ranks.iter().any(|rank| rank.on_device.is_some());
        if self.alone.is_some() && !is_in_place && !thread::panicking() {
            let ranks = std::mem::take(&mut self.ranks).into_iter();
            let group = ranks.map(|rank| rank.sampler.into_exchange()).collect();
            IDLE_GROUPS.lock().unwrap_or_else(PoisonError::into_inner).push(group);
        }
    }
}

/// Replaces the logits of `found` by the logits of `want`, because laws compare bits.
///
/// Tokens and scores must be equal to the last bit, and logits equal within the rounding of a subtraction. Otherwise
/// `found` stays unchanged, so the law fails.
fn with_logits_of(want: &Samples, found: &mut Samples) {
    let mut filled = Samples::new();
    for (want, row) in want.iter().zip(found.iter()) {
        let (want, row) = match (want, row) {
            (_, Err(error)) => {
                filled.push_error(error);
                continue;
            }
            (Err(_), Ok(_)) => return,
            (Ok(want), Ok(row)) => (want, row),
        };
        // Rows through the host have their logits.
        if row.log_z.is_some() || row.draws.len() != want.draws.len() {
            return;
        }
        for (mine, want) in row.draws.iter().zip(want.draws) {
            let rounding = 1e-6 * (want.score.abs() + want.logit.abs() + 1.0);
            let is_same = mine.token == want.token && mine.score.to_bits() == want.score.to_bits();
            if !is_same || (mine.logit - want.logit).abs() > rounding {
                return;
            }
        }
        let candidate =
            |draw: &Draw| Candidate { winner: Winner { score: draw.score, token: draw.token }, logit: draw.logit };
        filled.push_row(want.draws.iter().map(candidate), None, &[]);
    }
    if filled.len() == found.len() {
        *found = filled;
    }
}

impl PerturbedArgmax for RankGroup<'_> {
    fn description(&self) -> Description {
        self.ranks[0].sampler.description()
    }

    fn sample(&mut self, input: Matrix<'_>, rows: &[RowParams<'_>], out: &mut Samples) -> Result<(), SampleError> {
        out.clear();
        // All copies end before any rank launches, because a copy could queue behind a rank that waits on the same GPU.
        let copied: Vec<_> = self.ranks.iter().map(|rank| rank.copy(input)).collect();
        let Some((first, others)) = self.ranks.split_first_mut() else { return Ok(()) };
        thread::scope(|scope| {
            let sample = |(rank, copied): (&mut Rank<'_>, &Option<CopiedHidden>)| {
                let mut theirs = Samples::new();
                rank.sample(input, copied, rows, &mut theirs).map(|()| theirs)
            };
            let others = others.iter_mut().zip(&copied[1..]);
            let threads: Vec<_> = others.map(|rank| scope.spawn(move || sample(rank))).collect();
            let mine = first.sample(input, &copied[0], rows, out);
            for thread in threads {
                let theirs = thread.join().expect("a rank does not panic");
                if mine.is_ok() {
                    let rows = |samples: &Samples| samples.iter().map(|row| format!("{row:?}")).collect::<Vec<_>>();
                    assert_eq!(rows(&theirs?), rows(out), "ranks must agree");
                }
            }
            mine
        })?;
        let (can, plan, vocab_size) = (self.capabilities(), self.plan(), self.shape().vocab_size);
        let has_filters =
            |row: &RowParams<'_>| row.check(&[], &can, &plan, vocab_size).is_ok_and(|row| row.filters.is_some());
        if let Some(alone) = self.alone.as_mut().filter(|_| !rows.iter().any(has_filters)) {
            let mut want = Samples::new();
            alone.sample(input, rows, &mut want)?;
            with_logits_of(&want, out);
        }
        Ok(())
    }
}
