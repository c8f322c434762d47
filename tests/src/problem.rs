//! Heads and hidden states for laws.

use crate::data::{normal, small_integer};
use crate::tensor::Tensor;
use flash_sampling_core::reference::{Reference, ReferenceVariant};
use flash_sampling_core::{DType, Head, Matrix, Plan};
use half::bf16;

/// A head and its input: weight `[vocab, hidden]`, hidden states `[rows, hidden]`, and the head's transforms.
#[derive(Clone, Debug)]
pub struct Problem {
    /// Weight, `[vocab, hidden]`.
    pub weight: Tensor,
    /// Hidden states, `[rows, hidden]`.
    pub hidden: Tensor,
    /// See [`Head::with_bias`].
    pub bias: Option<Vec<f32>>,
    /// See [`Head::with_soft_cap`].
    pub soft_cap: Option<f32>,
    /// See [`Head::with_scale`].
    pub scale: Option<f32>,
    /// See [`Head::with_vocab_size`].
    pub vocab_size: Option<usize>,
}

impl Problem {
    /// Makes a problem whose head has no transforms.
    pub fn new(weight: Tensor, hidden: Tensor) -> Self {
        Problem { weight, hidden, bias: None, soft_cap: None, scale: None, vocab_size: None }
    }

    /// Makes `rows` rows with the given logits, each rounded to 16 bits, a sum of two bf16.
    ///
    /// The weight `[vocab, 2]` has the high and the low parts, and the hidden states are ones. So every backend's dot
    /// product is exact, also if it adds terms of up to 127 times the logit.
    pub fn of_logits(logits: &[f32], rows: usize) -> Self {
        let rounded = |logit: f32| match logit.to_bits() {
            bits if logit.is_finite() => f32::from_bits((bits + 0x7f + (bits >> 8 & 1)) & !0xff),
            _ => logit,
        };
        let part = |i: usize, k: usize| {
            let logit = rounded(logits[i]);
            let high = bf16::from_f32(logit).to_f32();
            if k == 0 || !high.is_finite() { high } else { logit - high }
        };
        let weight = Tensor::from_fn(DType::BF16, logits.len(), 2, |i, k| {
            // The sum of two infinite parts with different signs would be NaN.
            if k == 1 && !logits[i].is_finite() { 0.0 } else { part(i, k) }
        });
        Problem::new(weight, Tensor::from_fn(DType::BF16, rows, 2, |_, _| 1.0))
    }

    /// Makes weights and hidden states of small integers times powers of two, with logits of standard deviation about
    /// 1.5 and many ties. Every partial sum is exact in float32, so all orders of summation give the same bits.
    pub fn integers(shape: Size, weight: DType, hidden: DType, seed: u64) -> Self {
        // A logit is a sum of `hidden` products of variance (2 / 16) (2 / 4) w^2. The power of two w keeps its variance
        // near 2.
        let w = 2f32.powi(-((shape.hidden as f32 / 32.0).log2() / 2.0).round() as i32);
        let w = w.clamp(1.0 / 16.0, 4.0);
        Problem::new(
            Tensor::from_fn(weight, shape.vocab, shape.hidden, |i, k| {
                small_integer(seed, (i * shape.hidden + k) as u64, 2) as f32 * 0.25 * w
            }),
            Tensor::from_fn(hidden, shape.rows, shape.hidden, |i, k| {
                small_integer(!seed, (i * shape.hidden + k) as u64, 2) as f32 * 0.5
            }),
        )
    }

    /// Makes normal weights and hidden states; logits have a standard deviation of 2.
    pub fn gaussian(shape: Size, weight: DType, hidden: DType, seed: u64) -> Self {
        let sigma = 2.0 / (shape.hidden as f64).sqrt();
        Problem::new(
            Tensor::from_fn(weight, shape.vocab, shape.hidden, |i, k| {
                (sigma * normal(seed, (i * shape.hidden + k) as u64)) as f32
            }),
            Tensor::from_fn(hidden, shape.rows, shape.hidden, |i, k| {
                normal(!seed, (i * shape.hidden + k) as u64) as f32
            }),
        )
    }

    /// Returns the head.
    pub fn head(&self) -> Head<'_> {
        let usable = "the laws build valid heads";
        let mut head = Head::new(self.weight.matrix()).expect(usable);
        if let Some(bias) = &self.bias {
            head = head.with_bias(bias).expect(usable);
        }
        if let Some(cap) = self.soft_cap {
            head = head.with_soft_cap(cap).expect(usable);
        }
        if let Some(scale) = self.scale {
            head = head.with_scale(scale).expect(usable);
        }
        if let Some(size) = self.vocab_size {
            head = head.with_vocab_size(size).expect(usable);
        }
        head
    }

    /// Returns the hidden states, `[rows, hidden]`.
    pub fn input(&self) -> Matrix<'_> {
        self.hidden.matrix()
    }

    /// Returns the number of rows of the input.
    pub fn rows(&self) -> usize {
        self.hidden.rows()
    }

    /// Computes the raw logits of a row in canonical arithmetic.
    pub fn raw_logits(&self, row: usize) -> Vec<f32> {
        Reference::new(self.head(), Plan::default(), ReferenceVariant::Tiled).raw_logits(&self.hidden.row(row))
    }
}

/// The size of a problem.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Size {
    /// Rows of the hidden states.
    pub rows: usize,
    /// Rows of the weight.
    pub vocab: usize,
    /// Columns of both.
    pub hidden: usize,
}

impl Size {
    /// Makes a size from rows, vocab and hidden.
    pub const fn new(rows: usize, vocab: usize, hidden: usize) -> Self {
        Size { rows, vocab, hidden }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn two_bf16_columns_hold_16_bits_of_a_logit() {
        let logits = [1.234_567f32, -17.654_32, 0.0, f32::NEG_INFINITY];
        let back = Problem::of_logits(&logits, 1).raw_logits(0);
        for (l, b) in logits.iter().zip(&back) {
            assert!(l == b || (l - b).abs() <= l.abs() * 2f32.powi(-16), "{l} became {b}");
            assert!(!b.is_finite() || b.to_bits() & 0xff == 0, "{b} has more than 16 bits");
        }
    }

    #[test]
    fn integer_problems_are_exact_in_any_order() {
        for hidden in [1, 33, 4096] {
            let p = Problem::integers(Size::new(2, 50, hidden), DType::BF16, DType::F32, 9);
            let h = p.hidden.row(1);
            for (token, &logit) in p.raw_logits(1).iter().enumerate() {
                let forward = p.weight.row(token).iter().zip(&h).fold(0f32, |s, (a, b)| s + a * b);
                let backward = p.weight.row(token).iter().zip(&h).rev().fold(0f32, |s, (a, b)| s + a * b);
                assert_eq!((forward, backward), (logit, logit));
            }
        }
    }
}
