//! Filters on the GPU, on rows long enough for every code path: few kept tokens, many kept tokens, ties, masks.

use super::backends::gpu::{CHOICES, Gpu};
use super::backends::{assert_same, assert_twice, reference};
use flash_sampling_conformance::SamplerFactory;
use flash_sampling_conformance::logits::LogitShape;
use flash_sampling_conformance::problem::{Problem, Size};
use flash_sampling_conformance::tensor::Tensor;
use flash_sampling_conformance::trial::RowBits;
use flash_sampling_core::reference::{Reference, ReferenceVariant};
use flash_sampling_core::{DType, History, Order, PerturbedArgmax, Plan, RowParams, Samples};

const VOCAB: usize = 30_011;

/// Compares the rows of calls with the reference, for the kernels with filters of their own. Returns the rows of the
/// reference.
fn compare(what: &str, problem: &Problem, plan: Plan, calls: &[Vec<RowParams<'_>>]) -> Vec<Samples> {
    let mut reference = Reference::new(problem.head(), plan, ReferenceVariant::Tiled);
    let build = |&choice| (choice, Gpu::Tiled(choice).build(problem.head(), plan).unwrap());
    let mut samplers: Vec<_> = CHOICES[..2].iter().map(build).collect();
    let mut found = Samples::new();
    let compare = |(c, rows): (usize, &Vec<RowParams<'_>>)| {
        let (input, mut want) = (problem.input().row_range(0..rows.len()), Samples::new());
        reference.sample(input, rows, &mut want).unwrap();
        for (choice, sampler) in &mut samplers {
            sampler.sample(input, rows, &mut found).unwrap();
            assert_same(&found, &want, &format!("{what}, call {c}, {choice:?}, {:?}", rows[0]));
        }
        want
    };
    calls.iter().enumerate().map(compare).collect()
}

#[test]
fn filtered_draws_of_long_rows_have_the_reference_bits() {
    let Some(_) = Gpu::TILED.device() else { return };
    let llm: Vec<f32> = LogitShape::LlmLike.logits(VOCAB, 71).iter().map(|l| (l * 8.0).round() / 8.0).collect();
    let flat: Vec<f32> = (0..VOCAB).map(|t| (t % 5) as f32 * 0.25).collect();
    let mut integers = Problem::integers(Size::new(3, VOCAB, 40), DType::BF16, DType::BF16, 72);
    integers.scale = Some(0.25);
    let problems = [
        ("LLM-like", Problem::of_logits(&llm, 3)),
        ("flat", Problem::of_logits(&flat, 3)),
        ("tail-heavy", Problem::of_logits(&LogitShape::TailHeavy.logits(VOCAB, 73), 3)),
        ("integers", integers),
    ];
    let history = History::new(&(0..1000).map(|t| t * 29 % VOCAB as u32).collect::<Vec<_>>());
    let mask: Vec<u32> = (0..VOCAB.div_ceil(32) as u32).map(|word| 0x8001_0040u32.rotate_left(word % 32)).collect();
    let base = RowParams { seed: 74, temperature: 0.9, draws: 6, ..RowParams::default() };
    let orders = [Order::Vllm, Order::HuggingFace, Order::LlamaCpp].map(|order| RowParams { order, ..base });
    let bases = [
        orders[0],
        orders[1],
        orders[2],
        RowParams { repetition_penalty: 1.4, presence_penalty: 0.5, history: Some(&history), ..base },
        RowParams { mask: Some(&mask), ..base },
    ];
    let plan = Plan { max_rows: 3, max_draws: 6, ..Plan::default() };
    let filters = |row| {
        [
            RowParams { min_p: 0.05, ..row },
            RowParams { min_p: 1e-6, ..row },
            RowParams { top_k: 20, ..row },
            RowParams { top_k: 1024, ..row },
            RowParams { top_k: 50, top_p: 0.9, ..row },
            RowParams { top_p: 0.2, ..row },
            RowParams { top_p: 0.95, ..row },
            RowParams { min_p: 0.01, top_p: 0.8, ..row },
            RowParams { min_p: 0.01, top_k: 300, top_p: 0.8, ..row },
            // This min-p is too small for a list, so it filters the list of the top-k.
            RowParams { min_p: 3e-4, top_k: 50, ..row },
        ]
        .map(|row| (0..3).map(|position| RowParams { position, ..row }).collect())
    };
    let calls: Vec<Vec<_>> = bases.into_iter().flat_map(filters).collect();
    for (name, problem) in &problems {
        compare(name, problem, plan, &calls);
    }
}

/// Combines a min-p that is too small for a list with a top-k that makes one, in both orders. The min-p drops tokens
/// with a hundredth of the list's mass.
#[test]
fn a_small_min_p_acts_on_the_list_of_a_top_k() {
    let Some(_) = Gpu::TILED.device() else { return };
    let vocab = 5_003;
    let logit = |t: usize| match t {
        1207 => 8.25,
        _ if t % 1000 == 3 => 4.0,
        _ if t.is_multiple_of(100) => 0.0,
        _ => -40.0,
    };
    let logits: Vec<f32> = (0..vocab).map(logit).collect();
    let problem = Problem::of_logits(&logits, 3);
    let base = RowParams { seed: 79, draws: 500, min_p: 3e-4, top_k: 50, ..RowParams::default() };
    let plan = Plan { max_rows: 3, max_draws: 500, ..Plan::default() };
    let orders = |row| [row, RowParams { order: Order::LlamaCpp, ..row }];
    let rows = |row| [0, 1, 2].map(|position| RowParams { position, ..row }).to_vec();
    let calls = [base, RowParams { top_p: 0.999, ..base }].map(orders).concat().into_iter().map(rows);
    let calls: Vec<_> = calls.collect();
    for (rows, want) in calls.iter().zip(compare("a small min-p", &problem, plan, &calls)) {
        // The control: results without the min-p differ.
        let without: Vec<_> = rows.iter().map(|row| RowParams { min_p: 0.0, ..*row }).collect();
        let without = reference(&problem, plan, ReferenceVariant::Tiled, &without);
        assert_ne!(RowBits::all(&want), RowBits::all(&without));
    }
}

/// Makes small calls for the sanitizers that take every path: lists with an initial threshold, stored logits, rows
/// without filters, block maxima (only top-p), and a min-p that is too small for a list.
#[test]
fn a_small_call_takes_every_filter_path() {
    let Some(_) = Gpu::TILED.device() else { return };
    // More tokens than a list holds.
    let problem = Problem::integers(Size::new(6, 4_603, 72), DType::BF16, DType::BF16, 78);
    let mask: Vec<u32> = (0..144).map(|word: u32| 0x0101_0101 << (word % 8)).collect();
    let base = RowParams { position: 5, temperature: 4.0, ..RowParams::default() };
    let rows = [
        RowParams { top_k: 20, ..base },
        RowParams { min_p: 0.05, ..base },
        RowParams { top_k: 50, top_p: 0.9, mask: Some(&mask), ..base },
        RowParams { top_p: 0.95, ..base },
        RowParams { temperature: 0.0, ..base },
        base,
    ];
    let top_p = [0.95, 0.05, 0.5].map(|top_p| RowParams { top_p, ..base });
    let alone = [top_p[0], base, top_p[1], RowParams { temperature: 0.0, ..base }, top_p[2], base];
    let small = RowParams { min_p: 3e-4, top_k: 50, ..base };
    let both = RowParams { top_p: 0.999, ..small };
    let [small_last, both_last] = [small, both].map(|row| RowParams { order: Order::LlamaCpp, ..row });
    let beside = [small, both, base, small_last, both_last, base];
    let plan = Plan { max_rows: 6, ..Plan::default() };
    compare("a small call", &problem, plan, &[rows, alone, beside].map(Vec::from));
}

#[test]
fn filtered_draws_have_the_reference_bits_for_every_tile() {
    let Some(_) = Gpu::TILED.device() else { return };
    let vocab = 5_003;
    let mask: Vec<u32> = (0..157).map(|word: u32| 1 << (word * 7 % 32)).collect();
    let history = History::new(&(0..700).collect::<Vec<_>>());
    for rows in [7, 64, 80, 130, 200, 256] {
        let problem = Problem::integers(Size::new(rows, vocab, 72), DType::BF16, DType::BF16, 75 + rows as u64);
        let row = |r: usize| {
            let base = RowParams { seed: r as u64, position: 5, temperature: 4.0, ..RowParams::default() };
            match r % 7 {
                0 => RowParams { top_k: 20, ..base },
                1 => RowParams { min_p: 0.05, ..base },
                2 => RowParams { top_p: 0.95, ..base },
                3 => RowParams { top_p: 0.7, mask: Some(&mask), ..base },
                4 => RowParams { top_k: 50, top_p: 0.9, history: Some(&history), repetition_penalty: 1.5, ..base },
                5 => RowParams { mask: Some(&mask), ..base },
                _ => RowParams { history: Some(&history), repetition_penalty: 0.75, presence_penalty: 1.0, ..base },
            }
        };
        let params: Vec<_> = (0..rows).map(row).collect();
        let plan = Plan { max_rows: rows, ..Plan::default() };
        let want = reference(&problem, plan, ReferenceVariant::Tiled, &params);
        assert_twice(&Gpu::TILED, &problem, plan, &params, &want, &format!("{rows} rows"));
    }
}

/// Mixes rows of different paths in one call: the fused draw, a list, stored logits, the host.
#[test]
fn rows_have_the_reference_bits_whatever_other_rows_request() {
    let Some(_) = Gpu::TILED.device() else { return };
    let history = History::new(&(0..1000).map(|t| t * 29 % VOCAB as u32).collect::<Vec<_>>());
    let mask: Vec<u32> = (0..VOCAB.div_ceil(32) as u32).map(|word| u32::from(word % 300 == 7)).collect();
    let base = RowParams { seed: 81, temperature: 0.8, ..RowParams::default() };
    let past = RowParams { repetition_penalty: 1.4, presence_penalty: 0.5, history: Some(&history), ..base };
    let kinds = [
        base,
        RowParams { temperature: 0.0, ..base },
        RowParams { min_p: 0.05, ..base },
        RowParams { top_p: 0.9, ..base },
        RowParams { top_k: 40, ..past },
        RowParams { top_p: 0.6, draws: 2, ..base },
        RowParams { mask: Some(&mask), ..base },
        RowParams { top_p: 0.7, mask: Some(&mask), ..base },
        past,
        RowParams { top_k: 50, top_p: 0.9, draws: 2, ..base },
        RowParams { top_n_sigma: 1.5, ..base },
        RowParams { top_k: 20, logprobs: Some(3), ..base },
        RowParams { min_p: 0.2, top_k: 30, top_p: 0.5, ..base },
    ];
    let mut problem = Problem::integers(Size::new(100, VOCAB, 40), DType::BF16, DType::BF16, 82);
    problem.scale = Some(0.25);
    let plan = Plan { max_rows: 100, max_draws: 2, max_logprobs: Some(3), canonical: false };
    let rows = |count: usize, shift: usize| -> Vec<_> {
        (0..count).map(|r| RowParams { position: r as u64, ..kinds[(r + shift) % kinds.len()] }).collect()
    };
    for count in [1, 2, 13, 60, 100] {
        compare(&format!("{count} rows"), &problem, plan, &[0, 3, 5].map(|shift| rows(count, shift)));
    }
}

/// Uses as many tokens as language models. The threshold of a top-k is estimated from parts of the row, and the list is
/// short. Top-p uses the largest number of blocks per row.
#[test]
fn lists_of_the_largest_logits_have_the_reference_bits_at_full_size() {
    let Some(_) = Gpu::TILED.device() else { return };
    let (count, vocab) = (70, 151_936);
    let mut problem = Problem::integers(Size::new(count, vocab, 72), DType::BF16, DType::BF16, 91);
    problem.scale = Some(0.125);
    let base = RowParams { seed: 92, ..RowParams::default() };
    let kinds = [
        RowParams { top_k: 20, ..base },
        RowParams { top_k: 3, temperature: 0.7, ..base },
        RowParams { top_k: 50, top_p: 0.9, ..base },
        RowParams { top_k: 64, min_p: 0.1, ..base },
        RowParams { min_p: 0.05, ..base },
        RowParams { min_p: 1e-6, ..base },
        RowParams { top_p: 0.95, ..base },
        RowParams { top_p: 0.5, temperature: 0.9, ..base },
        RowParams { top_p: 0.1, min_p: 0.02, order: Order::LlamaCpp, ..base },
        base,
    ];
    let rows: Vec<_> = (0..count).map(|r| RowParams { position: r as u64, ..kinds[r % kinds.len()] }).collect();
    let plan = Plan { max_rows: count, ..Plan::default() };
    let want = RowBits::all(&reference(&problem, plan, ReferenceVariant::Tiled, &rows));
    let mut found = Samples::new();
    let mut sampler = Gpu::TILED.build(problem.head(), plan).unwrap();
    for count in [1, 8, 30, 70] {
        sampler.sample(problem.input().row_range(0..count), &rows[..count], &mut found).unwrap();
        for (r, (found, want)) in RowBits::all(&found).iter().zip(&want).enumerate() {
            assert_eq!(found, want, "{count} rows, row {r}");
        }
    }
}

/// Checks that a masked NaN or infinite logit is an error of its row, for every kernel and all neighbours in the batch.
#[test]
fn an_invalid_logit_under_a_mask_is_its_rows_error() {
    let Some(_) = Gpu::TILED.device() else { return };
    let (count, vocab, at) = (12, 5003, 700);
    let good = Problem::integers(Size::new(count, vocab, 72), DType::BF16, DType::BF16, 93);
    let few: Vec<u32> = (0..157).map(|word: u32| u32::from(word % 8 == 3)).collect();
    let many: Vec<u32> = (0..157).map(|word| if word == at / 32 { !(1 << (at % 32)) } else { !0 }).collect();
    let history = History::new(&(0..700).collect::<Vec<_>>());
    for poison in [f32::NAN, f32::INFINITY] {
        let weight = Tensor::from_fn(DType::BF16, vocab, 72, |t, k| {
            if (t, k) == (at as usize, 5) { poison } else { good.weight.row(t)[k] }
        });
        let hidden = Tensor::from_fn(DType::BF16, count, 72, |r, k| if k == 5 { 1.0 } else { good.hidden.row(r)[k] });
        let problem = Problem::new(weight, hidden);
        let base = RowParams { seed: 94, ..RowParams::default() };
        let (dense, sparse) = (RowParams { mask: Some(&many), ..base }, RowParams { mask: Some(&few), ..base });
        let past = RowParams { repetition_penalty: 1.3, history: Some(&history), ..dense };
        let calls = [
            vec![dense; count],
            vec![sparse; count],
            (0..count).map(|r| [dense, sparse, past, RowParams { top_k: 20, ..sparse }][r % 4]).collect(),
            (0..count).map(|r| RowParams { min_p: 0.1, ..[dense, sparse][r % 2] }).collect(),
        ];
        let plan = Plan { max_rows: count, ..Plan::default() };
        let want = compare(&format!("{poison}"), &problem, plan, &calls);
        assert!(want.iter().flat_map(Samples::iter).all(|row| row.is_err()));
    }
}
