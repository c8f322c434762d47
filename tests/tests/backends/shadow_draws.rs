//! Heads of all kinds for comparisons of draws with and without a shadow, and a comparison of many draws.

use super::assert_same;
use super::shadow::WithShadow;
use flash_sampling_conformance::SamplerFactory;
use flash_sampling_conformance::problem::{Problem, Size};
use flash_sampling_conformance::suite::effort;
use flash_sampling_conformance::tensor::Tensor;
use flash_sampling_conformance::trial::Effort;
use flash_sampling_core::{DType, Plan, RowParams, Samples};

/// Returns a real number below 1 in absolute value, often small.
fn real(i: usize, k: usize) -> f32 {
    let x = (i as u64).wrapping_mul(0x9e37_79b9_7f4a_7c15) ^ (k as u64).wrapping_mul(0xd1b5_4a32_d192_ed03);
    let x = (x ^ x >> 29).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    (((x ^ x >> 32) as u32) as i32 as f32 * 2f32.powi(-31)).powi(3)
}

/// The product of a tensor's element and a factor.
pub(crate) fn scaled(tensor: &Tensor, dtype: DType, factor: impl Fn(usize, usize, f32) -> f32) -> Tensor {
    let rows: Vec<Vec<f32>> = (0..tensor.rows()).map(|row| tensor.row(row)).collect();
    Tensor::from_fn(dtype, tensor.rows(), tensor.cols(), |i, k| factor(i, k, rows[i][k]))
}

/// Heads of all kinds, named.
pub(crate) fn problems(size: Size, dtype: DType) -> Vec<(&'static str, Problem)> {
    let base = Problem::gaussian(size, dtype, dtype, 31);
    let weight = |factor: &dyn Fn(usize, usize, f32) -> f32| Problem {
        weight: scaled(&base.weight, dtype, factor),
        ..base.clone()
    };
    let hidden = |factor: &dyn Fn(usize, usize, f32) -> f32| Problem {
        hidden: scaled(&base.hidden, dtype, factor),
        ..base.clone()
    };
    let towards = |strength: f32| {
        let rows: Vec<Vec<f32>> = (0..size.rows).map(|r| base.weight.row(r * 37 % size.vocab)).collect();
        let norm = |row: &[f32]| row.iter().map(|x| x * x).sum::<f32>().sqrt().max(1e-6);
        hidden(&|r, k, h| h + strength * rows[r][k] / norm(&rows[r]).powi(2))
    };
    let large = if dtype == DType::F16 { 8.0 } else { 1e6 };
    vec![
        ("gaussian", base.clone()),
        ("peaked", towards(12.0)),
        ("like a language model", like_language_model(&base, dtype)),
        ("sharp", towards(40.0)),
        ("flat", hidden(&|_, _, h| h * 1e-3)),
        ("hot", hidden(&|_, _, h| h * 30.0)),
        ("norms of all sizes", weight(&|i, _, w| w * 2f32.powi((i % 13) as i32 - 9))),
        ("a large column", weight(&|_, k, w| if k == 3 { 64.0 } else { w })),
        ("a large column of other signs", weight(&|i, k, w| if k == 3 { [64.0, -64.0][i % 2] } else { w })),
        ("an outlier of the hidden states", hidden(&|_, k, h| if k == 5 { large } else { h })),
        ("ties", weight(&|i, k, _| real(i % 3, k))),
        ("zeros", weight(&|_, _, _| 0.0)),
        ("zero states", hidden(&|_, _, _| 0.0)),
        ("rows of zeros", weight(&|i, _, w| if i % 5 == 0 { 0.0 } else { w })),
        ("subnormals", weight(&|_, _, w| w * if dtype == DType::F16 { 1e-6 } else { 1e-38 })),
        ("subnormal states", hidden(&|_, _, h| h * if dtype == DType::F16 { 1e-6 } else { 1e-38 })),
        ("huge", weight(&|_, _, w| w * if dtype == DType::F16 { 1e3 } else { 1e30 })),
        ("a NaN", weight(&|i, k, w| if (i, k) == (9, 2) { f32::NAN } else { w })),
        ("an infinity", weight(&|i, k, w| if (i, k) == (9, 2) { f32::INFINITY } else { w })),
        ("a NaN in some states", hidden(&|r, k, h| if r % 3 == 1 && k == 2 { f32::NAN } else { h })),
        ("an infinity in some states", hidden(&|r, k, h| if r % 3 == 1 && k == 2 { f32::INFINITY } else { h })),
        (
            "a bias",
            Problem {
                bias: Some(
                    (0..size.vocab).map(|t| if t % 11 == 0 { f32::NEG_INFINITY } else { (t % 7) as f32 }).collect(),
                ),
                scale: Some(0.7),
                ..base.clone()
            },
        ),
        ("a soft-cap", Problem { soft_cap: Some(5.0), ..base.clone() }),
        ("padding", Problem { vocab_size: Some(size.vocab - size.vocab / 3), ..base.clone() }),
    ]
}

