//! With a canonical plan, tokens are the same on every instruction set and on GPUs.

mod backends;

use backends::gpu::Gpu;
use backends::referee::Referee;
use backends::{Cpu, Kind};
use flash_sampling_conformance::SamplerFactory;
use flash_sampling_conformance::data::normal;
use flash_sampling_conformance::problem::{Problem, Size};
use flash_sampling_conformance::suite::runs;
use flash_sampling_conformance::tensor::Tensor;
use flash_sampling_core::{DType, Plan, RowParams, Samples};
use flash_sampling_cpu::Isa;

const ROWS: usize = 64;
const DRAWS: usize = 256;

/// Returns the tokens of `calls` calls of 64 rows with 256 draws each.
fn tokens(factory: &dyn SamplerFactory, problem: &Problem, canonical: bool, calls: u64) -> Vec<u32> {
    let plan = Plan { max_rows: ROWS, max_draws: DRAWS as u32, max_logprobs: None, canonical };
    let mut sampler = factory.build(problem.head(), plan).expect("the head and plan are valid");
    let (mut tokens, mut out) = (Vec::new(), Samples::new());
    for call in 0..calls {
        let rows: Vec<RowParams<'_>> = (0..ROWS as u64)
            .map(|r| RowParams { seed: 7 + r, position: call, draws: DRAWS as u32, ..RowParams::default() })
            .collect();
        sampler.sample(problem.input(), &rows, &mut out).expect("the call is within the plan");
        for row in out.iter() {
            tokens.extend(row.expect("the logits are finite").draws.iter().map(|d| d.token));
        }
    }
    tokens
}

/// Returns tiled samplers for the instruction sets of this machine and its GPU.
fn samplers() -> Vec<Box<dyn SamplerFactory>> {
    let cpu = Isa::ALL.into_iter().map(|isa| Box::new(Cpu::new(Kind::Tiled, isa)) as Box<dyn SamplerFactory>);
    let all = cpu.chain([Box::new(Gpu::TILED) as Box<dyn SamplerFactory>]);
    all.filter(|factory| runs(&factory.name(), factory.unavailable(), 4)).collect()
}

/// Makes logits near 500 with many near ties. There float32 values are 3e-5 apart, and sums of 512 products differ by
/// several such steps between instruction sets.
fn large_logits() -> Problem {
    let size = Size::new(ROWS, 301, 512);
    let weight = Tensor::from_fn(DType::BF16, size.vocab, size.hidden, |i, k| {
        (1.0 + 0.05 * normal(31, (i * size.hidden + k) as u64)) as f32
    });
    let hidden = Tensor::from_fn(DType::BF16, size.rows, size.hidden, |r, k| {
        (1.0 + normal(32, (r * size.hidden + k) as u64)) as f32
    });
    Problem::new(weight, hidden)
}

#[test]
fn canonical_tokens_agree_across_instruction_sets_and_gpus_on_millions_of_draws() {
    let problem = Problem::gaussian(Size::new(ROWS, 131, 64), DType::BF16, DType::BF16, 33);
    let mut want: Option<Vec<u32>> = None;
    for factory in samplers() {
        let found = tokens(&*factory, &problem, true, 128);
        let want = want.get_or_insert_with(|| found.clone());
        assert!(found == *want, "{} differs from the others", factory.name());
    }
    let count = want.map_or(0, |tokens| tokens.len());
    assert!(count >= 2_000_000, "{count} draws");
}

/// Uses a larger vocabulary and hidden size, with logits of standard deviation 2 or 20. At 20, one token has nearly all
/// of the mass.
#[test]
fn canonical_tokens_agree_on_gaussian_and_peaked_heads() {
    for (sharpness, seed) in [(1.0, 34), (10.0, 35)] {
        let size = Size::new(ROWS, 5003, 200);
        let mut problem = Problem::gaussian(size, DType::BF16, DType::BF16, seed);
        problem.hidden =
            Tensor::from_fn(DType::BF16, size.rows, size.hidden, |r, k| sharpness * problem.hidden.row(r)[k]);
        let mut want: Option<Vec<u32>> = None;
        for factory in samplers() {
            let found = tokens(&*factory, &problem, true, 1);
            let want = want.get_or_insert_with(|| found.clone());
            assert!(found == *want, "{} differs from the others, {sharpness} times as peaked", factory.name());
        }
    }
}

/// Compares lists without replacement, log-probabilities and greedy rows under a canonical plan with the reference.
#[test]
fn canonical_lists_and_logprobs_have_the_bits_of_the_reference() {
    let mut problem = large_logits();
    problem.soft_cap = Some(900.0);
    let plan = Plan { max_rows: ROWS, max_draws: 40, max_logprobs: Some(9), canonical: true };
    let far: Vec<(u32, f32)> = (0..301).map(|token| (token, -1e30)).collect();
    let rows: Vec<RowParams<'_>> = (0..ROWS)
        .map(|r| {
            let base = RowParams { seed: r as u64, position: 3, draws: 5, ..RowParams::default() };
            match r % 5 {
                0 => RowParams { draws: 40, without_replacement: true, logprobs: Some(9), ..base },
                1 => RowParams { temperature: 0.0, logprobs: Some(1), ..base },
                2 => RowParams { temperature: 0.0, without_replacement: true, ..base },
                3 => RowParams { mask: Some(&[0xf0f0_1234; 10]), temperature: 0.9, logprobs: Some(0), ..base },
                // Every logit is far below the range of the bounds, so the whole row is evaluated canonically.
                _ => RowParams { logit_bias: &far, ..base },
            }
        })
        .collect();
    let (mut want, mut found) = (Samples::new(), Samples::new());
    Referee("tiled").build(problem.head(), plan).unwrap().sample(problem.input(), &rows, &mut want).unwrap();
    for factory in samplers() {
        factory.build(problem.head(), plan).unwrap().sample(problem.input(), &rows, &mut found).unwrap();
        for (r, (found, want)) in found.iter().zip(want.iter()).enumerate() {
            let (found, want) = (found.unwrap(), want.unwrap());
            assert_eq!(found.draws, want.draws, "row {r} of {}", factory.name());
            assert_eq!(found.top, want.top, "row {r} of {}", factory.name());
            assert_eq!(found.log_z.is_some(), want.log_z.is_some());
            let apart = found.log_z.zip(want.log_z).map_or(0.0, |(a, b)| (a - b).abs());
            assert!(apart < 1e-2, "row {r} of {}: log Z is {apart} off", factory.name());
        }
    }
}

#[test]
fn canonical_tokens_agree_where_rounding_decides() {
    let problem = large_logits();
    let mut canonical = tokens(&Referee("tiled"), &problem, true, 2);
    let reference = canonical.len();
    let mut rounded = 0;
    for factory in samplers() {
        let found = tokens(&*factory, &problem, true, 16);
        assert!(found[..reference] == canonical[..reference], "{} differs from the reference", factory.name());
        if canonical.len() == reference {
            canonical = found;
        } else {
            assert!(found == canonical, "{} differs from the others", factory.name());
        }
        // The control: without the canonical plan, rounding decides some of these draws.
        let plain = tokens(&*factory, &problem, false, 16);
        let differ = plain.iter().zip(&canonical).filter(|(a, b)| a != b).count();
        println!("{differ} of {} plain draws of {} are decided by rounding", canonical.len(), factory.name());
        rounded += differ;
    }
    assert!(rounded > 0, "the inputs are too tame to show anything");
}
