//! The suite on the CUDA backend, and tests of this backend only.

mod backends;

use backends::gpu::{CHOICES, Gpu};
use backends::gpu_memory::{OnDevice, assert_drawn, captured};
use backends::gpu_rows::{rows, rows_of};
use backends::{assert_twice, reference, same_in_batches};
use flash_sampling_conformance::problem::{Problem, Size};
use flash_sampling_conformance::suite::drop_outside_captures;
use flash_sampling_conformance::tensor::Tensor;
use flash_sampling_conformance::trial::RowBits;
use flash_sampling_conformance::{SamplerFactory, suite};
use flash_sampling_core::reference::{Reference, ReferenceVariant};
use flash_sampling_core::{DType, PerturbedArgmax, Plan, RowParams, Samples};
use flash_sampling_cuda::{CudaError, DeviceHead, DeviceMatrix, DeviceTiled, KernelChoice, RowFeatures};

#[path = "cuda/device_columns.rs"]
mod device_columns;
#[path = "cuda/device_filters.rs"]
mod device_filters;
#[path = "cuda/device_logits.rs"]
mod device_logits;
#[path = "cuda/device_logprobs.rs"]
mod device_logprobs;
#[path = "cuda/dots.rs"]
mod dots;
#[path = "cuda/filters.rs"]
mod filters;
#[path = "cuda/large.rs"]
mod large;
#[path = "cuda/layouts.rs"]
mod layouts;
#[path = "cuda/log_z.rs"]
mod log_z;
#[path = "cuda/logprobs.rs"]
mod logprobs;
#[path = "cuda/shard_scans.rs"]
mod shard_scans;
#[path = "cuda/top_p.rs"]
mod top_p;
#[path = "cuda/top_p_alone.rs"]
mod top_p_alone;

suite!(tiled, Gpu::TILED);
suite!(portable, Gpu::Tiled(KernelChoice::Portable));
suite!(unaligned, Gpu::Tiled(KernelChoice::PortableUnaligned));

/// Replays a graph of a call over device memory on the caller's stream; each replay reads new positions.
#[test]
fn a_captured_call_draws_fresh_noise_when_positions_change() {
    let Some(_) = Gpu::TILED.device() else { return };
    for choice in CHOICES {
        [RowFeatures::Bare, RowFeatures::Any].into_iter().for_each(|kinds| captured_call(choice, kinds));
    }
}

fn captured_call(choice: KernelChoice, kinds: RowFeatures) {
    let problem = Problem::integers(Size::new(5, 3001, 136), DType::BF16, DType::BF16, 12);
    let mut there = OnDevice::new(&problem, 0);
    // SAFETY: the weight is on this device, of this size, and outlives the sampler's launches.
    let mut sampler = unsafe { DeviceTiled::with_kernels(there.head, 5, &there.device, choice) }.unwrap();
    sampler.prepare(kinds).unwrap();
    // SAFETY: hidden states, rows and draws are on this device and outlive the graph; one stream is used.
    let launch = || unsafe { sampler.launch(&there.stream, &there.hidden, there.rows_at, there.draws_at, kinds) };
    let graph = captured(&there.stream, launch);
    let mut tokens = Vec::new();
    for position in 0..4 {
        let rows: Vec<_> = (0..5).map(|seed| RowParams { seed, position, ..RowParams::default() }).collect();
        there.set_bare(&rows);
        graph.launch().unwrap();
        let found = there.draws();
        let plan = Plan { max_rows: 5, ..Plan::default() };
        assert_drawn(&found, &reference(&problem, plan, ReferenceVariant::Tiled, &rows), &format!("{choice:?}"));
        tokens.push(found.iter().map(|draw| draw.token).collect::<Vec<_>>());
    }
    assert!(tokens.windows(2).all(|pair| pair[0] != pair[1]), "{tokens:?}");
    drop_outside_captures(sampler);
}

/// Launches in a thread that has no current context. The first launch encodes tensor maps for the driver.
#[test]
fn a_sampler_that_is_moved_to_another_thread_draws_there() {
    let Some(_) = Gpu::TILED.device() else { return };
    let problem = Problem::integers(Size::new(5, 3001, 136), DType::BF16, DType::BF16, 12);
    let mut there = OnDevice::new(&problem, 0);
    let rows: Vec<_> = (0..5).map(|seed| RowParams { seed, ..RowParams::default() }).collect();
    let want = reference(&problem, Plan { max_rows: 5, ..Plan::default() }, ReferenceVariant::Tiled, &rows);
    for choice in CHOICES {
        there.set_bare(&rows);
        let there = &there;
        // SAFETY: the weight is on this device, of this size, and outlives the sampler's launches.
        let mut sampler = unsafe { DeviceTiled::with_kernels(there.head, 5, &there.device, choice) }.unwrap();
        let launch = move || {
            let OnDevice { stream, hidden, rows_at, draws_at, .. } = there;
            // SAFETY: hidden states, rows and draws are on this device and outlive the launch; one stream is used.
            unsafe { sampler.launch(stream, hidden, *rows_at, *draws_at, RowFeatures::Unpenalised) }.unwrap();
            stream.synchronize().unwrap();
            drop_outside_captures(sampler);
        };
        std::thread::scope(|scope| scope.spawn(launch).join()).unwrap();
        assert_drawn(&there.draws(), &want, &format!("{choice:?}"));
    }
    let nothing = DeviceHead { weight: DeviceMatrix { rows: 0, ..there.head.weight }, ..there.head };
    // SAFETY: the head is refused, so nothing reads its memory.
    let refused = unsafe { DeviceTiled::new(nothing, 5, &there.device) }.err();
    assert_eq!(refused, Some(CudaError::Layout { what: "weight", reason: "it has no rows" }));
}

