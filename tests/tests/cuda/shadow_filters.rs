//! Draws with filters from a shadow have the bits of the draws from the weight.

use super::backends::assert_same;
use super::backends::gpu::Gpu;
use super::backends::gpu_columns::{Arrays, Results};
use super::backends::gpu_memory::{OnDevice, captured};
use super::backends::shadow::WithShadow;
use super::{problems, scaled};
use flash_sampling_conformance::SamplerFactory;
use flash_sampling_conformance::problem::{Problem, Size};
use flash_sampling_conformance::suite::drop_outside_captures;
use flash_sampling_core::{DType, Order, PerturbedArgmax, Plan, RowParams, Samples, ShadowBuffer};
use flash_sampling_cuda::{DeviceSampler, DeviceShadow};

/// Returns rows of every kind that draws from a shadow, and with `all_logits` also rows with top-p first.
fn rows(count: usize, all_logits: bool) -> Vec<RowParams<'static>> {
    const MASK: [u32; 40] = [0xdead_beef; 40];
    let row = |r: usize| {
        let base = RowParams { seed: 7 + r as u64 / 3, position: (1 << 40) + r as u64, ..RowParams::default() };
        match r % 11 {
            0 => RowParams { min_p: 0.05, ..base },
            1 => base,
            2 => RowParams { top_k: 50, top_p: 0.9, temperature: 0.8, ..base },
            3 => RowParams { temperature: 0.0, ..base },
            4 => RowParams { top_k: 20, mask: Some(&MASK), ..base },
            5 => RowParams { top_k: 1, logit_bias: &[(1, 4.0), (9, f32::NEG_INFINITY), (60, -1.0)], ..base },
            6 => RowParams { min_p: 0.01, top_k: 40, top_p: 0.95, temperature: 1.7, ..base },
            7 => RowParams { mask: Some(&MASK), temperature: 0.6, ..base },
            8 => RowParams { min_p: 1e-4, top_k: 30, temperature: 2.5, ..base },
            9 => RowParams { order: Order::LlamaCpp, top_k: 40, min_p: 0.05, top_p: 0.95, ..base },
            _ if all_logits => RowParams { top_p: 0.7, ..base },
            // Above the largest top-k that reads a shadow.
            _ => RowParams { top_k: 700, ..base },
        }
    };
    (0..count).map(row).collect()
}

#[test]
fn a_shadow_changes_no_bit_of_a_draw_with_filters() {
    let Some(_) = Gpu::TILED.device() else { return };
    let mut draws = 0;
    let sizes = [(1, 30_011, 512), (7, 5000, 775), (16, 151, 64), (9, 4001, 2888), (40, 40_000, 256), (90, 9001, 136)];
    for (count, vocab, cols) in sizes {
        for dtype in [DType::BF16, DType::F16] {
            for (name, problem) in problems(Size::new(count, vocab, cols), dtype) {
                let plan = Plan { max_rows: count, max_draws: 2, ..Plan::default() };
                let mut plain = Gpu::TILED.build(problem.head(), plan).unwrap();
                let mut shadowed = WithShadow(Gpu::TILED).build(problem.head(), plan).unwrap();
                let (mut want, mut found) = (Samples::new(), Samples::new());
                for turn in 0..12u64 {
                    let of_turn = |(r, row): (usize, RowParams<'static>)| RowParams {
                        seed: row.seed + 1000 * turn,
                        temperature: row.temperature * [1.0, 0.3, 0.05, 1.0][(turn as usize + r) % 4],
                        draws: 1 + u32::from(turn == 3),
                        ..row
                    };
                    // Every kind of row comes first once.
                    let mut rows: Vec<_> = rows(count + 10, turn == 9).into_iter().enumerate().map(of_turn).collect();
                    rows.rotate_left(turn as usize % 11);
                    rows.truncate(count);
                    // In most turns, every row has a filter that reads the shadow in a call of this size.
                    if turn % 4 != 2 {
                        for row in &mut rows {
                            row.top_k = row.top_k.min(if count <= 64 { 128 } else { 0 });
                            row.top_p = if row.top_k == 0 && row.min_p == 0.0 && turn != 9 { 1.0 } else { row.top_p };
                            row.order = if row.top_k == 0 { Order::default() } else { row.order };
                        }
                    }
                    plain.sample(problem.input(), &rows, &mut want).unwrap();
                    shadowed.sample(problem.input(), &rows, &mut found).unwrap();
                    let what = format!("{name}, {count} x {vocab} x {cols}, {}, turn {turn}", dtype.name());
                    assert_same(&found, &want, &what);
                    draws += count;
                }
            }
        }
    }
    println!("{draws} rows have the same bits");
}

