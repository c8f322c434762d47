//! Runs draws with filters on the processor: from the list of one GPU, from the lists of several ranks, and from all
//! logits. The system's C++ compiler builds the kernels' own headers, and the tests compare every draw with the reference.

use crate::emulated::{self, Input, Output};
use flash_sampling_core::reference::{Reference, ReferenceVariant};
use flash_sampling_core::{Head, Matrix, Order, PerturbedArgmax, Plan, RowParams, Samples, f16};
use std::path::{Path, PathBuf};
use std::sync::LazyLock;

/// The program of all tests here.
static PROGRAM: LazyLock<Option<PathBuf>> = LazyLock::new(|| emulated::program("lists"));

const DRAWS: u32 = 250;

/// The output for a draw: its status, then token, score and logit.
type DrawWords = [u32; 4];

/// Returns the kernels' draws. The tokens of each shard that reach `cut` are its list.
fn found(program: &Path, params: &RowParams<'_>, shards: u32, cut: f32, logits: &[f32]) -> Vec<DrawWords> {
    kernel_draws(program, params, (shards, cut), logits, &[])
}

/// Returns the kernels' draws: from lists, or, with no shards, from all logits, with the maxima of granules if there are
/// any. A status of 0x100 says that the maxima selected exactly the tokens that min-p and top-k keep.
fn kernel_draws(
    program: &Path,
    params: &RowParams<'_>,
    lists: (u32, f32),
    logits: &[f32],
    maxima: &[f16],
) -> Vec<DrawWords> {
    let draws: Vec<[u32; 4]> = output(program, params, lists, logits, maxima).list(params.draws as usize);
    draws.into_iter().map(|[token, score, logit, status]| [status, token, score, logit]).collect()
}

/// Returns the maxima of granules by the kernel, as the bits of f16.
fn kernel_maxima(program: &Path, params: &RowParams<'_>, logits: &[f32], maxima: &[f16]) -> Vec<u16> {
    let mut output = output(program, params, (0, 0.0), logits, maxima);
    output.list::<[u32; 4]>(params.draws as usize);
    output.list(maxima.len())
}

/// Returns the output of the program: its draws, then the maxima of granules if it was given maxima.
fn output(program: &Path, params: &RowParams<'_>, (shards, cut): (u32, f32), logits: &[f32], maxima: &[f16]) -> Output {
    let mut input = Input::default();
    let ln_min_p = if params.min_p > 0.0 { f64::from(params.min_p).ln() } else { f64::NEG_INFINITY };
    input.put(ln_min_p);
    let is_min_p_last = u32::from(params.order == Order::LlamaCpp);
    input.put([params.top_p.to_bits(), params.top_k, 1.0f32.to_bits(), is_min_p_last]);
    input.put([params.seed, params.position]);
    // 128: the most tokens that a rank sends for a row.
    input.put([(1.0 / params.temperature).to_bits(), params.draws, shards, 128, cut.to_bits()]);
    input.put(logits.len() as u32);
    input.put_all(logits.iter().copied());
    input.put(maxima.len() as u32);
    input.put_all(maxima.iter().map(|largest| largest.to_bits()));
    emulated::answer(program, input)
}

fn wanted(params: RowParams<'_>, logits: &[f32]) -> Vec<DrawWords> {
    let head = Head::new(Matrix::new(logits, logits.len(), 1).unwrap()).unwrap();
    let plan = Plan { max_draws: DRAWS, ..Plan::default() };
    let mut out = Samples::new();
    let hidden = [1.0f32];
    let input = Matrix::new(&hidden, 1, 1).unwrap();
    Reference::new(head, plan, ReferenceVariant::Tiled).sample(input, &[params], &mut out).unwrap();
    let draws = out.iter().next().unwrap().unwrap().draws;
    draws.iter().map(|draw| [0, draw.token, draw.score.to_bits(), draw.logit.to_bits()]).collect()
}

