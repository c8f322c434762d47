//! The suite on the CUDA backend over heads with a shadow, and comparisons of draws with and without a shadow.

mod backends;

use backends::assert_same;
use backends::gpu::Gpu;
use backends::gpu_memory::{OnDevice, assert_drawn, captured};
use backends::gpu_rows::rows;
use backends::reference;
use backends::shadow::WithShadow;
use backends::shadow_draws::{CallSize, draws_have_equal_bits, problems, scaled};
use flash_sampling_conformance::problem::{Problem, Size};
use flash_sampling_conformance::suite::drop_outside_captures;
use flash_sampling_conformance::{SamplerFactory, suite};
use flash_sampling_core::reference::ReferenceVariant;
use flash_sampling_core::{DType, PerturbedArgmax, Plan, RowParams, Samples, ShadowBuffer};
use flash_sampling_cuda::{DeviceShadow, DeviceTiled, KernelChoice, RowFeatures};

#[path = "cuda/shadow_filters.rs"]
mod shadow_filters;

suite!(tiled, WithShadow(Gpu::TILED));
suite!(portable, WithShadow(Gpu::Tiled(KernelChoice::Portable)));

/// The kernels that read a shadow. On Hopper, they are different kernels.
const CHOICES: [KernelChoice; 2] = [KernelChoice::Fastest, KernelChoice::Portable];

#[test]
fn a_shadow_changes_no_bit_of_a_draw() {
    let Some(_) = Gpu::TILED.device() else { return };
    CHOICES.into_iter().for_each(compare_draws);
}

fn compare_draws(choice: KernelChoice) {
    let mut draws = 0;
    let most = if choice == KernelChoice::Portable { 64 } else { 90 };
    let sizes = [
        (1, 30_011, 512),
        (7, 5000, 775),
        (16, 151, 64),
        (9, 4001, 2888),
        (40, 20_000, 256),
        (most, 9001, 136),
        // Rows of several parts of each length.
        (3, 3001, 4096),
        (6, 2001, 9216),
    ];
    for (count, vocab, cols) in sizes {
        for dtype in [DType::BF16, DType::F16] {
            for (name, problem) in problems(Size::new(count, vocab, cols), dtype) {
                let plan = Plan { max_rows: count, max_draws: 3, ..Plan::default() };
                let mut plain = Gpu::Tiled(choice).build(problem.head(), plan).unwrap();
                let mut shadowed = WithShadow(Gpu::Tiled(choice)).build(problem.head(), plan).unwrap();
                let (mut want, mut found) = (Samples::new(), Samples::new());
                for turn in 0..12 {
                    let of_turn = |(r, row): (usize, RowParams<'static>)| RowParams {
                        seed: row.seed + 1000 * turn,
                        temperature: [row.temperature, 1.0, 0.3, 0.05][(turn as usize + r) % 4],
                        ..row
                    };
                    let rows: Vec<_> = rows(count).into_iter().enumerate().map(of_turn).collect();
                    let rows: Vec<_> = match turn % 2 {
                        0 => rows,
                        _ => rows.iter().map(|row| RowParams { mask: None, logit_bias: &[], ..*row }).collect(),
                    };
                    plain.sample(problem.input(), &rows, &mut want).unwrap();
                    shadowed.sample(problem.input(), &rows, &mut found).unwrap();
                    let what = format!("{choice:?}, {name}, {count} x {vocab} x {cols}, {}, turn {turn}", dtype.name());
                    assert_same(&found, &want, &what);
                    draws += count;
                }
            }
        }
    }
    println!("{choice:?}: {draws} rows have the same bits");
}

#[test]
fn a_million_draws_by_a_shadow_have_equal_bits() {
    let Some(_) = Gpu::TILED.device() else { return };
    for choice in CHOICES {
        let calls = [CallSize { rows: 16, draws: 4 }, CallSize { rows: 64, draws: 1 }];
        draws_have_equal_bits(Gpu::Tiled(choice), Size::new(64, 20_000, 136), &calls);
    }
}

