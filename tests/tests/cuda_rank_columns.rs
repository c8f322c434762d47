//! Calls of ranks that do not wait, by peers and by NCCL: `CudaRank::enqueue`.
//!
//! Several ranks on one GPU need `CUDA_DEVICE_MAX_CONNECTIONS=32`. Tests with one GPU per rank need that many GPUs.
//! `FLASH_SAMPLING_REQUIRE=peers,nccl` requires all of these tests.

mod backends;

use backends::gpu_columns::{VOCAB, histories, mask, rows};
use backends::gpu_memory::{Copied, captured, copied, part};
use backends::gpu_ranks::{GpuRanks, Gpus};
use backends::rank_tests::{of_cuda, ranks_in_place};
use backends::shard_starts;
use flash_sampling::GpuExchange;
use flash_sampling::distributed::TIME_LIMIT;
use flash_sampling_conformance::SamplerFactory;
use flash_sampling_conformance::problem::{Problem, Size};
use flash_sampling_conformance::suite::drop_outside_captures;
use flash_sampling_core::{DType, Knob, Plan, RowParams};
use flash_sampling_cuda::abi::{LogprobColumns, RowColumns, TokenColumns, invalid_parameter, status};
use flash_sampling_cuda::{CudaError, Device, DeviceAddress};
use rank_faults::{is_late, statuses};
use rank_group::{OnRank, call, check, each_rank, group_of, prepare};
use std::time::{Duration, Instant};

#[path = "cuda/rank_faults.rs"]
mod rank_faults;
#[path = "cuda/rank_group.rs"]
mod rank_group;
#[path = "cuda/whole_rows.rs"]
mod whole_rows;

/// Makes a group of ranks without shadows.
fn group(factory: GpuRanks, problem: &Problem, plan: Plan, limit: Duration) -> Vec<OnRank> {
    let heads = problem.head().split(&shard_starts(&problem.head(), factory.equal));
    group_of(factory, heads, problem.input(), plan, limit)
}

/// Loads the kernels of all calls. A load in a call could block behind a rank that waits on the same GPU.
fn load_kernels(problem: &Problem, plan: Plan) {
    let mut ranks = group(ranks_in_place(GpuExchange::Peers, Gpus::One, Some(1)), problem, plan, TIME_LIMIT);
    prepare(&mut ranks, 0, true);
    for (masked, top_p) in [(false, 1.0), (true, 1.0), (true, 0.9)] {
        let mask = mask(problem.head().vocab_size() as usize);
        let row = RowParams { mask: masked.then_some(mask.as_slice()), top_p, ..RowParams::default() };
        let arrays = [ranks[0].arrays(&vec![row; plan.max_rows], problem.head().vocab_size() as usize)];
        call(&mut ranks, 0..plan.max_rows, &arrays);
    }
    drop_outside_captures(ranks);
}

/// More rows than a launch has, and single rows, whose calls have few arrays, so they differ in kernels. First without
/// filters, and by peers also with filters.
fn draws_are_those_of_one_gpu(factory: GpuRanks) {
    let (mask, histories, count) = (mask(VOCAB), histories(), 300);
    let problem = Problem::gaussian(Size::new(count, VOCAB, 136), DType::BF16, DType::BF16, 17);
    let plan = Plan { max_rows: count, ..Plan::default() };
    load_kernels(&problem, plan);
    let device = Device::new(0).unwrap();
    let mut alone = Copied::on(&device, device.context().new_stream().unwrap(), problem.head(), plan).unwrap();
    let (_memory, hidden) = copied(problem.input(), &alone.stream);
    let mut ranks = group(factory, &problem, plan, TIME_LIMIT);
    let gathers = factory.exchange == GpuExchange::Peers;
    prepare(&mut ranks, 256, gathers);
    let filtered = rows(count, &mask, &histories);
    let mut plain = filtered.clone();
    plain.iter_mut().for_each(|row| (row.top_k, row.top_p, row.min_p) = (0, 1.0, 0.0));
    let of_plain = [0..count, 0..17, 0..1, 1..2, 4..5, 5..6, 6..7, 7..8, 8..9, 0..0].map(|which| (&plain, which));
    let of_filtered = [0..count, 0..17, 2..3, 3..4, 4..5, 7..8, 9..10, 10..11].map(|which| (&filtered, which));
    for (all, which) in of_plain.into_iter().chain(of_filtered.into_iter().filter(|_| gathers)) {
        let rows = &all[which.clone()];
        let want = alone.waited(&part(&hidden, which.clone()), rows);
        let arrays: Vec<_> = ranks.iter().map(|rank| rank.arrays(rows, VOCAB)).collect();
        call(&mut ranks, which.clone(), &arrays);
        check(&ranks, &arrays, &want, factory.exchange, &format!("{}, rows {which:?}", factory.name()));
    }
    drop_outside_captures((alone, ranks));
}

