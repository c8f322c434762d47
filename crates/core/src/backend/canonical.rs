//! One dot product that every backend can agree on.
//!
//! Float32 sums differ between instruction sets by rounding. The canonical dot product is a float64 sum in one fixed
//! order, so it has the same bits on every machine; products of bf16, f16 and f32 values are exact in it.

use crate::head::Head;
use crate::matrix::{Matrix, widen};

/// Partial sums of the canonical order.
pub const LANES: usize = 32;

/// `sum_k a[k] * b[k]` in the canonical order: 32 partial sums over `k mod 32`, ascending, then halved pairwise
/// (lane `j` takes lane `j + 16`, then `j + 8`, ...).
#[inline]
pub fn canonical_dot(a: &[f32], b: &[f32]) -> f64 {
    let mut sums = [0f64; LANES];
    let (a_chunks, a_tail) = a.as_chunks::<LANES>();
    let (b_chunks, b_tail) = b.as_chunks::<LANES>();
    for (a, b) in a_chunks.iter().zip(b_chunks) {
        for j in 0..LANES {
            sums[j] += f64::from(a[j]) * f64::from(b[j]);
        }
    }
    for (s, (a, b)) in sums.iter_mut().zip(a_tail.iter().zip(b_tail)) {
        *s += f64::from(*a) * f64::from(*b);
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

/// The raw logit of one token in canonical arithmetic: the canonical dot product rounded to float32, then the head's
/// transform. `scratch` must hold `hidden` elements; `hidden` is the row in float32.
pub fn canonical_logit(head: &Head<'_>, token: u32, hidden: &[f32], scratch: &mut [f32]) -> f32 {
    widen(head.weight().row_bytes(head.weight_row(token)), head.weight().dtype(), scratch);
    let mut logit = [canonical_dot(scratch, hidden) as f32];
    head.transform(token, &mut logit);
    logit[0]
}

/// The largest Euclidean norm of a row: with the norm of a hidden state it bounds every dot product's rounding error.
pub fn largest_norm(matrix: &Matrix<'_>) -> f64 {
    let mut row = vec![0.0; matrix.cols()];
    let mut largest = 0.0f64;
    for r in 0..matrix.rows() {
        matrix.row_to_f32(r, &mut row);
        largest = largest.max(norm(&row));
    }
    largest
}

/// The Euclidean norm.
pub fn norm(row: &[f32]) -> f64 {
    canonical_dot(row, row).sqrt()
}

/// A bound on the error of a float32 dot product of `hidden` terms, in any order of summation, with or without fused
/// multiply-adds, rounding to nearest or towards zero, taking subnormal inputs and sums as zero or not:
/// `(hidden + 2) (2^-23 |a| |b| + 2^-126 (|a| + |b| + 2))`.
///
/// Tensor cores of compute capability 8.0 and up are within it: they add blocks of products in a common exponent and cut
/// off what lies more than one or two bits below float32's last. The proof is in `docs/exactness.md`.
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

    /// A dot product as tensor cores take it (arXiv 2511.10909, 2512.07004): steps of `block` exact products and the sum
    /// so far, each cut off `extra` bits below the last bit that float32 has at the largest exponent, added exactly and cut
    /// off to float32. Their exponent is that of the factors, as sums of products are not normalised.
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

    /// As [`tensor_core_dot`]: error over bound.
    fn share_of_the_bound(a: &[f32], b: &[f32], block: usize, extra: i32) -> f64 {
        let error = (tensor_core_dot(a, b, block, extra) - canonical_dot(a, b)).abs();
        error / dot_error_bound(a.len(), norm(a), norm(b))
    }

    #[test]
    fn sums_of_tensor_cores_stay_within_the_bound() {
        // One, and then products a little below the unit that is cut off: all of them are lost.
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
        // Products a step and bits beyond float32's: 8.0, 9.0 and 10.0, and the least that the proof asks for.
        for (block, extra) in [(8, 1), (16, 2), (2, 1)] {
            for n in [1, 2, 3, 8, 17, 100, 4096, 20_001] {
                assert!(share_of_the_bound(&wild(n, 1.7), &wild(n, 0.3), block, extra) <= 1.0, "{n} terms");
                let share = share_of_the_bound(&lost(n, extra), &lost(n, extra), block, extra);
                assert!(share <= 1.0, "{n} terms");
                // As near as the proof says: half or a quarter of the bound.
                assert!(n < 4096 || share > 0.95 * 0.5f64.powi(extra), "{n} terms, {extra} bits: {share}");
            }
        }
        // Tensor cores that kept a bit less than float32 would not be within it.
        assert!(share_of_the_bound(&lost(4096, -1), &lost(4096, -1), 16, -1) > 1.9);
    }
}