/// Five rows over two heads, and whether the shadow decides them. The head of undecided rows has a large column.
fn decided_and_undecided() -> [(Problem, bool); 2] {
    let good = Problem::integers(Size::new(5, 20_011, 136), DType::BF16, DType::BF16, 12);
    let column = |_, k, w| if k == 0 { 1024.0 } else { w };
    let without = |_, k, h| if k == 0 { 0.0 } else { h };
    let coarse = Problem {
        weight: scaled(&good.weight, DType::BF16, column),
        hidden: scaled(&good.hidden, DType::BF16, without),
        ..good.clone()
    };
    [(good, true), (coarse, false)]
}

#[test]
fn rows_that_fall_back_from_a_shadow_are_counted() {
    let Some(_) = Gpu::TILED.device() else { return };
    let plan = Plan { max_rows: 5, max_logprobs: Some(0), ..Plan::default() };
    for (problem, is_decided) in decided_and_undecided() {
        for choice in CHOICES {
            let factory = Gpu::Tiled(choice);
            for (has_shadow, mut sampler) in [
                (true, WithShadow(factory).build(problem.head(), plan).unwrap()),
                (false, factory.build(problem.head(), plan).unwrap()),
            ] {
                assert_eq!(sampler.capabilities().shadow, has_shadow);
                let (row, mut samples) = (RowParams::default(), Samples::new());
                let undecided = if is_decided { 0 } else { 5 };
                let filtered = RowParams { top_p: 0.9, ..row };
                let with_logprobs = RowParams { logprobs: Some(0), ..row };
                for (row, fallbacks) in [(row, undecided), (filtered, 5), (with_logprobs, 5), (row, undecided)] {
                    let rows = [0, 1, 2, 3, 4].map(|seed| RowParams { seed, ..row });
                    sampler.sample(problem.input(), &rows, &mut samples).unwrap();
                    let want = if has_shadow { fallbacks } else { 0 };
                    assert_eq!(samples.fallback_rows(), want, "{choice:?}, decided: {is_decided}, {row:?}");
                }
            }
        }
    }
    // A canonical plan draws from stored logits.
    let canonical = Plan { canonical: true, ..plan };
    let can = WithShadow(Gpu::TILED).build(decided_and_undecided()[0].0.head(), canonical).unwrap().capabilities();
    assert!(!can.shadow);
}

/// Replays a graph of a call. The shadow decides nearly all rows, but no row of a head with a large column.
#[test]
fn a_captured_call_with_a_shadow_draws_what_the_reference_draws() {
    let Some(_) = Gpu::TILED.device() else { return };
    for (problem, is_decided) in decided_and_undecided() {
        for (choice, kinds) in CHOICES.into_iter().flat_map(|c| [(c, RowFeatures::Bare), (c, RowFeatures::Any)]) {
            let mut there = OnDevice::new(&problem, 0);
            let buffer = ShadowBuffer::new(&problem.weight.matrix()).unwrap();
            let (shadow, _memory) = DeviceShadow::upload(&buffer.shadow(), &there.stream).unwrap();
            there.stream.synchronize().unwrap();
            there.head.shadow = Some(shadow);
            // SAFETY: weight and shadow are on this device, of this size, and outlive the sampler's launches.
            let mut sampler = unsafe { DeviceTiled::with_kernels(there.head, 5, &there.device, choice) }.unwrap();
            sampler.prepare(kinds).unwrap();
            // SAFETY: hidden states, rows and draws are on this device and outlive the graph; one stream is used.
            let launch =
                || unsafe { sampler.launch(&there.stream, &there.hidden, there.rows_at, there.draws_at, kinds) };
            let graph = captured(&there.stream, launch);
            for position in 0..4 {
                let rows: Vec<_> = (0..5).map(|seed| RowParams { seed, position, ..RowParams::default() }).collect();
                there.set_bare(&rows);
                graph.launch().unwrap();
                let plan = Plan { max_rows: 5, ..Plan::default() };
                let want = reference(&problem, plan, ReferenceVariant::Tiled, &rows);
                assert_drawn(&there.draws(), &want, &format!("{choice:?}, decided: {is_decided}"));
            }
            // `OnDevice::draws` has waited for the launches.
            assert_eq!(sampler.fallback_rows(), if is_decided { 0 } else { 20 });
            drop_outside_captures(sampler);
        }
    }
}
