//! The suite on the CPU backend, for every variant on every instruction set, and tests of this backend only.

mod backends;

use backends::{Cpu, Kind, Trickle};
use flash_sampling_conformance::problem::{Problem, Size};
use flash_sampling_conformance::trial::RowBits;
use flash_sampling_conformance::{SamplerFactory, suite};
use flash_sampling_core::{DType, Plan, RowParams, Samples, StreamError, StreamHead};
use flash_sampling_cpu::{CpuOptions, Isa, OnlineStream};

suite!(tiled_portable, Cpu::new(Kind::Tiled, Isa::Portable));
suite!(tiled_avx2, Cpu::new(Kind::Tiled, Isa::Avx2));
suite!(tiled_avx512, Cpu::new(Kind::Tiled, Isa::Avx512));
suite!(tiled_avx512bf16, Cpu::new(Kind::Tiled, Isa::Avx512Bf16));
suite!(tiled_amx, Cpu::new(Kind::Tiled, Isa::Amx));
suite!(tiled_neon, Cpu::new(Kind::Tiled, Isa::Neon));

suite!(standalone_portable, Cpu::new(Kind::Standalone, Isa::Portable));
suite!(standalone_avx2, Cpu::new(Kind::Standalone, Isa::Avx2));
suite!(standalone_avx512, Cpu::new(Kind::Standalone, Isa::Avx512));
suite!(standalone_neon, Cpu::new(Kind::Standalone, Isa::Neon));

suite!(grouped_portable, Cpu::new(Kind::Grouped, Isa::Portable));
suite!(grouped_avx2, Cpu::new(Kind::Grouped, Isa::Avx2));
suite!(grouped_avx512, Cpu::new(Kind::Grouped, Isa::Avx512));
suite!(grouped_avx512bf16, Cpu::new(Kind::Grouped, Isa::Avx512Bf16));
suite!(grouped_amx, Cpu::new(Kind::Grouped, Isa::Amx));
suite!(grouped_neon, Cpu::new(Kind::Grouped, Isa::Neon));

suite!(online_portable, Cpu::new(Kind::Online, Isa::Portable));
suite!(online_avx2, Cpu::new(Kind::Online, Isa::Avx2));
suite!(online_avx512, Cpu::new(Kind::Online, Isa::Avx512));
suite!(online_avx512bf16, Cpu::new(Kind::Online, Isa::Avx512Bf16));
suite!(online_amx, Cpu::new(Kind::Online, Isa::Amx));
suite!(online_neon, Cpu::new(Kind::Online, Isa::Neon));

suite!(stream_portable, Cpu::new(Kind::Stream, Isa::Portable));
suite!(stream_avx512, Cpu::new(Kind::Stream, Isa::Avx512));
suite!(stream_neon, Cpu::new(Kind::Stream, Isa::Neon));

const PLAN: Plan = Plan { max_rows: 40, max_draws: 3, max_logprobs: Some(3), canonical: false };

fn rows() -> Vec<RowParams<'static>> {
    let row = |r: u64| RowParams {
        seed: r / 3,
        position: r,
        draws: 3,
        temperature: [1.0, 0.0, 0.7][r as usize % 3],
        logprobs: Some(3),
        ..RowParams::default()
    };
    (0..40).map(row).collect()
}

#[test]
fn results_do_not_depend_on_the_number_of_threads() {
    let problem = Problem::gaussian(Size::new(40, 3001, 70), DType::BF16, DType::BF16, 1);
    let kinds = [Kind::Tiled, Kind::Standalone, Kind::Grouped, Kind::Online];
    for (kind, isa) in kinds.into_iter().flat_map(|kind| Isa::available().into_iter().map(move |isa| (kind, isa))) {
        let bits = |factory: Cpu| {
            let mut out = Samples::new();
            let mut sampler = factory.build(problem.head(), PLAN).expect("the head and plan are valid");
            sampler.sample(problem.input(), &rows(), &mut out).expect("the call is within the plan");
            RowBits::all(&out)
        };
        let want = bits(Cpu::new(kind, isa));
        for threads in [1, 2, 3, 7] {
            assert_eq!(bits(Cpu::new(kind, isa).with_threads(threads)), want, "{kind:?}, {isa}, {threads} threads");
        }
    }
}

#[test]
fn a_stream_that_ends_early_is_an_error_that_names_the_token() -> Result<(), Box<dyn std::error::Error>> {
    let problem = Problem::gaussian(Size::new(40, 2101, 70), DType::BF16, DType::BF16, 2);
    let bytes = problem.weight.matrix().bytes();
    let mut out = Samples::new();
    let head = StreamHead::new(2101, 70, DType::BF16);
    let mut stream = OnlineStream::new(head, PLAN, 512, &CpuOptions::default())?;
    for (rows_there, token) in [(0, 0), (500, 0), (513, 512), (2100, 2048)] {
        let mut reader = Trickle(bytes[..rows_there * 140].iter().copied());
        let failed = stream.sample(&mut reader, problem.input(), &rows(), &mut out);
        assert!(matches!(failed, Err(StreamError::Read { token: t, .. }) if t == token), "{failed:?}");
    }
    let mut whole = Trickle(bytes.iter().copied());
    stream.sample(&mut whole, problem.input(), &rows(), &mut out)?;
    assert!(out.iter().all(|row| row.is_ok()));
    Ok(())
}
