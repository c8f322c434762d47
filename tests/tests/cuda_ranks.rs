//! The suite and further tests of ranks that exchange their draws on GPUs.
//!
//! Several ranks on one GPU need `CUDA_DEVICE_MAX_CONNECTIONS=32`. Tests with one GPU per rank need that many GPUs.
//! `FLASH_SAMPLING_REQUIRE=peers,nccl` requires all of these tests.

mod backends;

use backends::gpu_ranks::{GpuRanks, Gpus};
use backends::gpu_rows::rows;
use backends::rank_tests::{of_cuda, ranks, ranks_in_place, two_ranks};
use flash_sampling::distributed::{Loopback, TIME_LIMIT};
use flash_sampling::{CudaRank, CudaRankOptions, GpuExchange};
use flash_sampling_conformance::problem::{Problem, Size};
use flash_sampling_conformance::{SamplerFactory, suite};
use flash_sampling_core::{DType, Head, Matrix, PerturbedArgmax, Plan, RowError, RowParams, SampleError, Samples};
use flash_sampling_cuda::{CudaError, CudaTiled, Device};
use missing_rank::Missing;
use std::sync::{Arc, Barrier};
use std::time::{Duration, Instant};

#[path = "cuda/filtered_rows.rs"]
mod filtered_rows;
#[path = "cuda/missing_rank.rs"]
mod missing_rank;
#[path = "cuda/rank_calls.rs"]
mod rank_calls;
#[path = "cuda/rank_filters.rs"]
mod rank_filters;
#[path = "cuda/rank_group.rs"]
mod rank_group;
#[path = "cuda/rank_in_place.rs"]
mod rank_in_place;
#[path = "cuda/rank_shadow.rs"]
mod rank_shadow;
#[path = "cuda/same_draws.rs"]
mod same_draws;

suite!(peers_2, ranks(GpuExchange::Peers, Gpus::Each, Some(2)));
suite!(peers_in_place, ranks_in_place(GpuExchange::Peers, Gpus::Each, Some(2)));
suite!(peers_4, ranks(GpuExchange::Peers, Gpus::Each, Some(4)));
suite!(nccl_2, ranks(GpuExchange::Nccl, Gpus::Each, Some(2)));
suite!(nccl_4, ranks(GpuExchange::Nccl, Gpus::Each, Some(4)));
suite!(peers_8, ranks(GpuExchange::Peers, Gpus::Each, Some(8)));
suite!(nccl_8, ranks(GpuExchange::Nccl, Gpus::Each, Some(8)));
suite!(peers_uneven, ranks(GpuExchange::Peers, Gpus::Each, None));
suite!(nccl_uneven, ranks(GpuExchange::Nccl, Gpus::Each, None));

/// The ranks of most tests, on a shared GPU.
const TWO: GpuRanks = ranks(GpuExchange::Peers, Gpus::One, Some(2));

/// Inputs with rounded sums, every knob, lists and errors. There are few ranks, because the streams of many ranks share
/// a hardware queue, and a rank's copy could then block the kernel that the rank waits for.
#[test]
fn draws_are_those_of_one_gpu_to_the_last_bit() {
    TWO.run(|_| [1, 2, 3].into_iter().for_each(|n| as_one_gpu(ranks(GpuExchange::Peers, Gpus::One, Some(n)))));
}

/// The same for ranks that read weight and hidden states in device memory.
#[test]
fn draws_from_device_memory_are_those_of_one_gpu() {
    TWO.run(|_| [1, 2, 3].into_iter().for_each(|n| as_one_gpu(ranks_in_place(GpuExchange::Peers, Gpus::One, Some(n)))));
    for (exchange, equal) in [(GpuExchange::Peers, None), (GpuExchange::Nccl, Some(2)), (GpuExchange::Nccl, None)] {
        ranks_in_place(exchange, Gpus::Each, equal).run(as_one_gpu);
    }
}

/// Plain rows, rows with filters, rows that need the transport, and rows that are not valid.
#[test]
fn results_from_device_memory_have_the_reference_bits() {
    TWO.run(|_| [1, 2].into_iter().for_each(|world| rank_in_place::results_have_the_reference_bits(Gpus::One, world)));
    ranks_in_place(GpuExchange::Peers, Gpus::Each, Some(2))
        .run(|_| rank_in_place::results_have_the_reference_bits(Gpus::Each, 2));
}

#[test]
fn ranks_with_hidden_states_in_other_memory_are_named() {
    TWO.run(|_| rank_in_place::other_memory_is_named());
}

#[test]
fn ranks_with_hidden_states_of_other_alignment_are_named() {
    TWO.run(|_| rank_in_place::other_alignment_is_named());
}

