//! Ranks whose weight and hidden states are in device memory of the caller.

use super::{Gpus, load_kernels, of_cuda, ranks, ranks_in_place, two_ranks};
use crate::backends::gpu_memory::{Copied, CopiedHidden};
use crate::backends::{assert_same, reference};
use flash_sampling::distributed::Loopback;
use flash_sampling::{BuildError, CudaRank, CudaRankOptions, GpuExchange};
use flash_sampling_conformance::SamplerFactory;
use flash_sampling_conformance::problem::{Problem, Size};
use flash_sampling_core::reference::ReferenceVariant;
use flash_sampling_core::{DType, Knob, LogprobsMode, PerturbedArgmax, Plan, RowParams, SampleError, Samples};
use flash_sampling_cuda::{CudaError, CudaTiled, Device};
use std::time::Duration;

/// Rows of `kinds` in turn, each at a position of its own.
fn rows(count: usize, kinds: &[RowParams<'static>]) -> Vec<RowParams<'static>> {
    (0..count).map(|r| RowParams { position: r as u64, ..kinds[r % kinds.len()] }).collect()
}

/// Compares ranks over device memory, ranks over host memory and the reference.
pub(crate) fn results_have_the_reference_bits(gpus: Gpus, world: u32) {
    const ROWS: usize = 30;
    const MASK: [u32; 94] = [0xfeed_beef; 94];
    let problem = Problem::integers(Size::new(ROWS, 3008, 64), DType::BF16, DType::BF16, 31);
    let plan = Plan { max_rows: ROWS, max_draws: 4, max_logprobs: Some(3), canonical: false };
    let base = RowParams { seed: 32, temperature: 90.0, ..RowParams::default() };
    let plain = [
        base,
        RowParams { temperature: 0.0, ..base },
        RowParams { draws: 3, first_draw: 2, ..base },
        RowParams { mask: Some(&MASK), logit_bias: &[(3, 1.0), (1700, 20.0)], ..base },
    ];
    let filters = [
        RowParams { top_k: 20, draws: 2, ..base },
        RowParams { min_p: 0.02, ..base },
        base,
        RowParams { top_p: 0.9, ..base },
        RowParams { top_k: 50, top_p: 0.9, ..base },
        RowParams { top_p: 0.4, draws: 3, ..base },
    ];
    let by_transport = [
        RowParams { logprobs: Some(3), draws: 2, ..base },
        RowParams { draws: 4, without_replacement: true, ..base },
        RowParams { typical_p: 0.7, kept: true, ..base },
        RowParams { logprobs: Some(2), logprobs_mode: LogprobsMode::Raw, ..base },
        RowParams { min_p: 0.02, logprobs: Some(1), ..base },
    ];
    let bad = [RowParams { temperature: f32::NAN, ..base }, RowParams { draws: 9, ..base }];
    let calls = [
        ("plain", rows(ROWS, &plain)),
        ("plain and bad", rows(ROWS, &[&plain[..], &bad].concat())),
        ("filters", rows(ROWS, &filters)),
        ("filters and bad", rows(ROWS, &[&filters[..], &bad].concat())),
        ("by the transport", rows(ROWS, &by_transport)),
        ("of all kinds", rows(ROWS, &[&plain[..], &filters, &by_transport, &bad].concat())),
        ("bad", rows(ROWS, &bad)),
    ];
    let build = |factory: super::GpuRanks| factory.build(problem.head(), plan).unwrap();
    let mut on_host = build(ranks(GpuExchange::Peers, gpus, Some(world)));
    let mut on_device = build(ranks_in_place(GpuExchange::Peers, gpus, Some(world)));
    let is_hopper = Device::new(0).unwrap().capability() == (9, 0);
    let mut found = Samples::new();
    for (name, rows) in &calls {
        let want = reference(&problem, plan, ReferenceVariant::Tiled, rows);
        for (memory, ranks) in [("host", &mut on_host), ("device", &mut on_device)] {
            ranks.sample(problem.input(), rows, &mut found).unwrap();
            assert_same(&found, &want, &format!("{name}, {world} ranks, {memory} memory"));
            // Lists decide these rows in one pass: each has all tokens of its shard.
            let is_listed = |row: &RowParams<'_>| is_hopper && *name == "filters" && row.top_k == 20;
            for (r, _) in rows.iter().enumerate().filter(|(_, row)| is_listed(row)) {
                assert_eq!(found.row(r).unwrap().passes, 1, "row {r}, {world} ranks, {memory} memory");
            }
        }
    }
}

/// One rank reads hidden states on the host, the other on the device. The group continues.
pub(crate) fn other_memory_is_named() {
    let problem = Problem::integers(Size::new(2, 900, 64), DType::BF16, DType::BF16, 5);
    let plan = Plan { max_rows: 2, ..Plan::default() };
    load_kernels(&problem, plan);
    let stream = Device::new(0).unwrap().context().new_stream().unwrap();
    let copied = CopiedHidden::new(problem.input(), &stream);
    let rows = [3, 4].map(|seed| RowParams { seed, ..RowParams::default() });
    let want = reference(&problem, plan, ReferenceVariant::Tiled, &rows);
    let limit = Duration::from_secs(4);
    two_ranks(problem.head(), plan, limit, Gpus::One, CudaRankOptions::default(), |rank, mut sampler| {
        let mut out = Samples::new();
        for _ in 0..2 {
            sampler.sample_device(&copied.hidden, &rows, &mut out).unwrap();
            assert_same(&out, &want, &format!("rank {rank}, device memory"));
            let outcome = match rank {
                0 => sampler.sample(problem.input(), &rows, &mut out),
                _ => sampler.sample_device(&copied.hidden, &rows, &mut out),
            };
            assert!(out.is_empty());
            let expected = CudaError::OtherCall { rank: Some(1 - rank), row: Some(0) };
            assert_eq!(of_cuda(outcome.unwrap_err()), expected);
            sampler.sample(problem.input(), &rows, &mut out).unwrap();
            assert_same(&out, &want, &format!("rank {rank}, host memory"));
        }
    });
}

/// In a call with filters, one rank has hidden states at addresses that are not multiples of 16 bytes, and then all
/// ranks have such hidden states. Calls without filters do not depend on the alignment.
pub(crate) fn other_alignment_is_named() {
    let problem = Problem::integers(Size::new(2, 900, 64), DType::BF16, DType::BF16, 5);
    let plan = Plan { max_rows: 2, ..Plan::default() };
    let stream = Device::new(0).unwrap().context().new_stream().unwrap();
    let aligned = CopiedHidden::new(problem.input(), &stream);
    let misaligned = CopiedHidden::with_gaps(problem.input(), 2, &stream);
    let plain = [3, 4].map(|seed| RowParams { seed, ..RowParams::default() });
    let filtered = plain.map(|row| RowParams { top_k: 20, ..row });
    let [drawn, kept] = [plain, filtered].map(|rows| reference(&problem, plan, ReferenceVariant::Tiled, &rows));
    // Loads the kernels of all calls: a load could block behind a rank that waits on the same GPU.
    let transport = Loopback::group(1).remove(0);
    let mut alone = CudaRank::new(problem.head(), plan, transport, &CudaRankOptions::default()).unwrap();
    for (hidden, rows) in [(&aligned, &plain), (&aligned, &filtered), (&misaligned, &plain), (&misaligned, &filtered)] {
        alone.sample_device(&hidden.hidden, rows, &mut Samples::new()).unwrap();
    }
    let is_hopper = Device::new(0).unwrap().capability() == (9, 0);
    let limit = Duration::from_secs(4);
    two_ranks(problem.head(), plan, limit, Gpus::One, CudaRankOptions::default(), |rank, mut sampler| {
        let mut out = Samples::new();
        let own = [&aligned, &misaligned][rank];
        for _ in 0..2 {
            sampler.sample_device(&own.hidden, &plain, &mut out).unwrap();
            assert_same(&out, &drawn, &format!("rank {rank}, no filters"));
            let outcome = sampler.sample_device(&own.hidden, &filtered, &mut out);
            match is_hopper {
                true => {
                    let expected = CudaError::OtherCall { rank: Some(1 - rank), row: Some(0) };
                    assert_eq!(of_cuda(outcome.unwrap_err()), expected);
                }
                false => outcome.unwrap(),
            }
            for hidden in [&misaligned, &aligned] {
                sampler.sample_device(&hidden.hidden, &filtered, &mut out).unwrap();
                assert_same(&out, &kept, &format!("rank {rank}, filters"));
            }
        }
    });
}

/// Another GPU, another width, another number of rows, and a canonical plan. The sampler also takes host memory.
pub(crate) fn calls_that_do_not_fit_are_refused() {
    let problem = Problem::integers(Size::new(2, 900, 64), DType::BF16, DType::BF16, 5);
    let narrow = Problem::integers(Size::new(2, 900, 56), DType::BF16, DType::BF16, 5);
    let plan = Plan { max_rows: 2, ..Plan::default() };
    let device = Device::new(0).unwrap();
    let stream = device.context().new_stream().unwrap();
    let copy = || Copied::on(&device, stream.clone(), problem.head(), plan).unwrap();
    let transport = || Loopback::group(1).swap_remove(0);
    let [hidden, other] = [&problem, &narrow].map(|problem| CopiedHidden::new(problem.input(), &stream));
    let rows = [3, 4].map(|seed| RowParams { seed, ..RowParams::default() });
    let want = reference(&problem, plan, ReferenceVariant::Tiled, &rows);
    let mut out = Samples::new();

    let Copied { sampler, held: _held, .. } = copy();
    let options = CudaRankOptions { device: 1, ..CudaRankOptions::default() };
    let refused = CudaRank::in_place(sampler, transport(), &options).err();
    assert!(matches!(refused, Some(BuildError::Cuda(CudaError::NotSharded { .. }))), "{refused:?}");

    let Copied { sampler, held: _held, .. } = copy();
    let mut rank = CudaRank::in_place(sampler, transport(), &CudaRankOptions::default()).unwrap();
    for hidden in [&hidden, &other, &hidden] {
        let outcome = rank.sample_device(&hidden.hidden, &rows, &mut out);
        if hidden.hidden.matrix().cols == 56 {
            assert!(matches!(outcome, Err(SampleError::Hidden { found: 56, expected: 64 })), "{outcome:?}");
            let outcome = rank.sample_device(&hidden.hidden, &rows[..1], &mut out);
            assert!(outcome.is_err() && out.is_empty());
        } else {
            outcome.unwrap();
            assert_same(&out, &want, "device memory");
        }
    }
    let outcome = rank.sample_device(&hidden.hidden, &rows[..1], &mut out);
    assert!(matches!(outcome, Err(SampleError::RowCount { rows: 2, params: 1 })), "{outcome:?}");
    rank.sample(problem.input(), &rows, &mut out).unwrap();
    assert_same(&out, &want, "host memory");

    let canonical = Plan { canonical: true, ..plan };
    let mut rank = CudaRank::new(problem.head(), canonical, transport(), &CudaRankOptions::default()).unwrap();
    let error = rank.sample_device(&hidden.hidden, &rows, &mut out).unwrap_err();
    assert_eq!(of_cuda(error), CudaError::Unsupported { knob: Knob::Canonical });
    assert!(out.is_empty());

    let Copied { sampler, held: _held, .. } = copy();
    CudaTiled::try_from(sampler).unwrap().sample(problem.input(), &rows, &mut out).unwrap();
    assert_same(&out, &want, "one GPU, host memory");
}
