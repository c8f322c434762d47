//! The assumptions about tensor cores in the proof of `dot_error_bound` (docs/exactness.md).

use super::backends::gpu::{CHOICES, Gpu};
use flash_sampling_conformance::SamplerFactory;
use flash_sampling_conformance::problem::Problem;
use flash_sampling_conformance::tensor::Tensor;
use flash_sampling_core::backend::canonical::{canonical_dot, dot_error_bound, norm};
use flash_sampling_core::{DType, Plan, RowParams, Samples};

const VOCAB: usize = 70;

/// Returns the kernels' dot products of two equal rows, from logits of greedy draws, in batches for every tile.
fn dots(row: &[f32], dtype: DType) -> Vec<(String, f32)> {
    let plan = Plan { max_rows: 256, ..Plan::default() };
    let rows = vec![RowParams { temperature: 0.0, ..RowParams::default() }; 256];
    let [weight, hidden] = [VOCAB, 256].map(|count| Tensor::from_fn(dtype, count, row.len(), |_, k| row[k]));
    let problem = Problem::new(weight, hidden);
    let (mut out, mut found) = (Samples::new(), Vec::new());
    for choice in CHOICES {
        let mut sampler = Gpu::Tiled(choice).build(problem.head(), plan).unwrap();
        for count in [1, 16, 32, 64, 96, 128, 192, 224, 256] {
            sampler.sample(problem.input().row_range(0..count), &rows[..count], &mut out).unwrap();
            let what = format!("{} with {choice:?}, {count} rows", dtype.name());
            found.extend(out.iter().map(|row| (what.clone(), row.unwrap().draws[0].logit)));
        }
    }
    found
}

/// Sums 1, zeros to the end of its step, and products of 2^-24, which are half of float32's last bit at 1. Hardware
/// that drops this bit gives 1.
#[test]
fn tensor_cores_keep_a_bit_beyond_float32() {
    let Some(_) = Gpu::TILED.device() else { return };
    let row: Vec<f32> = (0..4112)
        .map(|k| {
            if k == 0 {
                1.0
            } else if k < 16 {
                0.0
            } else {
                2f32.powi(-12)
            }
        })
        .collect();
    for dtype in [DType::BF16, DType::F16] {
        for (what, dot) in dots(&row, dtype) {
            assert_eq!(dot, 1.0 + 2f32.powi(-12), "{what}");
        }
    }
}

/// Sums 1 and products a little below 2^-24 or 2^-25. Hardware that keeps only one or two bits beyond float32 loses
/// these products.
#[test]
fn dots_that_lose_most_stay_within_the_bound() {
    let Some(_) = Gpu::TILED.device() else { return };
    for small in [1.992_187_5 * 2f32.powi(-13), 1.406_25 * 2f32.powi(-13), 1.992_187_5 * 2f32.powi(-14)] {
        let row: Vec<f32> = (0..4096).map(|k| if k == 0 { 1.0 } else { small }).collect();
        let (exact, bound) = (canonical_dot(&row, &row), dot_error_bound(row.len(), norm(&row), norm(&row)));
        let mut worst = 0.0f64;
        for (what, dot) in [DType::BF16, DType::F16].into_iter().flat_map(|dtype| dots(&row, dtype)) {
            let error = (f64::from(dot) - exact).abs();
            assert!(error <= bound, "{what}: {error} above {bound}");
            worst = worst.max(error / bound);
        }
        println!("products of {:e}: {worst:.3} of the bound", small * small);
    }
}
