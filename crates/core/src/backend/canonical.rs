//! A dot product with the same bits on every backend.
//!
//! Float32 sums differ between instruction sets by rounding. The canonical dot product is a float64 sum in one fixed
//! order, so it has the same bits on every machine. Products of bf16, f16 and f32 values are exact in float64, and so
//! are the weights of every quantised type.

use crate::head::Head;
use crate::matrix::{DType, Matrix};

/// Number of partial sums of the canonical order.
pub const LANES: usize = 32;

/// `sum_k a[k] * b[k]` in the canonical order: 32 partial sums by `k mod 32`, in ascending order of `k`, then pairwise
/// halving (lane `j` adds lane `j + 16`, then `j + 8`, ...).
#[inline]
pub fn canonical_dot<T: Copy + Into<f64>>(a: &[T], b: &[f32]) -> f64 {
    let mut sums = [0f64; LANES];
    let (a_chunks, a_tail) = a.as_chunks::<LANES>();
    let (b_chunks, b_tail) = b.as_chunks::<LANES>();
    for (a, b) in a_chunks.iter().zip(b_chunks) {
        for j in 0..LANES {
            sums[j] += a[j].into() * f64::from(b[j]);
        }
    }
    for (s, (a, b)) in sums.iter_mut().zip(a_tail.iter().zip(b_tail)) {
        *s += (*a).into() * f64::from(*b);
    }
    let mut width = LANES / 2;
    while width > 0 {
        for j in 0..width {
            sums[j] += sums[j + width];
        }
        width /= 2;
    }
    sums[0]
}

/// The raw logit of one token: the canonical dot product rounded to float32, then the head's transform.
///
/// `hidden` is the row in float32; `scratch` has as many elements as `hidden`.
pub fn canonical_logit(head: &Head<'_>, token: u32, hidden: &[f32], scratch: &mut [f64]) -> f32 {
    head.weight().row_to_f64(head.weight_row(token), scratch);
    let mut logit = [canonical_dot(scratch, hidden) as f32];
    head.transform(token, &mut logit);
    logit[0]
}

/// The terms that a weight's type adds to a row in [`dot_error_bound`].
///
/// One for types that float32 does not hold exactly, because kernels round the weights. Proof: `docs/exactness.md`.
pub fn extra_terms(weight: DType) -> usize {
    usize::from(!weight.is_exact_in_f32())
}

/// The largest Euclidean norm of a row's [magnitudes](Matrix::row_magnitudes). With a hidden state's norm, it bounds the rounding error of all dot products.
pub fn largest_norm(matrix: &Matrix<'_>) -> f64 {
    let mut row = vec![0.0; matrix.cols()];
    let mut largest = 0.0f64;
    for r in 0..matrix.rows() {
        matrix.row_magnitudes(r, &mut row);
        largest = largest.max(norm(&row));
    }
    largest
}

/// The Euclidean norm.
pub fn norm(row: &[f32]) -> f64 {
    canonical_dot(row, row).sqrt()
}