#[test]
fn draws_of_ranks_on_one_gpu_are_those_of_one_gpu() {
    // With four shards, one has no tokens.
    for equal in [Some(1), Some(2), Some(3), None] {
        ranks_in_place(GpuExchange::Peers, Gpus::One, equal).run(draws_are_those_of_one_gpu);
    }
}

#[test]
fn draws_of_ranks_are_those_of_one_gpu() {
    for equal in [Some(2), None] {
        ranks_in_place(GpuExchange::Peers, Gpus::Each, equal).run(draws_are_those_of_one_gpu);
    }
}

#[test]
fn draws_of_ranks_by_nccl_are_those_of_one_gpu() {
    for equal in [Some(1), Some(2), None] {
        ranks_in_place(GpuExchange::Nccl, Gpus::Each, equal).run(draws_are_those_of_one_gpu);
    }
}

/// Graphs of 9 and of 4 rows, replayed in turn with other positions and temperatures. Calls that wait, and that no graph
/// has, run between the replays.
fn captured_calls_are_replayed(factory: GpuRanks) {
    const COUNTS: [usize; 2] = [9, 4];
    let problem = Problem::gaussian(Size::new(9, VOCAB, 136), DType::BF16, DType::BF16, 18);
    let plan = Plan { max_rows: 9, ..Plan::default() };
    load_kernels(&problem, plan);
    let device = Device::new(0).unwrap();
    let mut alone = Copied::on(&device, device.context().new_stream().unwrap(), problem.head(), plan).unwrap();
    let (_memory, hidden) = copied(problem.input(), &alone.stream);
    let mut ranks = group(factory, &problem, plan, TIME_LIMIT);
    prepare(&mut ranks, 0, false);
    let row =
        |at| RowParams { seed: 3, position: 1 + at, temperature: 0.5 + 0.25 * (at % 4) as f32, ..RowParams::default() };
    let rows: Vec<_> = (0..9).map(row).collect();
    let mut arrays: Vec<_> = ranks.iter().map(|rank| rank.arrays(&rows, VOCAB)).collect();
    let (mut changed, mut graphs) = (Vec::new(), Vec::new());
    for (rank, arrays) in ranks.iter_mut().zip(&mut arrays) {
        let (positions, temperatures) =
            (rank.stream.alloc_zeros::<u64>(9).unwrap(), rank.stream.alloc_zeros::<f32>(9).unwrap());
        arrays.columns.position = DeviceAddress::of(&positions, &rank.stream);
        arrays.columns.temperature = DeviceAddress::of(&temperatures, &rank.stream);
        rank.stream.synchronize().unwrap();
        changed.push((positions, temperatures));
        graphs.push(COUNTS.map(|count| {
            let (stream, hidden) = (rank.stream.clone(), rank.states(0..count));
            captured(&stream, || rank.enqueue(hidden, (arrays.columns, arrays.out)).map_err(of_cuda))
        }));
    }
    let mut tokens = Vec::new();
    for step in 0..8u64 {
        let count = COUNTS[step as usize % 2];
        let rows: Vec<_> = (0..count as u64).map(|r| row(100 * step + r)).collect();
        let renewed: Vec<_> = ranks.iter().map(|rank| rank.arrays(&rows, VOCAB)).collect();
        for (rank, (positions, temperatures)) in ranks.iter().zip(&mut changed) {
            rank.stream.memcpy_htod(&rows.iter().map(|row| row.position).collect::<Vec<_>>(), positions).unwrap();
            rank.stream.memcpy_htod(&rows.iter().map(|row| row.temperature).collect::<Vec<_>>(), temperatures).unwrap();
            rank.stream.synchronize().unwrap();
        }
        graphs.iter().for_each(|of_rank| of_rank[step as usize % 2].launch().unwrap());
        ranks.iter_mut().for_each(|rank| rank.sampler.wait(&rank.stream).unwrap());
        let want = alone.waited(&part(&hidden, 0..count), &rows);
        let what = format!("{}, step {step}", factory.name());
        check(&ranks, &arrays, &want, factory.exchange, &what);
        tokens.push(want.iter().map(|row| row.unwrap().token()).collect::<Vec<_>>());
        if step % 3 == 2 {
            call(&mut ranks, 0..count, &renewed);
            check(&ranks, &renewed, &want, factory.exchange, &format!("{what}, without a graph"));
            let waited = each_rank(&mut ranks, |_, rank| {
                rank.waited(0..count, &rows).iter().map(|row| row.unwrap().token()).collect::<Vec<_>>()
            });
            assert!(waited.iter().all(|waited| Some(waited) == tokens.last()), "{what}, with a wait");
        }
    }
    assert!(tokens.windows(2).all(|pair| pair[0][..4] != pair[1][..4]), "{tokens:?}");
    drop(graphs);
    drop_outside_captures((alone, ranks));
}

