//! Mismatched and late calls of ranks on GPUs, and room for long lists.

use super::{Gpus, load_kernels, load_kernels_of, ranks, said, two_ranks};
use flash_sampling::{CudaRankOptions, GpuExchange};
use flash_sampling_conformance::SamplerFactory;
use flash_sampling_conformance::problem::{Problem, Size};
use flash_sampling_core::{DType, History, PerturbedArgmax, Plan, RowParams, Samples};
use flash_sampling_cuda::{CudaTiled, Device};
use std::sync::Arc;
use std::thread;
use std::time::{Duration, Instant};

pub(crate) fn mismatched_calls_are_named(exchange: GpuExchange, gpus: Gpus) {
    let problem = Problem::integers(Size::new(3, 900, 64), DType::BF16, DType::BF16, 5);
    let plan = Plan { max_rows: 3, ..Plan::default() };
    let history = History::new(&[5, 9]);
    let rows = [1, 2, 3].map(|seed| RowParams { seed, ..RowParams::default() });
    let others = [
        ("seed", RowParams { seed: 7, ..rows[1] }),
        ("position", RowParams { position: 7, ..rows[1] }),
        ("draws", RowParams { first_draw: 7, ..rows[1] }),
        ("temperature", RowParams { temperature: 0.5, ..rows[1] }),
        ("penalties", RowParams { repetition_penalty: 1.5, ..rows[1] }),
        ("history", RowParams { history: Some(&history), ..rows[1] }),
        ("mask", RowParams { mask: Some(&[u32::MAX, 7]), ..rows[1] }),
        ("logit bias", RowParams { logit_bias: &[(7, 0.5)], ..rows[1] }),
        ("bans and stops", RowParams { banned: &[7], ..rows[1] }),
    ];
    let with = |other| [rows[0], other, rows[2]];
    if gpus == Gpus::One {
        others.iter().for_each(|(_, other)| load_kernels_of(&problem, plan, &with(*other)));
    }
    let limit = Duration::from_secs(2);
    let options = CudaRankOptions { exchange, ..CudaRankOptions::default() };
    two_ranks(problem.head(), plan, limit, gpus, options, |rank, mut sampler| {
        let mut out = Samples::new();
        let mut failure = |rows: &[RowParams<'_>]| {
            let error = sampler.sample(problem.input().row_range(0..rows.len()), rows, &mut out).err();
            assert_eq!(out.is_empty(), error.is_some());
            error.map(said)
        };
        for (what, other) in others {
            assert_eq!(failure(&rows), None);
            assert_eq!(failure(&with(other)), None, "{what} of both");
            let says = format!("shard {} was called with other parameters for row 1: {what}", 1 - rank);
            assert_eq!(failure(&with([rows[1], other][rank])), Some(says));
        }
        let says = format!("shard {} has row count {}, but shard {rank} has {}", 1 - rank, 3 - rank, 2 + rank);
        assert_eq!(failure(&rows[..2 + rank]), Some(says));
    });
}

/// The call of rank 1 uses the transport alone. The GPU of rank 0 then misses rank 1, so each group makes one such
/// call.
pub(crate) fn mismatched_host_calls_are_named(exchange: GpuExchange, gpus: Gpus) {
    let problem = Problem::integers(Size::new(3, 900, 64), DType::BF16, DType::BF16, 5);
    let plan = Plan { max_rows: 3, max_draws: 2, max_logprobs: Some(2), canonical: false };
    let rows = [1, 2, 3].map(|seed| RowParams { seed, ..RowParams::default() });
    if gpus == Gpus::One {
        load_kernels(&problem, plan);
    }
    let others = [
        ("log-probabilities and kept tokens", RowParams { logprobs: Some(1), ..rows[1] }),
        ("filters", RowParams { typical_p: 0.5, ..rows[1] }),
        ("draws", RowParams { draws: 2, without_replacement: true, ..rows[1] }),
    ];
    for (what, other) in others {
        let limit = Duration::from_secs(2);
        let options = CudaRankOptions { exchange, ..CudaRankOptions::default() };
        two_ranks(problem.head(), plan, limit, gpus, options, |rank, mut sampler| {
            let mut out = Samples::new();
            sampler.sample(problem.input(), &rows, &mut out).unwrap();
            let (begun, mine) = (Instant::now(), [rows[0], [rows[1], other][rank], rows[2]]);
            let error = sampler.sample(problem.input(), &mine, &mut out).unwrap_err();
            let says = format!("shard {} was called with other parameters for row 1: {what}", 1 - rank);
            assert_eq!(said(error), says);
            assert!(out.is_empty() && begun.elapsed() < limit, "{:?}", begun.elapsed());
        });
    }
}