#[test]
fn integer_inputs_have_the_reference_bits_for_every_tile_and_transform() {
    let Some(_) = Gpu::TILED.device() else { return };
    let sizes = [(1, 1, 1), (3, 64, 8), (8, 1000, 200), (16, 517, 65), (31, 33_000, 130), (64, 5000, 512)];
    let large = [(100, 2048, 1023), (128, 4097, 96), (200, 50_000, 64), (256, 20_011, 192), (300, 700, 40)];
    for (i, (count, vocab, hidden)) in sizes.into_iter().chain(large).enumerate() {
        for dtype in [DType::BF16, DType::F16] {
            let mut problem = Problem::integers(Size::new(count, vocab, hidden), dtype, dtype, 40 + i as u64);
            if i % 2 == 1 {
                problem.bias = Some((0..vocab).map(|t| (t % 7) as f32 * 0.25).collect());
            }
            (problem.soft_cap, problem.scale) = if i % 3 == 2 { (Some(30.0), Some(1.5)) } else { (None, None) };
            let rows = rows_of(count, vocab);
            let plan = Plan { max_rows: count, max_draws: 3, ..Plan::default() };
            let want = reference(&problem, plan, ReferenceVariant::Tiled, &rows);
            for choice in CHOICES {
                let what = format!("{count} rows, {vocab} x {hidden}, {}, {choice:?}", dtype.name());
                assert_twice(&Gpu::Tiled(choice), &problem, plan, &rows, &want, &what);
            }
        }
    }
}

#[test]
fn rows_have_the_same_bits_in_batches_of_1_to_256() {
    let Some(_) = Gpu::TILED.device() else { return };
    let problem = Problem::gaussian(Size::new(256, 6011, 775), DType::BF16, DType::BF16, 21);
    let plan = Plan { max_rows: 256, max_draws: 3, ..Plan::default() };
    // All kernels must have the same bits.
    let all = CHOICES.map(|choice| same_in_batches(&Gpu::Tiled(choice), &problem, plan, &rows(256)));
    assert_eq!(all[0], all[1]);
    assert_eq!(all[0], all[2]);
}

#[test]
fn invalid_weights_are_their_rows_errors_and_leave_nothing_behind() {
    let Some(_) = Gpu::TILED.device() else { return };
    let good = Problem::integers(Size::new(8, 500, 16), DType::BF16, DType::BF16, 4);
    let head_bias: Vec<f32> = (0..500).map(|t| if t == 77 { f32::NEG_INFINITY } else { 0.0 }).collect();
    let rows = rows(8);
    let plan = Plan { max_rows: 8, max_draws: 3, ..Plan::default() };
    for dtype in [DType::BF16, DType::F16, DType::F32] {
        // Padding of the batch has hidden states of 0, and both values times 0 are NaN. This NaN must not reach a row.
        for poison in [f32::NAN, f32::INFINITY] {
            let at = |row: &[f32], k: usize, wrong: Option<f32>| wrong.filter(|_| k == 5).unwrap_or(row[k]);
            let weight =
                Tensor::from_fn(dtype, 500, 16, |t, k| at(&good.weight.row(t), k, (t == 123).then_some(poison)));
            let hidden = |element| Tensor::from_fn(dtype, 8, 16, |r, k| at(&good.hidden.row(r), k, Some(element)));
            let bad = Problem { bias: Some(head_bias.clone()), ..Problem::new(weight, hidden(1.0)) };
            // Infinity times a negative number is -inf, which only forbids the token.
            let after = hidden(-0.5);
            let (mut out, mut want, mut want_after) = (Samples::new(), Samples::new(), Samples::new());
            let mut reference = Reference::new(bad.head(), plan, ReferenceVariant::Tiled);
            reference.sample(bad.input().row_range(0..3), &rows[..3], &mut want).unwrap();
            reference.sample(after.matrix(), &rows, &mut want_after).unwrap();
            assert!(want.iter().all(|row| row.is_err()));
            assert!(want_after.iter().all(|row| row.is_err() == poison.is_nan()));
            for choice in CHOICES {
                let mut sampler = Gpu::Tiled(choice).build(bad.head(), plan).unwrap();
                for turn in 0..2 {
                    let what = format!("{poison} in {}, {choice:?}, turn {turn}", dtype.name());
                    sampler.sample(bad.input().row_range(0..3), &rows[..3], &mut out).unwrap();
                    assert_eq!(RowBits::all(&out), RowBits::all(&want), "{what}");
                    sampler.sample(after.matrix(), &rows, &mut out).unwrap();
                    assert_eq!(RowBits::all(&out), RowBits::all(&want_after), "{what}, more rows");
                }
            }
        }
    }
}
