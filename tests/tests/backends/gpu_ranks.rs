//! Factories of ranks on GPUs: all ranks as one sampler, with a thread per rank and call.

use super::shard_starts;
use flash_sampling::distributed::{Loopback, TIME_LIMIT, Transport};
use flash_sampling::{CudaRank, CudaRankOptions, GpuExchange};
use flash_sampling_conformance::{BuildError, SamplerFactory};
use flash_sampling_core::reference::ReferenceVariant;
use flash_sampling_core::{
    Candidate, Capabilities, Draw, Head, Matrix, PerturbedArgmax, Plan, RowParams, SampleError, Samples, Shape, Winner,
};
use flash_sampling_cuda::{CudaError, CudaExchange, CudaTiled, Device, DeviceNccl, NcclId};
use std::sync::{Mutex, PoisonError};
use std::thread;
use std::time::Duration;

/// The environment variable of the driver's number of queues on a GPU.
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
    /// The number of equal shards; without it, four unequal shards, one of them empty.
    pub(crate) equal: Option<u32>,
}

impl SamplerFactory for GpuRanks {
    fn name(&self) -> String {
        let exchange = format!("{:?}", self.exchange).to_lowercase();
        let world = self.equal.map_or("uneven".into(), |n| n.to_string());
        match self.gpus {
            Gpus::One => format!("one-gpu/{exchange}/{world}"),
            Gpus::Each => format!("gpus/{exchange}/{world}"),
        }
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
        let met = self.met(transports.len());
        // The handshake is a collective call.
        let ranks: Result<Vec<_>, String> = thread::scope(|scope| {
            let join = |((shard, transport), met): ((Head<'w>, Loopback), Option<CudaExchange>)| {
                let options = CudaRankOptions {
                    device: self.gpus.device(transport.rank()),
                    exchange: self.exchange,
                    check_tokens: true,
                };
                let join = move || match met {
                    Some(met) => CudaRank::with_exchange(shard, plan, transport, met, &options),
                    None => CudaRank::new(shard, plan, transport, &options),
                };
                scope.spawn(move || join().map_err(|e| e.to_string()))
            };
            let threads: Vec<_> = heads.into_iter().zip(transports).zip(met).map(join).collect();
            threads.into_iter().map(|thread| thread.join().expect("a rank does not panic")).collect()
        });
        let alone = match self.exchange {
            GpuExchange::Nccl => Some(whole(head, plan).map_err(|error| BuildError(error.to_string()))?),
            _ => None,
        };
        ranks.map(|ranks| Box::new(Together { ranks, alone }) as Box<dyn PerturbedArgmax + 'w>).map_err(BuildError)
    }
}

/// Builds two ranks in threads, with shards from tokens 0 and 500, and calls `of` with each rank.
pub(crate) fn two_ranks<'w>(
    head: Head<'w>,
    plan: Plan,
    limit: Duration,
    gpus: Gpus,
    options: CudaRankOptions,
    of: impl Fn(usize, CudaRank<'w, Loopback>) + Sync,
) {
    thread::scope(|scope| {
        for (shard, transport) in head.split(&[0, 500]).into_iter().zip(Loopback::group(2)) {
            let of = &of;
            scope.spawn(move || {
                let rank = transport.rank();
                let options = CudaRankOptions { device: gpus.device(rank), ..options };
                of(rank, CudaRank::new(shard, plan, transport.with_time_limit(limit), &options).unwrap());
            });
        }
    });
}

/// Idle groups of NCCL. Laws build many samplers, and NCCL takes half a second to form a group.
static MET: Mutex<Vec<Vec<CudaExchange>>> = Mutex::new(Vec::new());

impl GpuRanks {
    /// Returns an idle group of NCCL or a new one; without NCCL, `None` for every rank.
    fn met(&self, world: usize) -> Vec<Option<CudaExchange>> {
        if self.exchange != GpuExchange::Nccl {
            return (0..world).map(|_| None).collect();
        }
        let mut idle = MET.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(at) = idle.iter().position(|group| group.len() == world) {
            return idle.swap_remove(at).into_iter().map(Some).collect();
        }
        drop(idle);
        let id = NcclId::new().expect("NCCL names a group");
        let meet = |rank| {
            let device = Device::new(self.gpus.device(rank)).expect("the GPU is there");
            DeviceNccl::new(&id, rank, world, 256, &device, TIME_LIMIT).expect("ranks meet")
        };
        thread::scope(|scope| {
            let threads: Vec<_> = (0..world).map(|rank| scope.spawn(move || meet(rank))).collect();
            threads.into_iter().map(|thread| thread.join().ok().map(CudaExchange::from)).collect()
        })
    }
}

/// Builds a sampler of the whole vocabulary on one GPU.
fn whole<'w>(head: Head<'w>, plan: Plan) -> Result<CudaTiled<'w>, CudaError> {
    CudaTiled::new(head, plan, &Device::new(0)?)
}

/// All ranks of a group as one sampler. Every rank must have the same results.
struct Together<'w> {
    ranks: Vec<CudaRank<'w, Loopback>>,
    /// A sampler on one GPU that gives the logits, if the exchange does not transfer logits.
    alone: Option<CudaTiled<'w>>,
}

impl Drop for Together<'_> {
    fn drop(&mut self) {
        // After a panic, the ranks may have made different numbers of calls.
        if self.alone.is_some() && !thread::panicking() {
            let group = std::mem::take(&mut self.ranks).into_iter().map(CudaRank::into_exchange).collect();
            MET.lock().unwrap_or_else(PoisonError::into_inner).push(group);
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

impl PerturbedArgmax for Together<'_> {
    fn capabilities(&self) -> Capabilities {
        self.ranks[0].capabilities()
    }

    fn shape(&self) -> Shape {
        self.ranks[0].shape()
    }

    fn plan(&self) -> Plan {
        self.ranks[0].plan()
    }

    fn sample(&mut self, input: Matrix<'_>, rows: &[RowParams<'_>], out: &mut Samples) -> Result<(), SampleError> {
        out.clear();
        let Some((first, others)) = self.ranks.split_first_mut() else { return Ok(()) };
        thread::scope(|scope| {
            let sample = |rank: &mut CudaRank<'_, Loopback>| {
                let mut theirs = Samples::new();
                rank.sample(input, rows, &mut theirs).map(|()| theirs)
            };
            let threads: Vec<_> = others.iter_mut().map(|rank| scope.spawn(move || sample(rank))).collect();
            let mine = first.sample(input, rows, out);
            for thread in threads {
                let theirs = thread.join().expect("a rank does not panic");
                if let (Ok(()), Ok(theirs)) = (&mine, theirs) {
                    let rows = |samples: &Samples| samples.iter().map(|row| format!("{row:?}")).collect::<Vec<_>>();
                    assert_eq!(rows(&theirs), rows(out), "ranks must agree");
                }
            }
            mine
        })?;
        let (can, plan, vocab_size) = (self.capabilities(), self.plan(), self.shape().vocab_size);
        let surveyed =
            |row: &RowParams<'_>| row.check(&[], &can, &plan, vocab_size).is_ok_and(|row| row.filters.is_some());
        if let Some(alone) = self.alone.as_mut().filter(|_| !rows.iter().any(surveyed)) {
            let mut want = Samples::new();
            alone.sample(input, rows, &mut want)?;
            with_logits_of(&want, out);
        }
        Ok(())
    }
}