/// Rank 1 arrives after the timeout of rank 0's GPU, and still draws. Its next exchange over the transport with rank 0
/// reports that rank 1 is late, and reports no mismatch. That exchange is the next call over the transport, at another
/// position.
pub(crate) fn late_ranks_are_named() {
    let problem = Problem::integers(Size::new(1, 900, 64), DType::BF16, DType::BF16, 5);
    let plan = Plan { max_logprobs: Some(2), ..Plan::default() };
    let row = RowParams { seed: 3, position: 7, ..RowParams::default() };
    let next = RowParams { position: 8, logprobs: Some(1), ..row };
    let limit = Duration::from_secs(2);
    for row in [row, next] {
        load_kernels_of(&problem, plan, &[row]);
    }
    two_ranks(problem.head(), plan, limit, Gpus::One, CudaRankOptions::default(), |rank, mut sampler| {
        let mut out = Samples::new();
        sampler.sample(problem.input(), &[row], &mut out).unwrap();
        if rank == 1 {
            thread::sleep(limit * 3 / 4);
        }
        let (begun, mut sampled) = (Instant::now(), sampler.sample(problem.input(), &[row], &mut out));
        if rank == 1 {
            sampled.unwrap();
            sampled = sampler.sample(problem.input(), &[next], &mut out);
        }
        let (says, took) = (said(sampled.unwrap_err()), begun.elapsed());
        if rank == 0 {
            assert_eq!(says, format!("rank 1 did not come to the exchange within {:?}", limit / 2));
        } else {
            assert_eq!(says, format!("shard 1 came too late: shard 0 had waited {:?}", limit / 2));
        }
        assert!(out.is_empty() && took < limit, "{took:?}");
    });
}

/// Uses penalties and masks that need more than the initial workspace of every rank, mostly on the first rank's tokens.
pub(crate) fn room_for_long_lists_is_allocated(world: u32) {
    let count = 12;
    let problem = Problem::gaussian(Size::new(count, 20_003, 64), DType::BF16, DType::BF16, 5);
    let plan = Plan { max_rows: count, ..Plan::default() };
    let (long, longer) = (History::new(&(0..3000).collect::<Vec<_>>()), History::new(&(0..9000).collect::<Vec<_>>()));
    let mask: Vec<u32> = (0..626).map(|word| u32::MAX << (word % 31)).collect();
    let bytes = |history: &History| 16 * count * history.occurrences().len();
    assert!(CudaTiled::LIST_ROOM < bytes(&long) && 2 * bytes(&long) < bytes(&longer));
    let mut alone = CudaTiled::new(problem.head(), plan, &Device::new(0).unwrap()).unwrap();
    let calls: Vec<Vec<_>> = [&long, &longer, &long]
        .into_iter()
        .enumerate()
        .map(|(call, history)| {
            let row = RowParams {
                repetition_penalty: 1.3,
                history: Some(history),
                mask: Some(&mask),
                ..RowParams::default()
            };
            (0..count as u64).map(|seed| RowParams { seed, top_k: if call == 2 { 20 } else { 0 }, ..row }).collect()
        })
        .collect();
    load_kernels_of(&problem, plan, &calls[0]);
    load_kernels_of(&problem, plan, &calls[2]);
    let mut sharded = ranks(GpuExchange::Peers, Gpus::One, Some(world)).build(problem.head(), plan).unwrap();
    for rows in &calls {
        let (mut want, mut found) = (Samples::new(), Samples::new());
        alone.sample(problem.input(), rows, &mut want).unwrap();
        let begun = Instant::now();
        sharded.sample(problem.input(), rows, &mut found).unwrap();
        // No rank waited for an allocation that blocks behind a waiting rank.
        assert!(begun.elapsed() < Duration::from_secs(5), "{:?}", begun.elapsed());
        for (found, want) in found.iter().zip(want.iter()) {
            assert_eq!(found.unwrap().draws, want.unwrap().draws);
        }
    }
}

/// The transport names the ranks in the first call with filters, the exchange in later calls. The group continues.
pub(crate) fn other_types_are_named_with_filters(devices: &[Arc<Device>; 2]) {
    let types = [DType::BF16, DType::F32];
    let problems = types.map(|dtype| Problem::integers(Size::new(2, 904, 64), DType::BF16, dtype, 5));
    let plan = Plan { max_rows: 2, ..Plan::default() };
    let rows = [3, 4].map(|seed| RowParams { seed, top_k: 20, ..RowParams::default() });
    let expected = problems.each_ref().map(|problem| {
        let mut out = Samples::new();
        CudaTiled::new(problem.head(), plan, &devices[0]).unwrap().sample(problem.input(), &rows, &mut out).unwrap();
        tokens(&out)
    });
    let limit = Duration::from_secs(10);
    let gpus = if Arc::ptr_eq(&devices[0], &devices[1]) { Gpus::One } else { Gpus::Each };
    two_ranks(problems[0].head(), plan, limit, gpus, CudaRankOptions::default(), |rank, mut sampler| {
        let mut out = Samples::new();
        for same in [0, 0, 1, 0] {
            sampler.sample(problems[rank].input(), &rows, &mut out).unwrap_err();
            assert!(out.is_empty());
            sampler.sample(problems[same].input(), &rows, &mut out).unwrap();
            assert_eq!(tokens(&out), expected[same], "rank {rank}");
        }
    });
}

fn tokens(out: &Samples) -> Vec<u32> {
    out.iter().map(|row| row.unwrap().token()).collect()
}