/// A bound on the error of a float32 dot product of `hidden` terms.
///
/// The bound is `(hidden + 2) (2^-23 |a| |b| + 2^-126 (|a| + |b| + 2))`. It holds for any order of summation, with or
/// without fused multiply-adds, with rounding to nearest or towards zero, and with subnormal inputs and sums kept or
/// taken as zero. It also holds for tensor cores of compute capability 8.0 and up: they add blocks of products with a
/// common exponent, and drop bits more than one or two places below float32's last. Proof: `docs/exactness.md`.
pub fn dot_error_bound(hidden: usize, norm_a: f64, norm_b: f64) -> f64 {
    let n = hidden as f64 + 2.0;
    n * (2f64.powi(-23) * norm_a * norm_b + 2f64.powi(-126) * (norm_a + norm_b + 2.0))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_order_is_the_one_written_down() {
        let a: Vec<f32> = (0..77).map(|i| (i as f32 * 0.37).sin()).collect();
        let b: Vec<f32> = (0..77).map(|i| (i as f32 * 0.91).cos()).collect();
        let mut sums = vec![0f64; 32];
        for k in 0..77 {
            sums[k % 32] += f64::from(a[k]) * f64::from(b[k]);
        }
        while sums.len() > 1 {
            let high = sums.split_off(sums.len() / 2);
            sums.iter_mut().zip(high).for_each(|(s, h)| *s += h);
        }
        assert_eq!(canonical_dot(&a, &b).to_bits(), sums[0].to_bits());
    }

    #[test]
    fn f32_sums_stay_within_the_bound() {
        for n in [1usize, 7, 100, 5000] {
            let a: Vec<f32> = (0..n).map(|i| (i as f32 * 1.7).sin()).collect();
            let b: Vec<f32> = (0..n).map(|i| (i as f32 * 0.3).cos()).collect();
            let plain: f32 = a.iter().zip(&b).fold(0.0, |s, (x, y)| s + x * y);
            let error = (f64::from(plain) - canonical_dot(&a, &b)).abs();
            assert!(error <= dot_error_bound(n, norm(&a), norm(&b)));
        }
    }

    /// A dot product of tensor cores (arXiv 2511.10909, 2512.07004).
    ///
    /// Each step adds `block` exact products and the sum so far. It truncates each term `extra` bits below float32's
    /// last bit at the largest exponent, adds the terms exactly, and truncates the sum to float32. The exponent of a
    /// product is the sum of its factors' exponents, because products are not normalised.
    fn tensor_core_dot(a: &[f32], b: &[f32], block: usize, extra: i32) -> f64 {
        let exponent = |x: f64| if x == 0.0 { -300 } else { (x.abs().to_bits() >> 52) as i32 - 1023 };
        let cut = |x: f64, unit: f64| (x / unit).trunc() * unit;
        let mut sum = 0.0f64;
        for (a, b) in a.chunks(block).zip(b.chunks(block)) {
            let terms = || a.iter().zip(b).map(|(x, y)| (f64::from(*x), f64::from(*y)));
            let largest = terms().map(|(x, y)| exponent(x) + exponent(y)).fold(exponent(sum), i32::max);
            let unit = 2f64.powi(largest.max(-133) - 23 - extra);
            sum = terms().fold(cut(sum, unit), |sum, (x, y)| sum + cut(x * y, unit));
            sum = cut(sum, 2f64.powi(exponent(sum).max(-126) - 23));
        }
        sum
    }

    /// The error of [`tensor_core_dot`] divided by its bound.
    fn share_of_the_bound(a: &[f32], b: &[f32], block: usize, extra: i32) -> f64 {
        let error = (tensor_core_dot(a, b, block, extra) - canonical_dot(a, b)).abs();
        error / dot_error_bound(a.len(), norm(a), norm(b))
    }

    #[test]
    fn sums_of_tensor_cores_stay_within_the_bound() {
        // A 1, then products a little below the truncation unit, which are all lost.
        let lost = |n: usize, extra: i32| -> Vec<f32> {
            // The square root of 0.99 or 0.98 units, in bf16's eight bits.
            let odd = (23 + extra) % 2 != 0;
            let small = if odd { 1.40625 } else { 1.9921875 } * 2f32.powi(-(23 + extra).div_euclid(2) - 1);
            core::iter::once(1.0).chain(core::iter::repeat_n(small, n - 1)).collect()
        };
        let wild = |n: usize, salt: f32| -> Vec<f32> {
            let value = |i: usize| (i as f32 * salt).sin() * 2f32.powi((i * 7 % 23) as i32 - 11);
            (0..n).map(|i| half::bf16::from_f32(value(i)).to_f32()).collect()
        };
        // Products per step and extra bits: compute capability 8.0; 9.0 and 10.0; the minimum that the proof needs.
        for (block, extra) in [(8, 1), (16, 2), (2, 1)] {
            for n in [1, 2, 3, 8, 17, 100, 4096, 20_001] {
                assert!(share_of_the_bound(&wild(n, 1.7), &wild(n, 0.3), block, extra) <= 1.0, "{n} terms");
                let share = share_of_the_bound(&lost(n, extra), &lost(n, extra), block, extra);
                assert!(share <= 1.0, "{n} terms");
                // The bound is tight up to the factor of the proof: 1/2 or 1/4.
                assert!(n < 4096 || share > 0.95 * 0.5f64.powi(extra), "{n} terms, {extra} bits: {share}");
            }
        }
        // The negative control: tensor cores with one bit less than float32 exceed the bound.
        assert!(share_of_the_bound(&lost(4096, -1), &lost(4096, -1), 16, -1) > 1.9);
    }
}