/// The device selects the passes of each replay: the shadow decides all rows; a row has top-p alone, or a large top-k; the
/// logits of some rows are equal, so that their lists overflow.
#[test]
fn a_captured_call_with_filters_and_a_shadow_draws_what_the_weight_draws() {
    let Some(_) = Gpu::TILED.device() else { return };
    for rows in [8, 33, 64] {
        captured_calls(Size::new(rows, 40_009, 1024));
    }
}

fn captured_calls(size: Size) {
    let base = Problem::gaussian(size, DType::BF16, DType::BF16, 20);
    let peaks: Vec<Vec<f32>> = (0..size.rows).map(|r| base.weight.row(r * 1009 % size.vocab)).collect();
    let norm = |row: &[f32]| row.iter().map(|x| x * x).sum::<f32>();
    let towards = |r: usize, k: usize, h: f32| h + 9.0 * peaks[r][k] / norm(&peaks[r]);
    let peaked = Problem { hidden: scaled(&base.hidden, DType::BF16, towards), ..base.clone() };
    let without = |r: usize, _: usize, h: f32| if r % 11 < 4 { 0.0 } else { h };
    let equal = Problem { hidden: scaled(&base.hidden, DType::BF16, without), ..base.clone() };
    for (name, problem) in [("gaussian", base), ("peaked", peaked), ("equal", equal)] {
        let there = OnDevice::new(&problem, 0);
        let buffer = ShadowBuffer::new(&problem.weight.matrix()).unwrap();
        let (shadow, _memory) = DeviceShadow::upload(&buffer.shadow(), &there.stream).unwrap();
        let plan = Plan { max_rows: size.rows, ..Plan::default() };
        let (stream, vocab) = (&there.stream, size.vocab as u32);
        let with = |shadow| {
            let head = flash_sampling_cuda::DeviceHead { shadow, ..there.head };
            // SAFETY: weight and shadow are on this device, of these sizes, and outlive the sampler's launches.
            unsafe { DeviceSampler::new(head, vocab, plan, &there.device) }.unwrap()
        };
        let (mut plain, mut shadowed) = (with(None), with(Some(shadow)));
        // Masks in device memory cover the vocabulary.
        let mask: Vec<u32> = (0..size.vocab.div_ceil(32)).map(|w| if w < 40 { 0xdead_beef } else { 0 }).collect();
        for (all_logits, large_top_k) in [(false, false), (true, false), (false, true)] {
            let row =
                |row: RowParams<'static>| RowParams { order: Order::default(), mask: row.mask.and(Some(&mask)), ..row };
            let mut rows: Vec<_> = rows(size.rows, all_logits).into_iter().map(row).collect();
            for row in rows.iter_mut().filter(|_| !large_top_k) {
                row.top_k = row.top_k.min(128);
            }
            rows[7].top_p = if all_logits { 0.7 } else { rows[7].top_p };
            rows[4].top_k = if large_top_k { 700 } else { rows[4].top_k };
            let arrays = Arrays::of(&rows, size.vocab, stream);
            let results = Results::new(size.rows, stream);
            let out = results.columns(stream);
            shadowed.prepare_enqueue(&arrays.columns, &out, 8).unwrap();
            stream.synchronize().unwrap();
            // SAFETY: all arrays are on this device, with an element a row, and outlive the graph.
            let launch = || unsafe { shadowed.enqueue(stream, &there.hidden, &arrays.columns, &out) };
            let graph = captured(stream, launch);
            for step in 0..3 {
                graph.launch().unwrap();
                stream.synchronize().unwrap();
                let mut want = Samples::new();
                // SAFETY: the hidden states are on this device, and this call waits.
                unsafe { plain.sample(stream, &there.hidden, &rows, &mut want) }.unwrap();
                results.check(&want, stream, &format!("{name}, {all_logits}, {large_top_k}, step {step}"));
            }
            drop(graph);
        }
        drop_outside_captures((plain, shadowed));
    }
}
