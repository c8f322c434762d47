//! The suite on the sampler over a weight and hidden states in the caller's device memory.

mod backends;

use backends::gpu::Gpu;
use backends::gpu_memory::{Copied, copied};
use backends::{assert_same, reference};
use flash_sampling_conformance::problem::{Problem, Size};
use flash_sampling_conformance::suite;
use flash_sampling_conformance::tensor::Tensor;
use flash_sampling_core::reference::ReferenceVariant;
use flash_sampling_core::{DType, Knobs, PerturbedArgmax, Plan, RowParams, Samples};
use flash_sampling_cuda::CudaTiled;

suite!(shared, Gpu::Shared);

/// A thread without a current CUDA context makes a call. Rows with few draws are beside rows with many draws and
/// filters.
#[test]
fn a_call_on_a_fresh_thread_draws_the_same() {
    let Some(device) = Gpu::Shared.device() else { return };
    let problem = Problem::integers(Size::new(6, 3001, 64), DType::BF16, DType::BF16, 31);
    let plan = Plan { max_rows: 6, max_draws: 5, max_logprobs: Some(2), canonical: false };
    let base = RowParams { seed: 32, temperature: 90.0, ..RowParams::default() };
    let rows: Vec<RowParams<'_>> = (0..6)
        .map(|r| match r % 3 {
            0 => RowParams { position: r, draws: 1, min_p: 0.02, ..base },
            1 => RowParams { position: r, draws: 5, top_k: 40, ..base },
            _ => RowParams { position: r, draws: 2, logprobs: Some(2), ..base },
        })
        .collect();
    let mut want = Samples::new();
    CudaTiled::new(problem.head(), plan, &device).unwrap().sample(problem.input(), &rows, &mut want).unwrap();
    let mut there = Copied::new(problem.head(), plan).unwrap();
    let (_memory, hidden) = copied(problem.input(), &there.stream);
    there.stream.synchronize().unwrap();
    let found = std::thread::scope(|scope| {
        let call = || {
            let mut found = Samples::new();
            // SAFETY: the hidden states are in device memory until the thread is joined.
            unsafe { there.sampler.sample(&there.stream, &hidden, &rows, &mut found) }.unwrap();
            found
        };
        scope.spawn(call).join().unwrap()
    });
    assert_same(&found, &want, "on a fresh thread");
}

/// Lists may decide every filter of a call, except in rows of equal logits. Such rows take a second launch with stored
/// logits, and undecided rows take a further pass.
#[test]
fn rows_that_lists_do_not_decide_have_the_reference_bits() {
    let Some(device) = Gpu::Shared.device() else { return };
    const ROWS: usize = 30;
    let drawn = Problem::integers(Size::new(ROWS, 30_011, 40), DType::BF16, DType::BF16, 33);
    // Every seventh row has equal logits.
    let hidden = Tensor::from_fn(DType::BF16, ROWS, 40, |r, k| if r % 7 == 3 { 0.0 } else { drawn.hidden.row(r)[k] });
    let mut problem = Problem::new(drawn.weight.clone(), hidden);
    problem.scale = Some(0.5);
    let plan = Plan { max_rows: ROWS, max_draws: 3, ..Plan::default() };
    let base = RowParams { seed: 34, ..RowParams::default() };
    let kinds = [
        RowParams { top_k: 20, ..base },
        RowParams { min_p: 0.05, draws: 2, ..base },
        base,
        RowParams { top_k: 50, top_p: 0.9, draws: 3, ..base },
        RowParams { temperature: 0.0, ..base },
        // This row keeps more tokens than fit into a list or a selection.
        RowParams { min_p: 0.001, top_p: 0.5, ..base },
    ];
    let mut found = Samples::new();
    let mut shared = Copied::new(problem.head(), plan).unwrap();
    let is_hopper = device.capability() == (9, 0);
    // In the first call, lists decide all filters. In the second, some rows have only top-p, which needs stored logits.
    for with_mass in [false, true, false] {
        let row = |r: usize| RowParams { position: r as u64, ..kinds[r % kinds.len()] };
        let mut rows: Vec<_> = (0..ROWS).map(row).collect();
        if with_mass {
            rows.iter_mut().skip(2).step_by(6).for_each(|row| row.top_p = 0.7);
        }
        let want = reference(&problem, plan, ReferenceVariant::Tiled, &rows);
        shared.sample(problem.input(), &rows, &mut found).unwrap();
        assert_same(&found, &want, &format!("rows with top-p alone: {with_mass}"));
        for (r, row) in rows.iter().enumerate() {
            // The list of a row with equal logits overflows, so the row takes more passes.
            let passes = found.row(r).unwrap().passes;
            let is_plain = row.enabled() == Knobs::NONE;
            let is_open = is_hopper && !with_mass && r % 7 == 3 && !is_plain;
            assert!((passes > 1 || !is_open) && (passes == 1 || !is_plain), "row {r}: {passes} passes");
        }
    }
}