#[test]
fn captured_calls_of_ranks_on_one_gpu_are_replayed() {
    for equal in [Some(1), Some(2)] {
        ranks_in_place(GpuExchange::Peers, Gpus::One, equal).run(captured_calls_are_replayed);
    }
}

#[test]
fn captured_calls_of_ranks_are_replayed() {
    for exchange in [GpuExchange::Peers, GpuExchange::Nccl] {
        ranks_in_place(exchange, Gpus::Each, Some(2)).run(captured_calls_are_replayed);
    }
}

#[test]
fn a_rank_that_skips_a_call_is_detected() {
    for gpus in [Gpus::One, Gpus::Each] {
        ranks_in_place(GpuExchange::Peers, gpus, Some(2)).run(rank_faults::a_skipped_call_is_detected);
    }
}

/// The wait of NCCL's kernels ends when the host aborts them.
#[test]
fn a_rank_that_misses_a_call_by_nccl_ends_the_wait() {
    let factory = ranks_in_place(GpuExchange::Nccl, Gpus::Each, Some(2));
    let Some(_alone) = factory.alone() else { return };
    let problem = Problem::gaussian(Size::new(5, VOCAB, 136), DType::BF16, DType::BF16, 20);
    let (plan, limit) = (Plan { max_rows: 5, ..Plan::default() }, Duration::from_secs(4));
    let mut ranks = group(factory, &problem, plan, limit);
    prepare(&mut ranks, 0, false);
    let arrays = ranks[0].arrays(&[RowParams::default(); 5], VOCAB);
    let hidden = ranks[0].hidden;
    let begun = Instant::now();
    ranks[0].enqueue(hidden, (arrays.columns, arrays.out)).unwrap();
    let stream = ranks[0].stream.clone();
    let waited = ranks[0].sampler.wait(&stream).map_err(of_cuda);
    assert!(is_late(&waited, &[]), "{waited:?}");
    assert!(begun.elapsed() < 4 * limit, "{:?}", begun.elapsed());
}

#[test]
fn ranks_that_make_other_calls_are_detected() {
    for (exchange, gpus) in
        [(GpuExchange::Peers, Gpus::One), (GpuExchange::Peers, Gpus::Each), (GpuExchange::Nccl, Gpus::Each)]
    {
        ranks_in_place(exchange, gpus, Some(2)).run(rank_faults::other_calls_are_detected);
    }
}

