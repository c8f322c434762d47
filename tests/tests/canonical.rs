//! With a canonical plan the token is the same on every instruction set.

mod backends;

use backends::{Cpu, Kind, Referee};
use flash_sampling_conformance::SamplerFactory;
use flash_sampling_conformance::data::normal;
use flash_sampling_conformance::problem::{Problem, Size};
use flash_sampling_conformance::suite::runs;
use flash_sampling_conformance::tensor::Tensor;
use flash_sampling_core::{DType, Plan, RowParams, Samples};
use flash_sampling_cpu::Isa;

const ROWS: usize = 64;
const DRAWS: usize = 256;

/// The tokens of `calls` calls of 64 rows with 256 draws each.
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

/// The instruction sets of this machine, as tiled samplers.
fn samplers() -> Vec<Cpu> {
    let all = Isa::ALL.into_iter().map(|isa| Cpu::new(Kind::Tiled, isa));
    all.filter(|factory| runs(&factory.name(), factory.unavailable(), 1)).collect()
}

/// Logits near 500, where float32 steps by 3e-5 and sums of 512 products differ by several steps between instruction
/// sets: near ties are common.
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
fn canonical_tokens_agree_across_instruction_sets_on_millions_of_draws() {
    let problem = Problem::gaussian(Size::new(ROWS, 131, 64), DType::BF16, DType::BF16, 33);
    let mut want: Option<Vec<u32>> = None;
    for factory in samplers() {
        let found = tokens(&factory, &problem, true, 128);
        let want = want.get_or_insert_with(|| found.clone());
        assert!(found == *want, "{} differs from the others", factory.name());
    }
    let count = want.map_or(0, |tokens| tokens.len());
    assert!(count >= 2_000_000, "{count} draws");
}

#[test]
fn canonical_tokens_agree_where_rounding_decides() {
    let problem = large_logits();
    let mut canonical = tokens(&Referee, &problem, true, 2);
    let reference = canonical.len();
    let mut rounded = 0;
    for factory in samplers() {
        let found = tokens(&factory, &problem, true, 16);
        assert!(found[..reference] == canonical[..reference], "{} differs from the reference", factory.name());
        if canonical.len() == reference {
            canonical = found;
        } else {
            assert!(found == canonical, "{} differs from the others", factory.name());
        }
        // The control: without the canonical plan, rounding decides some of these draws.
        let plain = tokens(&factory, &problem, false, 16);
        rounded += plain.iter().zip(&canonical).filter(|(a, b)| a != b).count();
    }
    println!("{rounded} of {} plain draws are decided by rounding", canonical.len());
    assert!(rounded > 0, "the inputs are too tame to show anything");
}
