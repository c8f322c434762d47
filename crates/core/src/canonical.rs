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
/// `hidden (2^-23 |a| |b| + 2^-126 (|a| + |b| + 2))`.
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
}
