//! The scenarios, as each rank runs them. A rank prints a line that begins with `ok`, or panics.

#[path = "../../shards/common.rs"]
#[allow(dead_code)]
mod common;
mod faults;

use crate::LIMIT;
use common::*;
use faults::{NextAction, Signal, SignalTime};
use flash_sampling_core::reference::ReferenceVariant;
use flash_sampling_core::{DType, LogprobsMode, Matrix, PerturbedArgmax, RowParams, SampleError, Samples};
use flash_sampling_distributed::{Mpi, ShardError, ShardMerge, ShardOptions, ShardSampler, Sharded, Transport};
use std::time::{Duration, Instant};

pub(crate) fn run(scenario: &str) {
    let mpi = Mpi::start().unwrap();
    match scenario {
        "agree" => agree(mpi),
        "differ" => differ(mpi),
        "killed-before-handshake" => faults::handshake(mpi, Signal::Kill, SignalTime::BeforeCall),
        "killed-in-handshake" => faults::handshake(mpi, Signal::Kill, SignalTime::InCall),
        "stopped-before-handshake" => faults::handshake(mpi, Signal::Stop, SignalTime::BeforeCall),
        "stopped-in-handshake" => faults::handshake(mpi, Signal::Stop, SignalTime::InCall),
        "killed-near-timeout" => faults::handshake(mpi, Signal::Kill, SignalTime::NearTimeout),
        "stopped-near-timeout" => faults::handshake(mpi, Signal::Stop, SignalTime::NearTimeout),
        "stopped-in-long-message" => faults::long_message(mpi),
        "stopped-beside-late-rank" => faults::beside_late_rank(mpi),
        "late-long-message" => faults::late_long_message(mpi),
        "killed-before-draw" => faults::draw(mpi, Signal::Kill),
        "stopped-before-draw" => faults::draw(mpi, Signal::Stop),
        "stopped-before-idle-ranks" => faults::partly_ended_exchange(mpi, NextAction::Idle),
        "stopped-before-next-exchange" => faults::partly_ended_exchange(mpi, NextAction::Exchange),
        "ended-in-order" => faults::ended_in_order(mpi),
        "timed" => timed(mpi),
        other => panic!("no scenario {other}"),
    }
}

fn say(rank: usize, what: &str) {
    println!("ok rank {rank}: {what}");
}

/// Unequal shards: the first has one token, the second none.
fn starts(world: usize) -> Vec<u32> {
    (0..world as u32).map(|r| [0, 1, 1][r as usize % 3].max(r.saturating_sub(1) * 300)).collect()
}

/// Messages of all lengths arrive. For both merges, draws are equal to those of all shards in one process.
fn agree(mut mpi: Mpi) {
    let (rank, world) = (mpi.rank(), mpi.world());
    // Without a list of hosts, mpirun starts all ranks on this host.
    assert_eq!((mpi.rank_on_host(), mpi.world_on_host()), (rank, world));
    let message = |rank: usize, step: usize| vec![(rank * 31 + step * 7) as u8; (rank + 1) * (step * 97 % 1000)];
    let mut all = Vec::new();
    for step in 0..200 {
        if (step * 13 + rank * 29).is_multiple_of(61) {
            std::thread::sleep(Duration::from_millis(1));
        }
        mpi.all_gather(&message(rank, step), &mut all).unwrap();
        assert_eq!(all, (0..world).map(|r| message(r, step)).collect::<Vec<_>>(), "step {step}");
    }
    let (head, starts) = (integer_head(), starts(world));
    let (mask, none) = (mask_of(&[2, 3, 999]), mask_of(&[]));
    let calls = [rows(&mask, &none), lists(&mask), filters()];
    let mut transport = mpi;
    for merge in MERGES {
        let options = ShardOptions { merge, weight: Some(DType::F32), transforms: None };
        let local = shards(&head, &starts, PLAN).swap_remove(rank);
        let mut sampler = ShardSampler::new(local, &mut transport, options).unwrap();
        let mut whole = Sharded::new(shards(&head, &starts, PLAN), merge).unwrap();
        for rows in &calls {
            let want = all_of(&mut whole, rows);
            for _ in 0..5 {
                assert_eq!(all_of(&mut sampler, rows), want, "rank {rank}, {merge:?}");
            }
        }
    }
    say(rank, "agreed");
}

