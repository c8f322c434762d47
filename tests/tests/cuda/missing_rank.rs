//! Errors of ranks on GPUs when another rank does not come to a call.

use super::{Gpus, load_kernels, said};
use flash_sampling::distributed::{Loopback, Transport};
use flash_sampling::{CudaRank, CudaRankOptions, GpuExchange};
use flash_sampling_conformance::problem::{Problem, Size};
use flash_sampling_core::{DType, PerturbedArgmax, Plan, RowParams, Samples};
use std::slice;
use std::sync::Barrier;
use std::thread;
use std::time::{Duration, Instant};

/// The reason that the second rank misses a call.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Missing {
    /// The rank and its transport are dropped.
    Left,
    /// The rank keeps its sampler and transport while the other ranks wait.
    Hangs,
}

/// The barriers of a rank, in order. A rank that panics waits at its remaining barriers during unwinding, so it does
/// not block the other ranks.
struct RankBarriers<'b>(slice::Iter<'b, Barrier>);

impl RankBarriers<'_> {
    fn wait(&mut self) {
        self.0.next().map(Barrier::wait);
    }
}

impl Drop for RankBarriers<'_> {
    fn drop(&mut self) {
        while !self.0.as_slice().is_empty() {
            self.wait();
        }
    }
}

/// Checks that all other ranks report `message` within the timeout if the second of `world` ranks misses a call.
pub(crate) fn is_named(
    exchange: GpuExchange,
    gpus: Gpus,
    missing: Missing,
    world: u32,
    message: fn(Duration) -> String,
) {
    // The remaining ranks start at a barrier. The timeout far exceeds the delay of a rank on a busy machine, because a
    // delayed rank would be named too. On a shared GPU, the missing rank is dropped before this barrier. Otherwise its
    // frees would queue behind the waits of other ranks, and block later launches.
    let (limit, barriers) = (Duration::from_secs(4), [(); 2].map(|()| Barrier::new(world as usize)));
    let problem = Problem::integers(Size::new(2, 900, 64), DType::BF16, DType::BF16, 5);
    let plan = Plan { max_rows: 2, ..Plan::default() };
    if gpus == Gpus::One {
        load_kernels(&problem, plan);
    }
    thread::scope(|scope| {
        let starts: Vec<u32> = (0..world).map(|rank| 300 * rank).collect();
        let heads = problem.head().split(&starts);
        for (shard, transport) in heads.into_iter().zip(Loopback::group(world as usize)) {
            let (problem, barriers, rank) = (&problem, &barriers, transport.rank());
            scope.spawn(move || {
                let mut rank_barriers = RankBarriers(barriers.iter());
                let device = if gpus == Gpus::One { 0 } else { rank };
                let options = CudaRankOptions { device, exchange };
                let transport = transport.with_time_limit(limit);
                let mut sampler = CudaRank::new(shard, plan, transport, &options).unwrap();
                let rows = [3, 4].map(|seed| RowParams { seed, ..RowParams::default() });
                let mut out = Samples::new();
                sampler.sample(problem.input(), &rows, &mut out).unwrap();
                if rank == 1 {
                    let held = (gpus == Gpus::Each).then_some(sampler);
                    rank_barriers.wait();
                    if missing == Missing::Hangs {
                        rank_barriers.wait();
                    }
                    drop(held);
                    return;
                }
                rank_barriers.wait();
                let begun = Instant::now();
                let outcome = sampler.sample(problem.input(), &rows, &mut out);
                let took = begun.elapsed();
                if missing == Missing::Hangs {
                    rank_barriers.wait();
                }
                assert_eq!(said(outcome.unwrap_err()), message(limit));
                let most = if missing == Missing::Hangs { limit * 3 / 2 } else { 5 * limit };
                assert!(out.is_empty() && 2 * took >= limit && took < most, "{took:?}");
                // The group has failed, so later calls do not wait.
                let begun = Instant::now();
                sampler.sample(problem.input(), &rows, &mut out).unwrap_err();
                assert!(out.is_empty() && begun.elapsed() < limit);
            });
        }
    });
}