/// An invalid parameter is the status of its row alone, on all ranks. The row with too many adjusted tokens has them all in
/// the first shard.
#[test]
fn invalid_rows_are_the_same_on_all_ranks() {
    let factory = ranks_in_place(GpuExchange::Peers, Gpus::One, Some(2));
    let Some(_alone) = factory.alone() else { return };
    let problem = Problem::gaussian(Size::new(4, VOCAB, 136), DType::BF16, DType::BF16, 19);
    let plan = Plan { max_rows: 4, ..Plan::default() };
    load_kernels(&problem, plan);
    let mut ranks = group(factory, &problem, plan, TIME_LIMIT);
    prepare(&mut ranks, 2, false);
    let base = RowParams { seed: 5, ..RowParams::default() };
    let rows = [
        base,
        RowParams { temperature: f32::NAN, ..base },
        RowParams { banned: &[1, 2, 3], ..base },
        RowParams { banned: &[1, 2900], ..base },
    ];
    let arrays: Vec<_> = ranks.iter().map(|rank| rank.arrays(&rows, VOCAB)).collect();
    call(&mut ranks, 0..4, &arrays);
    for (rank, arrays) in ranks.iter().zip(&arrays) {
        let found: Vec<_> = arrays.results.read(&rank.stream).iter().map(|row| row.0).collect();
        let named: Vec<_> = found.iter().map(|&status| (status & 0xff, invalid_parameter(status))).collect();
        let (drawn, invalid) = ((status::DRAWN, None), status::PARAMETERS);
        assert_eq!(named, [drawn, (invalid, Some(Knob::Temperature)), (invalid, None), drawn]);
    }
    drop_outside_captures(ranks);
}

/// By NCCL, filters and log-probabilities are refused. The refused call sends nothing, so the group continues.
#[test]
fn what_depends_on_the_whole_row_is_refused_by_nccl() {
    let factory = ranks_in_place(GpuExchange::Nccl, Gpus::Each, Some(2));
    let Some(_alone) = factory.alone() else { return };
    let problem = Problem::gaussian(Size::new(2, VOCAB, 136), DType::BF16, DType::BF16, 22);
    let plan = Plan { max_rows: 2, ..Plan::default() };
    let mut ranks = group(factory, &problem, plan, TIME_LIMIT);
    prepare(&mut ranks, 0, false);
    let arrays: Vec<_> = ranks.iter().map(|rank| rank.arrays(&[RowParams::default(); 2], VOCAB)).collect();
    let hidden = ranks[0].hidden;
    let (columns, out) = (arrays[0].columns, arrays[0].out);
    let (int, float) = (DeviceAddress::new(64), DeviceAddress::new(64));
    let processed = LogprobColumns { log_probs: float, ..LogprobColumns::default() };
    for (columns, out, knob) in [
        (RowColumns { top_k: int, ..columns }, out, Knob::TopK),
        (RowColumns { top_p: float, ..columns }, out, Knob::TopP),
        (RowColumns { min_p: float, ..columns }, out, Knob::MinP),
        (columns, TokenColumns { processed, ..out }, Knob::Logprobs),
    ] {
        let refused = ranks[0].enqueue(hidden, (columns, out)).map_err(of_cuda);
        assert_eq!(refused, Err(CudaError::NotEnqueued { knob }));
    }
    call(&mut ranks, 0..2, &arrays);
    for (rank, arrays) in ranks.iter().zip(&arrays) {
        assert_eq!(statuses(rank, arrays), [(status::DRAWN, None); 2]);
    }
    drop_outside_captures(ranks);
}

/// Makes small calls for the sanitizers.
#[test]
fn whole_rows_of_one_rank_are_those_of_one_gpu() {
    ranks_in_place(GpuExchange::Peers, Gpus::One, Some(1)).run(whole_rows::are_those_of_one_gpu);
}

#[test]
fn whole_rows_of_ranks_on_one_gpu_are_those_of_one_gpu() {
    for equal in [Some(2), None] {
        ranks_in_place(GpuExchange::Peers, Gpus::One, equal).run(whole_rows::are_those_of_one_gpu);
    }
}

#[test]
fn whole_rows_of_ranks_are_those_of_one_gpu() {
    ranks_in_place(GpuExchange::Peers, Gpus::Each, Some(2)).run(whole_rows::are_those_of_one_gpu);
}
