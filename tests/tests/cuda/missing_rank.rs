//! A rank on a GPU that others wait for in vain.

use super::{Gpus, load_kernels, said};
use flash_sampling::distributed::{Loopback, Transport};
use flash_sampling::{CudaRank, CudaRankOptions, GpuExchange};
use flash_sampling_conformance::problem::{Problem, Size};
use flash_sampling_core::{DType, PerturbedArgmax, Plan, RowParams, Samples};
use std::slice;
use std::sync::Barrier;
use std::thread;
use std::time::{Duration, Instant};

/// Why the second rank does not come to a call.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Missing {
    /// It is gone, and so is its end of the transport.
    Left,
    /// It holds both while the others wait.
    Hangs,
}

/// Where all ranks meet, place by place. One that panics comes to those ahead as it unwinds: nobody waits for it for ever.
struct Meetings<'b>(slice::Iter<'b, Barrier>);

impl Meetings<'_> {
    fn wait(&mut self) {
        self.0.next().map(Barrier::wait);
    }
}

impl Drop for Meetings<'_> {
    fn drop(&mut self) {
        while !self.0.as_slice().is_empty() {
            self.wait();
        }
    }
}

/// Of `world` ranks the second is missed in a call, and the others have an error with this message, by the time limit.
pub(crate) fn is_named(
    exchange: GpuExchange,
    gpus: Gpus,
    missing: Missing,
    world: u32,
    message: fn(Duration) -> String,
) {
    // Those that stay begin together, and the limit is far more than a busy machine keeps one of them back: it would be
    // named too. The one that leaves is gone by then: what it frees on a GPU that it shares stands behind their waits, and keeps
    // back who launches after it.
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
                let mut meetings = Meetings(barriers.iter());
                let device = if gpus == Gpus::One { 0 } else { rank };
                let options = CudaRankOptions { exchange, device, ..CudaRankOptions::default() };
                let transport = transport.with_time_limit(limit);
                let mut sampler = CudaRank::new(shard, plan, transport, &options).unwrap();
                let rows = [3, 4].map(|seed| RowParams { seed, ..RowParams::default() });
                let mut out = Samples::new();
                sampler.sample(problem.input(), &rows, &mut out).unwrap();
                if rank == 1 {
                    let held = (gpus == Gpus::Each).then_some(sampler);
                    meetings.wait();
                    if missing == Missing::Hangs {
                        meetings.wait();
                    }
                    drop(held);
                    return;
                }
                meetings.wait();
                let begun = Instant::now();
                let outcome = sampler.sample(problem.input(), &rows, &mut out);
                let took = begun.elapsed();
                if missing == Missing::Hangs {
                    meetings.wait();
                }
                assert_eq!(said(outcome.unwrap_err()), message(limit));
                let most = if missing == Missing::Hangs { limit * 3 / 2 } else { 5 * limit };
                assert!(out.is_empty() && 2 * took >= limit && took < most, "{took:?}");
                // The group is done, and nobody waits.
                let begun = Instant::now();
                sampler.sample(problem.input(), &rows, &mut out).unwrap_err();
                assert!(out.is_empty() && begun.elapsed() < limit);
            });
        }
    });
}