/// In some cases, a min-p that is too small to make the list precedes a top-k that makes it. It drops 44 of the 50
/// tokens that top-k keeps.
#[test]
fn listed_draws_are_those_of_the_reference() {
    let Some(program) = &*PROGRAM else { return };
    // One very large logit, five that a min-p of 3e-4 keeps, many that it drops, and many that no list has.
    let logit = |t: u32| match t {
        7 => 8.25,
        60.. => -40.0,
        _ if t % 12 == 3 => 4.0,
        _ => 0.0,
    };
    let logits: Vec<f32> = (0..90).map(logit).collect();
    let all = f32::NEG_INFINITY;
    let base = RowParams { seed: 31, position: 2, draws: DRAWS, ..RowParams::default() };
    let small = RowParams { min_p: 3e-4, top_k: 50, ..base };
    let last = RowParams { order: Order::LlamaCpp, ..small };
    // The last field: whether min-p decides, so that draws without it differ.
    let cases = [
        ("a small min-p, top-k", small, 0.0, true),
        ("a small min-p, top-k, top-p", RowParams { top_p: 0.999, ..small }, 0.0, true),
        ("a min-p that lists, top-k", RowParams { min_p: 1e-3, ..small }, all, true),
        ("min-p alone", RowParams { top_k: 0, min_p: 0.05, ..base }, all, true),
        ("top-k, min-p", last, 0.0, true),
        ("top-k, top-p, min-p", RowParams { top_p: 0.999, ..last }, 0.0, true),
        ("top-k", RowParams { top_k: 20, ..base }, 0.0, false),
        ("top-k, top-p", RowParams { top_k: 50, top_p: 0.995, ..base }, 0.0, false),
    ];
    for (name, params, cut, has_min_p) in cases {
        let want = wanted(params, &logits);
        assert_eq!(want.len(), DRAWS as usize);
        for shards in [1, 3] {
            assert!(found(program, &params, shards, cut, &logits) == want, "{name}, {shards} shards");
        }
        // The negative control: draws without min-p.
        let dropped = wanted(RowParams { min_p: 0.0, ..params }, &logits);
        assert_eq!(dropped != want, has_min_p, "{name}");
    }
}

/// Filters that keep thousands of tokens, equal logits at a limit, and masses that meet a limit exactly.
#[test]
fn draws_from_all_logits_are_those_of_the_reference() {
    let Some(program) = &*PROGRAM else { return };
    let spread = |t: u32| (t.wrapping_mul(0x9e37_79b9) >> 8) as f32 / (1 << 24) as f32;
    let flat: Vec<f32> = (0..2999).map(|t| 2.0 * spread(t)).collect();
    let equal: Vec<f32> = (0..2600).map(|t| if t % 7 == 0 { f32::NEG_INFINITY } else { 0.0 }).collect();
    let steps: Vec<f32> = (0..2301).map(|t| (40.0 * spread(t)).floor() / 2.0 - 10.0).collect();
    let huge: Vec<f32> = (0..1500).map(|t| 3e6 + (100.0 * spread(t)).floor()).collect();
    let four = [0.0; 4].to_vec();
    let base = RowParams { seed: 77, position: 5, draws: 8, ..RowParams::default() };
    let cases = [
        ("top-p", RowParams { top_p: 0.7, ..base }),
        ("a small top-p", RowParams { top_p: 1e-6, ..base }),
        ("half of the mass", RowParams { top_p: 0.5, ..base }),
        ("min-p, top-p", RowParams { min_p: 0.2, top_p: 0.95, ..base }),
        ("top-k", RowParams { top_k: 1000, ..base }),
        ("one token", RowParams { top_k: 1, ..base }),
        ("min-p, top-k, top-p", RowParams { min_p: 0.01, top_k: 700, top_p: 0.5, ..base }),
        ("top-k, top-p, min-p", RowParams { order: Order::LlamaCpp, min_p: 0.5, top_k: 1000, top_p: 0.9, ..base }),
    ];
    for (shape, logits) in [("flat", &flat), ("equal", &equal), ("steps", &steps), ("huge", &huge), ("four", &four)] {
        for (name, params) in cases {
            let want = wanted(params, logits);
            assert_eq!(want.len(), base.draws as usize);
            assert!(found(program, &params, 0, 0.0, logits) == want, "{name} of {shape} logits");
            // A list of all tokens.
            if params.top_k > 0 {
                let listed = found(program, &params, 1, f32::NEG_INFINITY, logits);
                assert!(listed == want, "{name} of listed {shape} logits");
            }
        }
    }
}