#[test]
fn a_rank_refuses_hidden_states_that_it_cannot_read_in_place() {
    TWO.run(|_| rank_in_place::calls_that_do_not_fit_are_refused());
}

/// Filters that are decided on the GPUs: by ranks that share one, and by ranks with one each.
#[test]
fn filters_that_ranks_decide_are_those_of_one_gpu() {
    let Some(_alone) = TWO.alone() else { return };
    let device = Device::new(0).unwrap();
    for world in [1, 2, 3] {
        rank_filters::are_those_of_one_gpu(&vec![device.clone(); world]);
    }
    let each: Vec<_> = (0..4).map_while(|device| Device::new(device).ok()).collect();
    rank_filters::are_those_of_one_gpu(&each);
}

#[test]
fn ranks_that_are_called_with_other_filters_are_named() {
    TWO.run(|_| rank_filters::are_named_where_they_differ(&[(); 2].map(|()| Device::new(0).unwrap())));
}

/// Makes small calls for the sanitizers.
#[test]
fn filters_of_one_rank_are_those_of_one_gpu() {
    TWO.run(|_| rank_filters::are_those_of_one_gpu_in_a_small_call(&Device::new(0).unwrap()));
}

#[test]
fn filters_that_ranks_decide_are_those_of_one_gpu_at_the_edges() {
    TWO.run(|_| rank_filters::are_those_of_one_gpu_at_the_edges(&two_devices()));
}

#[test]
fn ranks_that_filter_a_row_in_another_launch_are_named() {
    TWO.run(|_| rank_filters::are_named_where_launches_differ(&two_devices()));
}

#[test]
fn ranks_with_filters_that_are_called_with_other_types_are_named() {
    TWO.run(|_| rank_calls::other_types_are_named_with_filters(&two_devices()));
}

/// Returns one GPU per rank, or the same GPU twice if there is only one.
fn two_devices() -> [Arc<Device>; 2] {
    let device = Device::new(0).unwrap();
    [device.clone(), Device::new(1).unwrap_or(device)]
}

/// Shards of unequal lengths, one without tokens. Only the first begins at a multiple of 64.
#[test]
fn draws_of_unequal_shards_are_those_of_one_gpu() {
    for exchange in [GpuExchange::Peers, GpuExchange::Nccl] {
        ranks(exchange, Gpus::Each, None).run(as_one_gpu);
    }
}

/// Compares token and score by their bits. The logit is score minus noise, so it may differ by one rounding.
#[test]
fn draws_by_nccl_are_those_of_one_gpu() {
    for world in [1, 2, 4] {
        ranks(GpuExchange::Nccl, Gpus::Each, Some(world)).run(as_one_gpu);
    }
}

/// Loads the kernels for a call of ranks on the GPU. A load during the call could block behind a rank that waits on the
/// same GPU.
fn load_kernels(problem: &Problem, plan: Plan) {
    load_kernels_of(problem, plan, &vec![RowParams::default(); problem.input().rows()]);
}

