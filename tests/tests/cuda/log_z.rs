//! Draws over device memory with log Z: equal to draws without it, and log Z is the logarithm of the row's mass.

use super::backends::gpu::{CHOICES, Gpu};
use super::backends::gpu_memory::{OnDevice, POISON, bits, captured};
use flash_sampling_conformance::problem::{Problem, Size};
use flash_sampling_conformance::suite::drop_outside_captures;
use flash_sampling_core::DType;
use flash_sampling_core::reference::log_mass;
use flash_sampling_cuda::DeviceAddress;
use flash_sampling_cuda::{DeviceHead, DeviceTiled, KernelChoice, RowFeatures, abi};

/// Inverse temperatures at which logits of integers, which are exact, have the spread of a language model's logits.
const INV_TEMPERATURE: [f32; 3] = [0.0625, 0.03125, 0.25];
/// Returns row `r`: random rows at several temperatures, and greedy rows.
fn row(r: usize) -> abi::Row {
    abi::Row {
        seed: 40 + r as u64,
        position: 1 << 34 | r as u64,
        inv_temperature: INV_TEMPERATURE[r % 3],
        greedy: (r % 5 == 4).into(),
        ..abi::Row::default()
    }
}

/// Returns the largest error of log Z over the rows, and asserts that log Z changes no bit of their draws.
fn worst(problem: &Problem, scale: f32, mask: Option<&[u32]>, choice: KernelChoice, kinds: RowFeatures) -> f64 {
    const FIRST_TOKEN: u32 = 6;
    let mut there = OnDevice::new(problem, FIRST_TOKEN);
    let mask_there = mask.map(|mask| there.stream.clone_htod(mask).unwrap());
    let count = problem.rows();
    let mut rows: Vec<abi::Row> = (0..count).map(row).collect();
    if let (Some(words), Some(mask)) = (&mask_there, mask) {
        rows.iter_mut().step_by(2).for_each(|row| {
            (row.mask, row.mask_words) = (DeviceAddress::of(words, &there.stream), mask.len() as u32);
        });
    }
    there.set(&rows);
    let mut plain_there = there.stream.clone_htod(&vec![POISON; count]).unwrap();
    let mut log_z_there = there.stream.clone_htod(&vec![f64::NAN; count]).unwrap();
    let (plain_at, log_z_at) =
        (DeviceAddress::of(&plain_there, &there.stream), DeviceAddress::of(&log_z_there, &there.stream));
    there.stream.synchronize().unwrap();
    let head = DeviceHead { scale, ..there.head };
    // SAFETY: the weight is on this device, of this size, and outlives the sampler's launches.
    let mut sampler = unsafe { DeviceTiled::with_kernels(head, count, &there.device, choice) }.unwrap();
    let OnDevice { stream, hidden, rows_at, draws_at, .. } = &there;
    // SAFETY: all of it is on this device, of the stated sizes, and outlives the graph; one stream is used.
    let mut call = || unsafe {
        sampler.launch(stream, hidden, *rows_at, plain_at, RowFeatures::Any)?;
        sampler.launch_with_log_z(stream, hidden, *rows_at, *draws_at, log_z_at, kinds)
    };
    call().unwrap();
    stream.synchronize().unwrap();
    let graph = captured(stream, call);
    there.set(&rows);
    there.stream.memcpy_htod(&vec![POISON; count], &mut plain_there).unwrap();
    there.stream.memcpy_htod(&vec![f64::NAN; count], &mut log_z_there).unwrap();
    // Two calls, so state that a call leaves in the scratch changes the result.
    (0..2).for_each(|_| graph.launch().unwrap());
    let plain = there.stream.clone_dtoh(&plain_there).unwrap();
    let log_z = there.stream.clone_dtoh(&log_z_there).unwrap();
    let draws = there.draws();
    drop_outside_captures(sampler);
    assert_eq!(bits(&draws), bits(&plain), "{choice:?}, {kinds:?}: log Z changes draws");
    let mut worst = 0.0f64;
    for (r, row) in rows.iter().enumerate() {
        let allowed = |t: usize| match mask.filter(|_| !row.mask.is_null()) {
            Some(mask) => mask.get((t + 6) / 32).is_some_and(|word| word >> ((t + 6) % 32) & 1 == 1),
            None => true,
        };
        let logits = problem.raw_logits(r).into_iter().enumerate().filter(|(t, _)| allowed(*t));
        let logits: Vec<f32> = logits.map(|(_, l)| l * scale * row.inv_temperature).collect();
        let error = (log_z[r] - log_mass(&logits)).abs();
        assert!(error < 1e-3, "{choice:?}, {kinds:?}, row {r} of {count}: {}, not {}", log_z[r], log_mass(&logits));
        worst = worst.max(error);
    }
    worst
}

#[test]
fn log_z_comes_with_the_same_draws_and_is_right() {
    right_for(&[(1, 4_003, DType::BF16), (3, 17, DType::F16), (13, 3_001, DType::F16), (70, 1_000, DType::BF16)]);
}

#[test]
fn log_z_of_large_calls_is_right() {
    right_for(&[
        (1, 40_003, DType::BF16),
        (30, 5_000, DType::BF16),
        (61, 9_999, DType::BF16),
        (128, 2_050, DType::F16),
        (150, 9_003, DType::BF16),
        (201, 34_003, DType::BF16),
    ]);
}

/// Checks log Z for heads of the given rows, tokens and type.
fn right_for(sizes: &[(usize, usize, DType)]) {
    let Some(_) = Gpu::TILED.device() else { return };
    let mut of_bare = 0.0f64;
    for &(rows, vocab, dtype) in sizes {
        let problem = Problem::integers(Size::new(rows, vocab, 136), dtype, dtype, 77 + rows as u64);
        let mask: Vec<u32> = (0..vocab.div_ceil(32) as u32).map(|w| w.wrapping_mul(0x9e37_79b9) | 1 << 9).collect();
        // Exact logits, and larger logits with rounding.
        for scale in [0.5, 3.15] {
            of_bare = of_bare.max(worst(&problem, scale, None, KernelChoice::Fastest, RowFeatures::Bare));
        }
        assert!(of_bare < 2e-6, "{rows} rows: log Z is {of_bare:.1e} off");
        for choice in CHOICES {
            let exact = worst(&problem, 1.0, Some(&mask), choice, RowFeatures::Any);
            assert!(exact < 1e-8, "{choice:?}, {rows} rows: log Z is {exact:.1e} off");
        }
    }
    println!("log Z of bare rows is at most {of_bare:.1e} off");
}
