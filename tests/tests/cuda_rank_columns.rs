//! Calls of ranks that do not wait, by peers and by NCCL: `CudaRank::enqueue`.
//!
//! Several ranks on one GPU need `CUDA_DEVICE_MAX_CONNECTIONS=32`. Tests with one GPU per rank need that many GPUs.
//! `FLASH_SAMPLING_REQUIRE=peers,nccl` requires all of these tests.

mod backends;

use backends::gpu_columns::{VOCAB, histories, mask, rows};
use backends::gpu_memory::{Copied, captured, copied};
use backends::gpu_ranks::{GpuRanks, Gpus};
use flash_sampling::GpuExchange;
use flash_sampling::distributed::TIME_LIMIT;
use flash_sampling_conformance::SamplerFactory;
use flash_sampling_conformance::problem::{Problem, Size};
use flash_sampling_conformance::suite::{drop_outside_captures, runs};
use flash_sampling_core::{DType, Knob, Plan, RowParams, SampleError, Samples};
use flash_sampling_cuda::abi::{LogprobColumns, RowColumns, TokenColumns, failed_rank, invalid_parameter, status};
use flash_sampling_cuda::{CudaError, Device, DeviceAddress, DeviceHidden, DeviceMatrix};
use rank_group::{OnRank, call, check, each_rank, group};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

#[path = "cuda/rank_group.rs"]
mod rank_group;

/// Returns the ranks of a test, if they can run here, and a lock on the GPUs: waits of ranks have a timeout, so the tests
/// run one at a time.
fn runs_here(exchange: GpuExchange, gpus: Gpus, equal: Option<u32>) -> Option<(GpuRanks, MutexGuard<'static, ()>)> {
    static ALONE: Mutex<()> = Mutex::new(());
    let factory = GpuRanks { exchange, gpus, equal, in_place: true };
    let name = format!("{}/columns", factory.name());
    runs(&name, factory.unavailable(), 1).then(|| (factory, ALONE.lock().unwrap_or_else(PoisonError::into_inner)))
}

/// Loads the kernels of all calls. A load in a call could block behind a rank that waits on the same GPU.
fn load_kernels(problem: &Problem, plan: Plan) {
    let alone = GpuRanks { exchange: GpuExchange::Peers, gpus: Gpus::One, equal: Some(1), in_place: true };
    let mut ranks = group(alone, problem, plan, TIME_LIMIT);
    ranks[0].sampler.prepare_enqueue(0).unwrap();
    for masked in [false, true] {
        let mask = mask(problem.head().vocab_size() as usize);
        let row = RowParams { mask: masked.then_some(mask.as_slice()), ..RowParams::default() };
        let arrays = [ranks[0].arrays(&vec![row; plan.max_rows], problem.head().vocab_size() as usize)];
        call(&mut ranks, 0..plan.max_rows, &arrays);
    }
    drop_outside_captures(ranks);
}

/// Rows with every parameter of single logits.
fn plain_rows<'a>(count: usize, mask: &'a [u32], histories: &'a [flash_sampling_core::History]) -> Vec<RowParams<'a>> {
    let plain = |row| RowParams { top_k: 0, top_p: 1.0, min_p: 0.0, ..row };
    rows(count, mask, histories).into_iter().map(plain).collect()
}

/// More rows than a launch has, and single rows, whose calls have few arrays, so they differ in kernels.
fn draws_are_those_of_one_gpu(factory: GpuRanks) {
    let (mask, histories, count) = (mask(VOCAB), histories(), 300);
    let problem = Problem::gaussian(Size::new(count, VOCAB, 136), DType::BF16, DType::BF16, 17);
    let plan = Plan { max_rows: count, ..Plan::default() };
    load_kernels(&problem, plan);
    let device = Device::new(0).unwrap();
    let mut alone = Copied::on(&device, device.context().new_stream().unwrap(), problem.head(), plan).unwrap();
    let (_memory, hidden) = copied(problem.input(), &alone.stream);
    let mut ranks = group(factory, &problem, plan, TIME_LIMIT);
    each_rank(&mut ranks, |_, rank| rank.sampler.prepare_enqueue(256).unwrap());
    let all = plain_rows(count, &mask, &histories);
    for which in [0..count, 0..17, 0..1, 1..2, 4..5, 5..6, 6..7, 7..8, 8..9, 0..0] {
        let rows = &all[which.clone()];
        let at = which.start * hidden.row_stride * hidden.dtype.size();
        let hidden = DeviceMatrix { address: hidden.address.add(at), rows: rows.len(), ..hidden };
        let mut want = Samples::new();
        // SAFETY: the hidden states are on this device, and this call waits.
        unsafe { alone.sampler.sample(&alone.stream, &hidden, rows, &mut want) }.unwrap();
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
        if let Some((factory, _alone)) = runs_here(GpuExchange::Peers, Gpus::One, equal) {
            draws_are_those_of_one_gpu(factory);
        }
    }
}