/// Rows with filters, for one pass and for several, and one row without. The merge by log-mass refuses the filters.
fn filters() -> Vec<RowParams<'static>> {
    let row = RowParams { seed: 8, ..RowParams::default() };
    vec![
        RowParams { top_p: 0.9, ..row },
        row,
        RowParams { top_k: 30, top_p: 0.8, draws: 3, logprobs: Some(4), ..row },
        RowParams { min_p: 0.05, top_n_sigma: 2.0, ..row },
        RowParams { top_p: 0.9, temperature: 20.0, draws: 12, ..row },
        RowParams { typical_p: 0.7, ..row },
        RowParams { draws: 2, logprobs: Some(3), logprobs_mode: LogprobsMode::Raw, ..row },
    ]
}

fn all_of(sampler: &mut dyn PerturbedArgmax, rows: &[RowParams<'_>]) -> Vec<Row> {
    all(&sample(sampler, &hidden(rows.len()), rows))
}

/// The last rank has another shard table, weight type, hidden size or seed. The others name it; for the seed, it names
/// rank 0.
fn differ(mpi: Mpi) {
    let mut transport = mpi.with_time_limit(LIMIT);
    let (rank, world) = (transport.rank(), transport.world());
    let (last, starts) = (world - 1, starts(world));
    let (is_last, options) = (rank == last, ShardOptions::new(ShardMerge::Winners));
    let head = integer_head();
    let slice = if is_last { head.slice(starts[last] + 5..1000) } else { head.split(&starts).swap_remove(rank) };
    let error =
        ShardSampler::new(reference(slice, PLAN, ReferenceVariant::Tiled), &mut transport, options).unwrap_err();
    assert!(matches!(error, ShardError::Gap { shard, .. } if shard == last), "{error}");

    let weight_type = if is_last { DType::F16 } else { DType::BF16 };
    let with_type = ShardOptions { weight: Some(weight_type), ..options };
    let local = || shards(&head, &starts, PLAN).swap_remove(rank);
    let error = ShardSampler::new(local(), &mut transport, with_type).unwrap_err();
    assert!(matches!(error, ShardError::Mismatch { shard, .. } if shard == last), "{error}");

    let mut sampler = ShardSampler::new(local(), &mut transport, options).unwrap();
    let row = [RowParams { seed: is_last.into(), ..RowParams::default() }];
    let hidden = hidden(1);
    let mut call = |columns: usize| {
        let input = Matrix::new(&hidden[..columns], 1, columns).unwrap();
        sampler.sample(input, &row, &mut Samples::new()).unwrap_err()
    };
    let (error, other) = (call(HIDDEN), if is_last { 0 } else { last });
    assert!(
        matches!(source(&error), ShardError::Params { shard, row: 0, what: "seed" } if *shard == other),
        "{error:?}"
    );
    match call(if is_last { HIDDEN - 1 } else { HIDDEN }) {
        SampleError::Hidden { .. } => assert!(is_last),
        error => assert!(matches!(source(&error), ShardError::Failed { shard, .. } if *shard == last), "{error:?}"),
    }
    say(rank, "named what differs");
}

/// Times the exchange of 64 rows. No time fails the test, since there may be more ranks than processors.
fn timed(mut mpi: Mpi) {
    const ROUNDS: usize = 2000;
    let rank = mpi.rank();
    // The header of the call, then summaries of plain rows: kind, count, one draw.
    let (message, mut all) = (vec![rank as u8; 26 + 64 * (1 + 4 + 12)], Vec::new());
    let mut times: Vec<f64> = (0..ROUNDS)
        .map(|_| {
            let begun = Instant::now();
            mpi.all_gather(&message, &mut all).unwrap();
            begun.elapsed().as_secs_f64() * 1e6
        })
        .collect();
    times.sort_by(f64::total_cmp);
    let (median, slow) = (times[ROUNDS / 2], times[ROUNDS * 9 / 10]);
    println!("time rank {rank}: 64 rows, 1114 bytes: median {median:.1} us, 9 of 10 within {slow:.1} us");
    say(rank, "timed");
}