/// Adds six large logits to every row, at most 12 above the other logits.
fn like_language_model(base: &Problem, dtype: DType) -> Problem {
    let vocab = base.weight.rows();
    let states: Vec<Vec<f32>> = (0..base.rows())
        .map(|r| {
            let mut state = base.hidden.row(r);
            for (i, logit) in [12.0f32, 11.0, 10.0, 9.0, 8.0, 7.0].into_iter().enumerate() {
                let row = base.weight.row((r * 37 + i * 1013) % vocab);
                let square = row.iter().map(|x| x * x).sum::<f32>().max(1e-6);
                state.iter_mut().zip(&row).for_each(|(h, w)| *h += logit * w / square);
            }
            state
        })
        .collect();
    let hidden = Tensor::from_fn(dtype, base.rows(), base.hidden.cols(), |r, k| states[r][k]);
    Problem { hidden, ..base.clone() }
}

/// The draws of a comparison, all of calls that read the shadow alone.
const DRAWS: usize = 1_000_000;

/// The rows of a call, and the draws of each row.
#[derive(Clone, Copy, Debug)]
pub(crate) struct CallSize {
    pub(crate) rows: usize,
    pub(crate) draws: u32,
}

/// Compares draws with and without a shadow bit by bit, over [heads of all kinds](problems), until [`DRAWS`] draws were
/// of calls without a row that [fell back](Samples::fallback_rows). With [`Effort::Sample`], an eighth of these draws.
pub(crate) fn draws_have_equal_bits<F: SamplerFactory + Copy>(factory: F, size: Size, calls: &[CallSize]) {
    let wanted = if effort() == Effort::Sample { DRAWS / 8 } else { DRAWS };
    let most = |of: fn(&CallSize) -> usize| calls.iter().map(of).max().unwrap_or(0);
    let plan = Plan { max_rows: most(|c| c.rows), max_draws: most(|c| c.draws as usize) as u32, ..Plan::default() };
    let heads = problems(size, DType::BF16);
    let mut samplers: Vec<_> = heads
        .iter()
        .map(|(_, problem)| {
            let build = |factory: &dyn SamplerFactory| factory.build(problem.head(), plan).unwrap();
            (build(&factory), build(&WithShadow(factory)))
        })
        .collect();
    let (mut want, mut found) = (Samples::new(), Samples::new());
    let (mut compared, mut by_shadow) = (vec![0; heads.len()], vec![0; heads.len()]);
    // A call has 16 draws or more.
    let most_turns = wanted / heads.len();
    for turn in 0..most_turns {
        for (at, ((name, problem), (plain, shadowed))) in heads.iter().zip(&mut samplers).enumerate() {
            // Heads that rarely read the shadow have fewer calls.
            if turn % 16 > 0 && 4 * by_shadow[at] < compared[at] {
                continue;
            }
            let call = calls[(turn + at) % calls.len()];
            let first = turn % (size.rows + 1 - call.rows);
            let input = problem.input().row_range(first..first + call.rows);
            let row = |r: usize| RowParams {
                seed: (turn * size.rows + r) as u64,
                position: at as u64,
                draws: call.draws,
                temperature: [1.0, 0.7, 0.3, 1.5, 0.1, 2.0][(turn + r) % 6],
                ..RowParams::default()
            };
            let rows: Vec<_> = (0..call.rows).map(row).collect();
            plain.sample(input, &rows, &mut want).unwrap();
            shadowed.sample(input, &rows, &mut found).unwrap();
            assert_same(&found, &want, &format!("{}, {name}, turn {turn}", factory.name()));
            assert_eq!(want.fallback_rows(), 0, "{name}");
            let draws: usize = found.iter().flatten().map(|row| row.draws.len()).sum();
            compared[at] += draws;
            let is_by_shadow = shadowed.capabilities().shadow && found.fallback_rows() == 0;
            by_shadow[at] += if is_by_shadow { draws } else { 0 };
        }
        if by_shadow.iter().sum::<usize>() >= wanted {
            break;
        }
    }
    let shares = heads.iter().zip(by_shadow.iter().zip(&compared));
    let of_heads: Vec<_> = shares.map(|((name, _), (some, all))| format!("{name}: {some} of {all}")).collect();
    let (total, compared): (usize, usize) = (by_shadow.iter().sum(), compared.iter().sum());
    println!("{}: {compared} draws have equal bits, {total} by the shadow ({})", factory.name(), of_heads.join(", "));
    assert!(total >= wanted, "only {total} of {compared} draws read the shadow alone: {}", of_heads.join(", "));
    for name in ["gaussian", "peaked", "like a language model", "norms of all sizes"] {
        let at = heads.iter().position(|(of, _)| *of == name).unwrap();
        assert!(by_shadow[at] > 0, "no draw of {name} read the shadow alone");
    }
}