#[test]
fn draws_of_ranks_are_those_of_one_gpu() {
    for equal in [Some(2), None] {
        if let Some((factory, _alone)) = runs_here(GpuExchange::Peers, Gpus::Each, equal) {
            draws_are_those_of_one_gpu(factory);
        }
    }
}

#[test]
fn draws_of_ranks_by_nccl_are_those_of_one_gpu() {
    for equal in [Some(1), Some(2), None] {
        if let Some((factory, _alone)) = runs_here(GpuExchange::Nccl, Gpus::Each, equal) {
            draws_are_those_of_one_gpu(factory);
        }
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
    each_rank(&mut ranks, |_, rank| rank.sampler.prepare_enqueue(0).unwrap());
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
        let hidden = DeviceMatrix { rows: count, ..hidden };
        let mut want = Samples::new();
        // SAFETY: the hidden states are on this device, and this call waits.
        unsafe { alone.sampler.sample(&alone.stream, &hidden, &rows, &mut want) }.unwrap();
        let what = format!("{}, step {step}", factory.name());
        check(&ranks, &arrays, &want, factory.exchange, &what);
        tokens.push(want.iter().map(|row| row.unwrap().token()).collect::<Vec<_>>());
        if step % 3 == 2 {
            call(&mut ranks, 0..count, &renewed);
            check(&ranks, &renewed, &want, factory.exchange, &format!("{what}, without a graph"));
            let waited = each_rank(&mut ranks, |_, rank| {
                // SAFETY: the hidden states are on this device until the group is dropped, and are not written.
                let hidden = unsafe { DeviceHidden::new(&rank.stream, rank.states(0..count)) }.unwrap();
                let mut out = Samples::new();
                rank.sampler.sample_device(&hidden, &rows, &mut out).unwrap();
                out.iter().map(|row| row.unwrap().token()).collect::<Vec<_>>()
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
        if let Some((factory, _alone)) = runs_here(GpuExchange::Peers, Gpus::One, equal) {
            captured_calls_are_replayed(factory);
        }
    }
}

#[test]
fn captured_calls_of_ranks_are_replayed() {
    for exchange in [GpuExchange::Peers, GpuExchange::Nccl] {
        if let Some((factory, _alone)) = runs_here(exchange, Gpus::Each, Some(2)) {
            captured_calls_are_replayed(factory);
        }
    }
}

/// Statuses without the rank, and the ranks.
fn statuses(rank: &OnRank, arrays: &rank_group::OnRankArrays) -> Vec<(u32, Option<usize>)> {
    let of = |(status, token, ..): (u32, i64, f32, f32)| {
        assert_eq!(token == -1, status & 0xff != status::DRAWN);
        (status & 0xff, failed_rank(status))
    };
    arrays.results.read(&rank.stream).into_iter().map(of).collect()
}

/// The second rank skips a call. In its next call, it meets the draws of the skipped call, and rank 0 meets the draws of
/// the next call. Both ranks detect the mismatch, unless the rows of both calls are equal: the control. Then rank 0 waits
/// for a call that does not come, and the group is unusable.
fn a_skipped_call_is_detected(factory: GpuRanks) {
    let problem = Problem::gaussian(Size::new(5, VOCAB, 136), DType::BF16, DType::BF16, 20);
    let plan = Plan { max_rows: 5, ..Plan::default() };
    load_kernels(&problem, plan);
    let rows = |position| vec![RowParams { seed: 5, position, ..RowParams::default() }; 5];
    for is_control in [false, true] {
        let mut ranks = group(factory, &problem, plan, Duration::from_secs(2));
        each_rank(&mut ranks, |_, rank| rank.sampler.prepare_enqueue(0).unwrap());
        let skipped = ranks[0].arrays(&rows(1), VOCAB);
        let position = if is_control { 1 } else { 2 };
        let next: Vec<_> = ranks.iter().map(|rank| rank.arrays(&rows(position), VOCAB)).collect();
        let last: Vec<_> = ranks.iter().map(|rank| rank.arrays(&rows(3), VOCAB)).collect();
        let calls: Vec<_> = next.iter().chain(&last).map(|arrays| (arrays.columns, arrays.out)).collect();
        let first = (skipped.columns, skipped.out);
        let waits = each_rank(&mut ranks, |number, rank| {
            let hidden = rank.hidden;
            if number == 0 {
                rank.enqueue(hidden, first).unwrap();
            }
            rank.enqueue(hidden, calls[number]).unwrap();
            rank.sampler.wait(&rank.stream).map_err(of_cuda)
        });
        let met = if is_control { (status::DRAWN, None) } else { (status::OTHER_CALL, Some(1)) };
        assert_eq!(statuses(&ranks[0], &skipped), [met; 5], "control: {is_control}");
        assert_eq!(statuses(&ranks[0], &next[0]), [(status::LATE_RANK, Some(1)); 5]);
        let met = if is_control { met } else { (status::OTHER_CALL, Some(0)) };
        assert_eq!(statuses(&ranks[1], &next[1]), [met; 5], "control: {is_control}");
        assert!(is_late(&waits[0], &[1]), "{waits:?}");
        assert_eq!(waits[1], Ok(()));
        // Rank 0 sends nothing any more, and does not wait.
        let waits = each_rank(&mut ranks, |number, rank| {
            let begun = Instant::now();
            let hidden = rank.hidden;
            rank.enqueue(hidden, calls[2 + number]).unwrap();
            (rank.sampler.wait(&rank.stream).map_err(of_cuda), begun.elapsed())
        });
        assert!(is_late(&waits[0].0, &[1]) && waits[0].1 < Duration::from_millis(500), "{waits:?}");
        assert_eq!(statuses(&ranks[0], &last[0]), [(status::LATE_RANK, Some(1)); 5]);
        // Rank 1 meets the draws that rank 0 sent before its timeout.
        assert_eq!(statuses(&ranks[1], &last[1]), [(status::OTHER_CALL, Some(0)); 5]);
        drop_outside_captures(ranks);
    }
}

fn of_cuda(error: SampleError) -> CudaError {
    let SampleError::Backend { source, .. } = error else { panic!("{error}") };
    source.downcast_ref::<CudaError>().cloned().unwrap_or_else(|| panic!("{source}"))
}

fn is_late(waited: &Result<(), CudaError>, expected: &[usize]) -> bool {
    matches!(waited, Err(CudaError::LateRanks { ranks, .. }) if ranks == expected)
}

#[test]
fn a_rank_that_skips_a_call_is_detected() {
    for gpus in [Gpus::One, Gpus::Each] {
        if let Some((factory, _alone)) = runs_here(GpuExchange::Peers, gpus, Some(2)) {
            a_skipped_call_is_detected(factory);
        }
    }
}

/// The wait of NCCL's kernels ends when the host aborts them.
#[test]
fn a_rank_that_misses_a_call_by_nccl_ends_the_wait() {
    let Some((factory, _alone)) = runs_here(GpuExchange::Nccl, Gpus::Each, Some(2)) else { return };
    let problem = Problem::gaussian(Size::new(5, VOCAB, 136), DType::BF16, DType::BF16, 20);
    let (plan, limit) = (Plan { max_rows: 5, ..Plan::default() }, Duration::from_secs(4));
    let mut ranks = group(factory, &problem, plan, limit);
    each_rank(&mut ranks, |_, rank| rank.sampler.prepare_enqueue(0).unwrap());
    let arrays = ranks[0].arrays(&[RowParams::default(); 5], VOCAB);
    let hidden = ranks[0].hidden;
    let begun = Instant::now();
    ranks[0].enqueue(hidden, (arrays.columns, arrays.out)).unwrap();
    let stream = ranks[0].stream.clone();
    let waited = ranks[0].sampler.wait(&stream).map_err(of_cuda);
    assert!(is_late(&waited, &[]), "{waited:?}");
    assert!(begun.elapsed() < 4 * limit, "{:?}", begun.elapsed());
}

/// Other positions, and an array that one rank does not have. The group continues.
fn other_calls_are_detected(factory: GpuRanks) {
    let problem = Problem::gaussian(Size::new(5, VOCAB, 136), DType::BF16, DType::BF16, 21);
    let plan = Plan { max_rows: 5, ..Plan::default() };
    load_kernels(&problem, plan);
    let mut ranks = group(factory, &problem, plan, TIME_LIMIT);
    each_rank(&mut ranks, |_, rank| rank.sampler.prepare_enqueue(4).unwrap());
    let row = RowParams { seed: 5, position: 1, ..RowParams::default() };
    for other in [row, RowParams { position: 2, ..row }, RowParams { banned: &[7], ..row }] {
        let of_rank = [vec![row; 5], vec![other; 5]];
        let arrays: Vec<_> = ranks.iter().zip(&of_rank).map(|(rank, rows)| rank.arrays(rows, VOCAB)).collect();
        call(&mut ranks, 0..5, &arrays);
        for (number, (rank, arrays)) in ranks.iter().zip(&arrays).enumerate() {
            let by_nccl = factory.exchange == GpuExchange::Nccl;
            let is_same = other.position == 1 && other.banned.is_empty();
            let expected = match is_same {
                true => (status::DRAWN, None),
                false => (status::OTHER_CALL, (!by_nccl).then_some(1 - number)),
            };
            assert_eq!(statuses(rank, arrays), [expected; 5], "{other:?}");
        }
    }
    drop_outside_captures(ranks);
}

#[test]
fn ranks_that_make_other_calls_are_detected() {
    for (exchange, gpus) in
        [(GpuExchange::Peers, Gpus::One), (GpuExchange::Peers, Gpus::Each), (GpuExchange::Nccl, Gpus::Each)]
    {
        if let Some((factory, _alone)) = runs_here(exchange, gpus, Some(2)) {
            other_calls_are_detected(factory);
        }
    }
}

/// An invalid parameter is the status of its row alone, on all ranks. The row with too many adjusted tokens has them all in
/// the first shard.
#[test]
fn invalid_rows_are_the_same_on_all_ranks() {
    let Some((factory, _alone)) = runs_here(GpuExchange::Peers, Gpus::One, Some(2)) else { return };
    let problem = Problem::gaussian(Size::new(4, VOCAB, 136), DType::BF16, DType::BF16, 19);
    let plan = Plan { max_rows: 4, ..Plan::default() };
    load_kernels(&problem, plan);
    let mut ranks = group(factory, &problem, plan, TIME_LIMIT);
    each_rank(&mut ranks, |_, rank| rank.sampler.prepare_enqueue(2).unwrap());
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

/// The refused call sends nothing, so the group continues.
#[test]
fn what_depends_on_the_whole_row_is_refused_by_name() {
    let Some((factory, _alone)) = runs_here(GpuExchange::Peers, Gpus::One, Some(2)) else { return };
    let problem = Problem::gaussian(Size::new(2, VOCAB, 136), DType::BF16, DType::BF16, 22);
    let plan = Plan { max_rows: 2, ..Plan::default() };
    load_kernels(&problem, plan);
    let mut ranks = group(factory, &problem, plan, TIME_LIMIT);
    each_rank(&mut ranks, |_, rank| rank.sampler.prepare_enqueue(0).unwrap());
    let arrays: Vec<_> = ranks.iter().map(|rank| rank.arrays(&[RowParams::default(); 2], VOCAB)).collect();
    let OnRank { hidden, .. } = ranks[0];
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