/// The largest logits of granules select the logits that a kernel reads.
#[test]
fn draws_by_the_maxima_of_granules_are_those_of_the_reference() {
    const TOKENS: u32 = 12_003;
    let Some(program) = &*PROGRAM else { return };
    let uniform = |t: u32| (((t + 1).wrapping_mul(0x9e37_79b9) >> 8) as f32 + 0.5) / (1 << 24) as f32;
    // The last token, in a granule of three, is the largest. As f16 it is larger.
    let tail = |t: u32| if t == TOKENS - 1 { 40.02 } else { -4.0 * uniform(t).ln() - 9.0 };
    let below_zero = |t: u32| tail(t) - 40.0;
    // Logits that f16 rounds up and down, with many equal ones at every limit.
    let steps = |t: u32| (tail(t) * 3.0).floor() / 3.0;
    let shapes: [(_, Vec<f32>); 3] = [
        ("exponential", (0..TOKENS).map(tail).collect()),
        ("negative", (0..TOKENS).map(below_zero).collect()),
        ("equal", (0..TOKENS).map(steps).collect()),
    ];
    let base = RowParams { seed: 78, position: 6, draws: 1, ..RowParams::default() };
    let cases = [
        ("top-k", RowParams { top_k: 50, ..base }),
        ("one token", RowParams { top_k: 1, ..base }),
        ("top-k of many tokens", RowParams { top_k: 700, temperature: 3.0, ..base }),
        ("top-k, top-p", RowParams { top_k: 50, top_p: 0.9, temperature: 0.7, ..base }),
        ("min-p", RowParams { min_p: 0.02, temperature: 2.5, ..base }),
        ("a small min-p", RowParams { min_p: 1e-8, temperature: 2.0, ..base }),
        ("min-p, top-k, top-p", RowParams { min_p: 1e-4, top_k: 40, top_p: 0.95, temperature: 1.7, ..base }),
    ];
    for (shape, logits) in &shapes {
        let largest = |granule: &[f32]| f16::from_f32(granule.iter().copied().fold(f32::NEG_INFINITY, f32::max));
        let maxima: Vec<f16> = logits.chunks(16).map(largest).collect();
        let bits: Vec<u16> = maxima.iter().map(|largest| largest.to_bits()).collect();
        assert!(kernel_maxima(program, &cases[0].1, logits, &maxima) == bits, "the maxima of {shape} logits");
        for (name, params) in cases {
            let mut want = wanted(params, logits);
            want.iter_mut().for_each(|[status, ..]| *status |= 0x100);
            assert!(kernel_draws(program, &params, (0, 0.0), logits, &maxima) == want, "{name} of {shape} logits");
        }
        // The negative control: the maximum of its granule hides the largest logit.
        let (mut wrong, (_, params)) = (maxima.clone(), cases[0]);
        wrong[TOKENS as usize / 16] = f16::NEG_INFINITY;
        assert_eq!(kernel_draws(program, &params, (0, 0.0), logits, &wrong)[0][0], 0x200, "{shape}");
    }
    // The kernel reads all logits: k exceeds the number of granules, a temperature makes logits equal, more candidates
    // than there is room for, and more granules than there is room for.
    let flat = |tokens: u32, kinds: u32| (0..tokens).map(|t| (t % kinds) as f32 * 1e-3).collect::<Vec<_>>();
    let of_k = |top_k| RowParams { top_k, ..base };
    for (params, logits, largest) in [
        (of_k(1000), flat(TOKENS, 7), 0.006),
        (RowParams { temperature: 1e31, ..of_k(5) }, flat(TOKENS, 7), 0.006),
        (of_k(5), flat(TOKENS, 1), 0.0),
        (of_k(5), (0..33_003).map(|t| if t % 16 == 0 { 0.0 } else { -5.0 }).collect(), 0.0),
    ] {
        let maxima = vec![f16::from_f32(largest); logits.len().div_ceil(16)];
        assert!(kernel_draws(program, &params, (0, 0.0), &logits, &maxima) == wanted(params, &logits), "{params:?}");
    }
}