fn load_kernels_of(problem: &Problem, plan: Plan, rows: &[RowParams<'_>]) {
    let mut rank = ranks(GpuExchange::Peers, Gpus::One, Some(1)).build(problem.head(), plan).unwrap();
    rank.sample(problem.input(), rows, &mut Samples::new()).unwrap();
}

fn as_one_gpu(factory: GpuRanks) {
    let plan = Plan { max_rows: 40, max_draws: 4, max_logprobs: Some(3), canonical: false };
    let problem = Problem::gaussian(Size::new(40, 5003, 264), DType::BF16, DType::BF16, 5);
    let mut alone = CudaTiled::new(problem.head(), plan, &Device::new(0).unwrap()).unwrap();
    let mut sharded = factory.build(problem.head(), plan).unwrap();
    for count in [1, 7, 40, 3] {
        let mut rows = rows(count);
        for pass in 0..3 {
            // The last pass has a request that needs the transport.
            rows[0].logprobs = (pass == 2).then_some(2);
            rows[count / 2].top_p = if pass == 2 { 0.9 } else { 1.0 };
            rows.iter_mut().for_each(|row| row.position += 1);
            let (mut want, mut found) = (Samples::new(), Samples::new());
            let input = problem.input().row_range(0..count);
            alone.sample(input, &rows, &mut want).unwrap();
            sharded.sample(input, &rows, &mut found).unwrap();
            same_draws::are_same(factory.exchange, &found, &want, &factory.name());
        }
    }
}

/// On one shard, the temperature makes a logit +inf. The next shard has a raw NaN, which takes precedence.
#[test]
fn the_error_of_a_row_does_not_depend_on_where_shards_begin() {
    let Some(_alone) = TWO.alone() else { return };
    let (vocab, hidden) = (40, 8);
    let mut weight = vec![0.5f32; vocab * hidden];
    weight[3 * hidden] = 1e30;
    weight[30 * hidden] = f32::NAN;
    let head = Head::new(Matrix::new(&weight, vocab, hidden).unwrap()).unwrap();
    let state = vec![1f32; hidden];
    let input = Matrix::new(&state, 1, hidden).unwrap();
    let rows = [RowParams { temperature: 1e-20, ..RowParams::default() }];
    let plan = Plan { max_rows: 1, ..Plan::default() };
    let mut out = Samples::new();
    CudaTiled::new(head, plan, &Device::new(0).unwrap()).unwrap().sample(input, &rows, &mut out).unwrap();
    assert_eq!(out.row(0).err(), Some(RowError::NaN { token: 30 }));
    for world in [1, 2, 3] {
        let mut sharded = ranks(GpuExchange::Peers, Gpus::One, Some(world)).build(head, plan).unwrap();
        sharded.sample(input, &rows, &mut out).unwrap();
        assert_eq!(out.row(0).err(), Some(RowError::NaN { token: 30 }), "{world} ranks");
    }
}

#[test]
fn a_rank_that_does_not_come_is_named_within_the_time_limit() {
    TWO.run(|_| missing_rank::is_named(GpuExchange::Peers, Gpus::One, Missing::Left, 3, did_not_come));
}

fn did_not_come(limit: Duration) -> String {
    format!("rank 1 did not come to the exchange within {limit:?}")
}

#[test]
fn a_rank_that_leaves_nccl_is_named_by_the_transport() {
    let message = |_| "rank 1 has left the group".into();
    ranks(GpuExchange::Nccl, Gpus::Each, Some(3))
        .run(|_| missing_rank::is_named(GpuExchange::Nccl, Gpus::Each, Missing::Left, 3, message));
}

/// The rank is alive, and does not make the call. With more than two ranks, NCCL cannot name the rank, but the
/// transport can.
#[test]
fn a_rank_that_hangs_is_named_within_the_time_limit() {
    for (exchange, world) in [(GpuExchange::Nccl, 2), (GpuExchange::Nccl, 3), (GpuExchange::Peers, 2)] {
        ranks(exchange, Gpus::Each, Some(world))
            .run(|_| missing_rank::is_named(exchange, Gpus::Each, Missing::Hangs, world, did_not_come));
    }
}

/// A rank fails before the exchange, and then calls again. It must not use the data that the other rank sent for the
/// failed call. The other rank has queried the transport without success, makes no further call, and leaves its query
/// there.
#[test]
fn a_call_that_one_rank_failed_is_not_taken_for_the_next() {
    let Some(_alone) = TWO.alone() else { return };
    let limit = Duration::from_millis(500);
    let problem = Problem::integers(Size::new(2, 900, 64), DType::BF16, DType::BF16, 5);
    let narrow = Problem::integers(Size::new(2, 900, 56), DType::BF16, DType::BF16, 5);
    let plan = Plan { max_rows: 2, ..Plan::default() };
    let (is_late, is_done) = (Barrier::new(2), Barrier::new(2));
    load_kernels(&problem, plan);
    two_ranks(problem.head(), plan, 2 * limit, Gpus::One, CudaRankOptions::default(), |rank, mut sampler| {
        let rows = [3, 4].map(|seed| RowParams { seed, ..RowParams::default() });
        let mut out = Samples::new();
        sampler.sample(problem.input(), &rows, &mut out).unwrap();
        if rank == 1 {
            let begun = Instant::now();
            let error = sampler.sample(problem.input(), &rows, &mut out).unwrap_err();
            let took = begun.elapsed();
            assert_eq!(of_cuda(error), CudaError::LateRanks { ranks: vec![0], limit: 2 * limit });
            assert!(took >= 2 * limit && took < 4 * limit, "{took:?}");
            is_late.wait();
            is_done.wait();
            return;
        }
        let error = sampler.sample(narrow.input(), &rows, &mut out).unwrap_err();
        assert!(matches!(error, SampleError::Hidden { found: 56, expected: 64 }), "{error}");
        is_late.wait();
        let begun = Instant::now();
        let outcome = sampler.sample(problem.input(), &rows, &mut out);
        let took = begun.elapsed();
        is_done.wait();
        assert_eq!(of_cuda(outcome.unwrap_err()), CudaError::OtherCall { rank: Some(1), row: Some(0) });
        assert!(out.is_empty() && took < limit, "{took:?}");
    });
}

/// Calls `test` with ranks that read device memory on a shared GPU. A single rank comes first, because it loads the
/// kernels: a load during a call could block behind a rank that waits on the same GPU.
fn on_one_gpu(test: impl Fn(GpuRanks)) {
    let of = |equal| ranks_in_place(GpuExchange::Peers, Gpus::One, equal);
    TWO.run(|_| [Some(1), Some(2)].into_iter().for_each(|equal| test(of(equal))));
    // With four shards, one has no tokens.
    of(None).run(test);
}

/// Calls `test` with ranks on a GPU each, by both exchanges.
fn on_each_gpu(test: impl Fn(GpuRanks)) {
    for exchange in [GpuExchange::Peers, GpuExchange::Nccl] {
        [Some(2), None].into_iter().for_each(|equal| ranks_in_place(exchange, Gpus::Each, equal).run(&test));
    }
}

/// Some rows fall back on one rank, and other rows on other ranks.
#[test]
fn draws_by_a_shadow_of_ranks_on_one_gpu_are_those_of_one_gpu() {
    on_one_gpu(rank_shadow::draws_are_those_of_one_gpu);
}

#[test]
fn draws_by_a_shadow_of_ranks_are_those_of_one_gpu() {
    on_each_gpu(rank_shadow::draws_are_those_of_one_gpu);
}

#[test]
fn draws_by_a_shadow_from_host_memory_are_those_of_one_gpu() {
    let test = rank_shadow::draws_from_host_memory_are_those_of_one_gpu;
    TWO.run(|_| [1, 2, 3].into_iter().for_each(|world| test(ranks(GpuExchange::Peers, Gpus::One, Some(world)))));
    ranks(GpuExchange::Peers, Gpus::Each, None).run(test);
}

#[test]
fn captured_draws_by_a_shadow_of_ranks_on_one_gpu_are_replayed() {
    on_one_gpu(rank_shadow::captured_calls_are_replayed);
}

#[test]
fn captured_draws_by_a_shadow_of_ranks_are_replayed() {
    on_each_gpu(rank_shadow::captured_calls_are_replayed);
}

#[test]
fn a_wrong_shadow_changes_the_draws_of_ranks() {
    on_one_gpu(rank_shadow::a_wrong_shadow_changes_the_draws);
    on_each_gpu(rank_shadow::a_wrong_shadow_changes_the_draws);
}

/// Returns the text of a failed call's error.
fn said(error: SampleError) -> String {
    let SampleError::Backend { source, .. } = error else { panic!("{error}") };
    source.to_string()
}

/// The types of hidden states differ, and so do their roundings.
#[test]
fn ranks_that_are_called_with_other_types_are_named() {
    let Some(_alone) = TWO.alone() else { return };
    let types = [DType::BF16, DType::F16];
    let problems = types.map(|dtype| Problem::integers(Size::new(2, 900, 64), DType::BF16, dtype, 5));
    let plan = Plan { max_rows: 2, ..Plan::default() };
    problems.iter().for_each(|problem| load_kernels(problem, plan));
    let of_rank = |rank: usize, mut sampler: CudaRank<'_, Loopback>| {
        let rows = [3, 4].map(|seed| RowParams { seed, ..RowParams::default() });
        let error = sampler.sample(problems[rank].input(), &rows, &mut Samples::new()).unwrap_err();
        let (other, [mine, theirs]) = (1 - rank, [types[rank], types[1 - rank]]);
        let says = format!("shard {other} has hidden states of type {theirs:?}, but shard {rank} has {mine:?}");
        assert_eq!(said(error), says);
    };
    two_ranks(problems[0].head(), plan, TIME_LIMIT, Gpus::One, CudaRankOptions::default(), of_rank);
}

/// Parameters, contents of lists, or numbers of rows differ. The group continues after each mismatch.
#[test]
fn ranks_with_mismatched_calls_name_the_parameter() {
    for factory in [TWO, ranks(GpuExchange::Nccl, Gpus::Each, Some(2))] {
        factory.run(|of| rank_calls::mismatched_calls_are_named(of.exchange, of.gpus));
    }
}

#[test]
fn a_rank_that_came_too_late_to_a_call_is_named() {
    TWO.run(|_| rank_calls::late_ranks_are_named());
}

#[test]
fn ranks_that_share_a_gpu_allocate_room_for_long_lists() {
    TWO.run(|_| rank_calls::room_for_long_lists_is_allocated(2));
}

/// One rank's call uses the transport (log-probabilities, an unsupported filter, a list); the other call uses the GPUs.
#[test]
fn ranks_name_the_parameter_of_a_mismatched_host_call_within_the_time_limit() {
    for factory in [TWO, ranks(GpuExchange::Nccl, Gpus::Each, Some(2))] {
        factory.run(|of| rank_calls::mismatched_host_calls_are_named(of.exchange, of.gpus));
    }
}
