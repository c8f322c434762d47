//! The work of a rank in each scenario. A rank prints a line that begins with `ok` on success, and panics otherwise.

use super::filtered_rows::{self, TopPRows};
use super::same_draws::are_same;
use super::{Event, LIMIT, Scenario, rows};
use flash_sampling::distributed::{Loopback, Mpi, ShardError, Transport, TransportError};
use flash_sampling::{CudaRank, CudaRankOptions, GpuExchange};
use flash_sampling_conformance::problem::{Problem, Size};
use flash_sampling_core::{DType, PerturbedArgmax, Plan, RowParams, SampleError, Samples};
use flash_sampling_cuda::{CudaError, CudaTiled, Device};
use std::process::Command;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};

/// The timeout of first calls, in which ranks compile kernels.
const COMPILE_TIMEOUT: Duration = Duration::from_secs(60);

pub(crate) fn run(scenario: &Scenario) {
    let mpi = Mpi::start().unwrap().with_time_limit(COMPILE_TIMEOUT);
    assert_eq!(mpi.world(), scenario.world);
    let device = if scenario.has_one_gpu { 0 } else { mpi.rank_on_host() };
    let options = CudaRankOptions { device, exchange: scenario.exchange };
    let said = match scenario.event {
        Event::Draws => draws(mpi, &options),
        Event::Signal(signal) => one_fails(mpi, &options, signal),
    };
    // Printed after the sampler and MPI have ended.
    println!("ok rank {said}");
}

/// A transport that counts its exchanges.
struct Counted<'m> {
    mpi: &'m mut Mpi,
    exchanges: &'m AtomicUsize,
}

impl Transport for Counted<'_> {
    fn rank(&self) -> usize {
        self.mpi.rank()
    }

    fn world(&self) -> usize {
        self.mpi.world()
    }

    fn time_limit(&self) -> Duration {
        self.mpi.time_limit()
    }

    fn set_time_limit(&mut self, limit: Duration) {
        self.mpi.set_time_limit(limit);
    }

    fn all_gather(&mut self, mine: &[u8], all: &mut Vec<Vec<u8>>) -> Result<(), TransportError> {
        self.exchanges.fetch_add(1, Ordering::Relaxed);
        self.mpi.all_gather(mine, all)
    }
}

/// The path of a call: draws or filters on GPUs without MPI, or the host with MPI.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum CallPath {
    Draws,
    Filters,
    Host,
}

/// Returns calls of each path: without filters, with filters that Hopper GPUs decide by peers, and with knobs that need
/// the host.
fn calls() -> Vec<(CallPath, Vec<RowParams<'static>>)> {
    let filters = |count, mass| (CallPath::Filters, filtered_rows::rows(count, mass, filtered_rows::histories()));
    let mut of_host = rows::rows(7);
    of_host[0].logprobs = Some(2);
    of_host[2].typical_p = 0.7;
    let base = RowParams { seed: 3, ..RowParams::default() };
    let list = vec![RowParams { draws: 3, without_replacement: true, ..base }, RowParams { top_p: 0.9, ..base }, base];
    let draws = |count| (CallPath::Draws, rows::rows(count));
    let by_host = [(CallPath::Host, of_host), (CallPath::Host, list)];
    let on_gpus =
        [draws(1), draws(24), filters(24, TopPRows::None), filters(24, TopPRows::Knobs), filters(7, TopPRows::Bare)];
    on_gpus.into_iter().chain(by_host).collect()
}

/// Compares each rank's draws with draws of its GPU from the whole head, at several positions. Then gives the last rank
/// another seed.
fn draws(mut mpi: Mpi, options: &CudaRankOptions) -> String {
    let (rank, world) = (mpi.rank(), mpi.world());
    let plan = Plan { max_rows: 24, max_draws: 3, max_logprobs: Some(3), ..Plan::default() };
    let problem = Problem::gaussian(Size::new(24, 6000, 264), DType::BF16, DType::BF16, 5);
    let device = Device::new(options.device).unwrap();
    let decides = options.exchange == GpuExchange::Peers && device.capability().0 == 9;
    let mut alone = CudaTiled::new(problem.head(), plan, &device).unwrap();
    let exchanges = AtomicUsize::new(0);
    let transport = Counted { mpi: &mut mpi, exchanges: &exchanges };
    let mut together = CudaRank::of_head(problem.head(), plan, transport, options).unwrap();
    let (mut found, mut want, mut silent) = (Samples::new(), Samples::new(), [0; 2]);
    for position in [0, 1, 77, 1 << 40] {
        for (way, mut rows) in calls() {
            rows.iter_mut().for_each(|row| row.position += position);
            let input = problem.input().row_range(0..rows.len());
            alone.sample(input, &rows, &mut want).unwrap();
            let before = exchanges.load(Ordering::Relaxed);
            together.sample(input, &rows, &mut found).unwrap();
            let met = exchanges.load(Ordering::Relaxed) - before;
            match way {
                CallPath::Draws => silent[0] += usize::from(met == 0),
                CallPath::Filters => silent[1] += usize::from(met == 0),
                CallPath::Host => assert!(met > 0, "{rows:?}"),
            }
            are_same(options.exchange, &found, &want, &format!("rank {rank} of {world}, {way:?}, position {position}"));
        }
    }
    // Of twelve calls with filters, the first three exchange over MPI to load their kernels. At most one other call
    // exchanges, for an open row.
    let of_filters = if decides { 8..=9 } else { 0..=0 };
    assert!(silent[0] == 8 && of_filters.contains(&silent[1]), "{silent:?} calls without a word");

    let row = RowParams { seed: 1, ..RowParams::default() };
    let other = RowParams { seed: 1 + u64::from(rank == world - 1), ..row };
    let input = problem.input().row_range(0..2);
    let error = together.sample(input, &[row, other], &mut found).unwrap_err();
    let SampleError::Backend { source, .. } = &error else { panic!("{error:?}") };
    let (source, names) = (source.downcast_ref(), if rank == world - 1 { 0 } else { world - 1 });
    let Some(ShardError::Params { shard, row: 1, what: "seed" }) = source else { panic!("{error:?}") };
    assert_eq!((*shard, found.len()), (names, 0));
    // The group still works.
    alone.sample(input, &[row, row], &mut want).unwrap();
    together.sample(input, &[row, row], &mut found).unwrap();
    are_same(options.exchange, &found, &want, "after another seed");
    format!("{rank}: draws as one GPU, {silent:?} calls without MPI; {error}: {}", source_of(&error))
}

fn source_of(error: &SampleError) -> String {
    core::error::Error::source(error).map(ToString::to_string).unwrap_or_default()
}

/// Kills or stops a rank by a signal, and checks that the other ranks name it within the timeout.
fn one_fails(mut mpi: Mpi, options: &CudaRankOptions, signal: &str) -> String {
    let (rank, world) = (mpi.rank(), mpi.world());
    let victim = world / 2;
    let plan = Plan { max_rows: 2, ..Plan::default() };
    let problem = Problem::integers(Size::new(2, 900, 64), DType::BF16, DType::BF16, 5);
    let rows = |position| [3, 4].map(|seed| RowParams { seed, position, ..RowParams::default() });
    let mut out = Samples::new();
    // Compiles and loads kernels before the timeouts of calls count.
    let of_one = CudaRankOptions { exchange: GpuExchange::Peers, ..*options };
    let myself = Loopback::group(1).swap_remove(0);
    let mut one = CudaRank::of_head(problem.head(), plan, myself, &of_one).unwrap();
    one.sample(problem.input(), &rows(0), &mut out).unwrap();
    drop(one);
    mpi.all_gather(&[], &mut Vec::new()).unwrap();
    mpi.set_time_limit(LIMIT);

    let mut together = CudaRank::of_head(problem.head(), plan, &mut mpi, options).unwrap();
    for position in 0..10 {
        together.sample(problem.input(), &rows(position), &mut out).unwrap();
        assert_eq!(out.len(), 2);
    }
    if rank == victim {
        let me = std::process::id();
        // A stopped process cannot end itself, so the script kills it later.
        let script = format!("kill {signal} {me}; sleep {}; kill -KILL {me}", 2 * LIMIT.as_secs());
        let mut killer = Command::new("sh").args(["-c", &script]).spawn().unwrap();
        killer.wait().unwrap();
        unreachable!("this process was killed");
    }
    let begun = Instant::now();
    let error = together.sample(problem.input(), &rows(10), &mut out).unwrap_err();
    let took = begun.elapsed();
    let SampleError::Backend { source, .. } = &error else { panic!("{error:?}") };
    let missed = match (source.downcast_ref(), source.downcast_ref()) {
        (Some(CudaError::LateRanks { ranks, limit }), _) => Some((ranks, limit)),
        (_, Some(ShardError::Transport(TransportError::TimedOut { ranks, limit }))) => Some((ranks, limit)),
        _ => None,
    };
    assert_eq!((missed, out.len()), (Some((&vec![victim], &LIMIT)), 0), "{error:?}");
    assert!(2 * took >= LIMIT && took < LIMIT * 3 / 2, "{took:?}");
    // The group has failed, so later calls do not wait.
    let begun = Instant::now();
    together.sample(problem.input(), &rows(11), &mut out).unwrap_err();
    assert!(out.is_empty() && begun.elapsed() < LIMIT / 2);
    format!("{rank}: {} ({took:.1?})", source_of(&error))
}
