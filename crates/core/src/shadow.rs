//! The shadow of a weight: an 8-bit copy with a bound on its error.
//!
//! A sampler multiplies hidden states by the shadow, which has half the bytes of a bf16 weight. The bounds tell which
//! tokens can win, and only these tokens get their logit from the weight. So a draw with a shadow has the token, score
//! and logit of the draw without it. Proof: `docs/exactness.md`.

use crate::error::HeadError;
use crate::matrix::Matrix;
use core::ops::Range;

/// Rows of codes are a multiple of this number of bytes apart.
const ALIGNMENT: usize = 64;
/// The largest code.
const MOST: f32 = 127.0;

/// Returns the bytes from one row of codes to the next, for a weight with `cols` columns.
pub fn code_stride(cols: usize) -> usize {
    cols.next_multiple_of(ALIGNMENT)
}

/// An 8-bit copy of a weight `[rows, cols]` in bf16, f16 or f32, borrowed.
///
/// Row `v` of the copy is `scales[v] * codes[v]`. Its Euclidean distance to row `v` of the weight is at most `errors[v]`,
/// and its norm at most `norms[v]`. A weight row with a NaN or an infinity has an infinite error.
#[derive(Clone, Copy, Debug)]
pub struct Shadow<'a> {
    codes: &'a [i8],
    cols: usize,
    scales: &'a [f32],
    errors: &'a [f32],
    norms: &'a [f32],
}

impl<'a> Shadow<'a> {
    /// Creates a shadow from its parts: codes `[rows, code_stride(cols)]`, zero beyond `cols`, and a number per row.
    ///
    /// # Errors
    /// [`HeadError::ShadowLength`] if a part has not the size of the others.
    pub fn new(codes: &'a [i8], cols: usize, [scales, errors, norms]: [&'a [f32]; 3]) -> Result<Self, HeadError> {
        let rows = scales.len();
        let parts = [
            ("codes", codes.len(), rows.saturating_mul(code_stride(cols))),
            ("errors", errors.len(), rows),
            ("norms", norms.len(), rows),
        ];
        match parts.into_iter().find(|(_, found, needed)| found != needed) {
            Some((part, found, needed)) => Err(HeadError::ShadowLength { part, needed, found }),
            None => Ok(Shadow { codes, cols, scales, errors, norms }),
        }
    }

    /// Rows of the weight.
    pub fn rows(&self) -> usize {
        self.scales.len()
    }

    /// Columns of the weight.
    pub fn cols(&self) -> usize {
        self.cols
    }

    /// The codes, `[rows, code_stride(cols)]`.
    pub fn codes(&self) -> &'a [i8] {
        self.codes
    }

    /// The factor of each row's codes.
    pub fn scales(&self) -> &'a [f32] {
        self.scales
    }

    /// The largest Euclidean distance of each row to its weight row.
    pub fn errors(&self) -> &'a [f32] {
        self.errors
    }

    /// The largest Euclidean norm of each row.
    pub fn norms(&self) -> &'a [f32] {
        self.norms
    }

    /// The rows `range`.
    ///
    /// # Panics
    /// If `range` is out of range.
    pub fn row_range(&self, range: Range<usize>) -> Shadow<'a> {
        let stride = code_stride(self.cols);
        Shadow {
            codes: &self.codes[range.start * stride..range.end * stride],
            cols: self.cols,
            scales: &self.scales[range.clone()],
            errors: &self.errors[range.clone()],
            norms: &self.norms[range],
        }
    }
}

/// The memory of a [`Shadow`].
#[derive(Clone, Debug, Default, PartialEq)]
pub struct ShadowBuffer {
    codes: Vec<i8>,
    cols: usize,
    scales: Vec<f32>,
    errors: Vec<f32>,
    norms: Vec<f32>,
}

impl ShadowBuffer {
    /// Makes the shadow of a weight on the caller's thread.
    ///
    /// # Errors
    /// [`HeadError::ShadowType`] if the weight has not bf16, f16 or f32 elements.
    pub fn new(weight: &Matrix<'_>) -> Result<Self, HeadError> {
        ShadowBuffer::with(weight, |parts| parts.for_each(ShadowRows::fill))
    }

    /// Makes the shadow of a weight, with `fill` to run [`ShadowRows::fill`] of every part, on any threads.
    ///
    /// # Errors
    /// As for [`ShadowBuffer::new`].
    pub fn with<'w>(
        weight: &Matrix<'w>,
        fill: impl FnOnce(&mut (dyn Iterator<Item = ShadowRows<'_, 'w>> + Send)),
    ) -> Result<Self, HeadError> {
        /// Weight rows of a part.
        const PART: usize = 256;
        if !weight.dtype().is_float() {
            return Err(HeadError::ShadowType { dtype: weight.dtype() });
        }
        let (rows, cols) = (weight.rows(), weight.cols());
        let stride = code_stride(cols);
        let mut buffer = ShadowBuffer {
            codes: vec![0; rows * stride],
            cols,
            scales: vec![0.0; rows],
            errors: vec![0.0; rows],
            norms: vec![0.0; rows],
        };
        let numbers = buffer.scales.chunks_mut(PART).zip(buffer.errors.chunks_mut(PART));
        let numbers = numbers.zip(buffer.norms.chunks_mut(PART));
        let mut parts = numbers.zip(buffer.codes.chunks_mut(PART * stride)).zip((0..rows).step_by(PART)).map(
            |((((scales, errors), norms), codes), at)| {
                let weight = weight.row_range(at..rows.min(at + PART));
                ShadowRows { weight, codes, numbers: [scales, errors, norms] }
            },
        );
        fill(&mut parts);
        Ok(buffer)
    }

    /// The shadow.
    pub fn shadow(&self) -> Shadow<'_> {
        let ShadowBuffer { codes, cols, scales, errors, norms } = self;
        Shadow { codes, cols: *cols, scales, errors, norms }
    }

    /// Bytes of memory.
    pub fn bytes(&self) -> usize {
        self.codes.len() + 3 * size_of_val(&*self.scales)
    }
}

/// Some rows of a shadow that is being made.
#[derive(Debug)]
pub struct ShadowRows<'a, 'w> {
    weight: Matrix<'w>,
    codes: &'a mut [i8],
    numbers: [&'a mut [f32]; 3],
}

impl ShadowRows<'_, '_> {
    /// The number of rows.
    pub fn count(&self) -> usize {
        self.weight.rows()
    }

    /// Computes the rows.
    pub fn fill(self) {
        let [scales, errors, norms] = self.numbers;
        let mut row = vec![0.0; self.weight.cols()];
        let codes = self.codes.chunks_exact_mut(code_stride(row.len()));
        let numbers = scales.iter_mut().zip(errors).zip(norms);
        for ((r, codes), ((scale, error), norm)) in codes.enumerate().zip(numbers) {
            self.weight.row_to_f32(r, &mut row);
            [*scale, *error, *norm] = shadow_row(&row, &mut codes[..row.len()]);
        }
    }
}

/// Writes the codes of a weight row; returns its scale, error and norm.
///
/// A code is the weight times `1 / scale` (0 for a scale of 0) in float32, rounded to nearest, ties to even.
pub fn shadow_row(row: &[f32], codes: &mut [i8]) -> [f32; 3] {
    let largest = row.iter().fold(0.0f32, |most, weight| most.max(weight.abs()));
    if !row.iter().all(|weight| weight.is_finite()) {
        codes.fill(0);
        return [0.0, f32::INFINITY, 0.0];
    }
    // A scale that is not a normal number would not have the precision for the largest code.
    let scale = (largest / MOST).next_up();
    let scale = if scale.is_normal() { scale } else { 0.0 };
    let inverse = if scale > 0.0 { 1.0 / scale } else { 0.0 };
    for (code, weight) in codes.iter_mut().zip(row) {
        *code = (weight * inverse).round_ties_even().clamp(-MOST, MOST) as i8;
    }
    let (mut error, mut norm) = ([0.0f64; 8], [0.0f64; 8]);
    for (k, (code, weight)) in codes.iter().zip(row).enumerate() {
        // The product is exact, and the difference has an error below 2^-52 of its larger operand.
        let copy = f64::from(scale) * f64::from(*code);
        let difference = f64::from(*weight) - copy;
        error[k % 8] += difference * difference;
        norm[k % 8] += copy * copy;
    }
    let [error, norm] = [error, norm].map(|squares| squares.iter().sum::<f64>().sqrt());
    [scale, round_up(error + 1e-15 * f64::from(largest) * (row.len() as f64).sqrt()), round_up(norm)]
}

/// Returns a float above a sum of squares' root, whose own error is at most 2^-20 of it.
fn round_up(x: f64) -> f32 {
    if x == 0.0 { 0.0 } else { ((x * (1.0 + 2f64.powi(-20))) as f32).next_up() }
}

/// The bounds of a hidden state on all tokens: a shadow's dot product differs from the float32 dot product of the weight
/// by at most `error * errors[v] + norm * norms[v] + constant`.
///
/// The shadow's dot product is of the hidden state in [digits](hidden_digits), and has at most `cols / 16 + 40` roundings
/// of float32. Proof: `docs/exactness.md`.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct ShadowBound {
    /// The factor of [`Shadow::errors`].
    pub error: f32,
    /// The factor of [`Shadow::norms`].
    pub norm: f32,
    /// Added for every token.
    pub constant: f32,
}

impl ShadowBound {
    /// The bounds of a hidden state with `cols` elements and Euclidean norm `hidden`, whose digits differ from it by a
    /// vector of norm `digits`. `largest` is the largest [`Shadow::norms`] plus [`Shadow::errors`] of a token.
    ///
    /// `None` if a dot product may overflow, or if anything is not finite.
    pub fn new(cols: usize, hidden: f64, digits: f64, largest: f64) -> Option<Self> {
        if !(hidden * largest < 2f64.powi(100) && hidden < 2f64.powi(100) && largest < 2f64.powi(100)) {
            return None;
        }
        let terms = cols as f64 + 2.0;
        let rounding = terms * (2f64.powi(-23) + 2f64.powi(-28)) + 2f64.powi(-18);
        let tiny = terms * 2f64.powi(-126);
        Some(ShadowBound {
            error: round_up(hidden * (1.0 + rounding) + tiny),
            norm: round_up(digits * (1.0 + rounding) + hidden * rounding + tiny),
            // The product of two scales may be zero instead of subnormal; its integers are below 2^22.
            constant: round_up(tiny * (hidden + 2f64.powi(23))),
        })
    }

    /// The bound for a token.
    #[inline(always)]
    pub fn of(&self, error: f32, norm: f32) -> f32 {
        error * self.error + (norm * self.norm + self.constant)
    }
}

/// The digits of hidden states: `hidden[k]` is about `scale * (256 * high[k] + low[k])`.
///
/// `high` and `low` have as many elements as the hidden state. Returns the scale, the Euclidean norm of the hidden state,
/// and that of its difference to the digits; norms that are not finite for a hidden state that has no digits.
pub fn hidden_digits(hidden: &[f32], mut digit: impl FnMut(usize, [i8; 2])) -> (f32, f64, f64) {
    /// `256 * 127 + 127`.
    const MOST: f32 = 32_639.0;
    let largest = hidden.iter().fold(0.0f32, |most, x| most.max(x.abs()));
    let scale = (largest / MOST).next_up();
    let scale = if scale.is_normal() { scale } else { 0.0 };
    let inverse = if scale > 0.0 { 1.0 / scale } else { 0.0 };
    let (mut norm, mut error) = (0.0f64, 0.0f64);
    for (k, x) in hidden.iter().enumerate() {
        let integer = (x * inverse).round_ties_even().clamp(-MOST, MOST) as i32;
        let low = integer as i8;
        digit(k, [((integer - i32::from(low)) >> 8) as i8, low]);
        let x = f64::from(*x);
        let difference = x - f64::from(scale) * f64::from(integer);
        norm += x * x;
        error += difference * difference;
    }
    (scale, norm.sqrt(), error.sqrt() + 1e-15 * norm.sqrt())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::backend::canonical::{canonical_dot, norm};
    use crate::matrix::DType;
    use half::bf16;

    fn values(count: usize, salt: f32) -> Vec<f32> {
        (0..count).map(|i| ((i as f32 * 1.37 + salt).sin() * 2.0).powi(3)).collect()
    }

    /// The largest share of the bound that a token's error takes, with hidden states of `digits` digits.
    fn largest_share(weight: &[f32], cols: usize, hidden: &[f32], digits: usize, shrink: f64) -> f64 {
        let rows = weight.len() / cols;
        let buffer = ShadowBuffer::new(&Matrix::new(weight, rows, cols).unwrap()).unwrap();
        let shadow = buffer.shadow();
        let mut integers = vec![0i32; cols];
        let (scale, size, error) = hidden_digits(hidden, |k, [high, low]| {
            integers[k] = 256 * i32::from(high) + if digits == 2 { i32::from(low) } else { 0 };
        });
        let largest = (0..rows).map(|v| f64::from(shadow.errors()[v] + shadow.norms()[v])).fold(0.0, f64::max);
        let bound = ShadowBound::new(cols, size, error, largest).unwrap();
        let share = |v: usize| {
            let codes = &shadow.codes()[v * code_stride(cols)..][..cols];
            let sum: i64 = codes.iter().zip(&integers).map(|(c, h)| i64::from(*c) * i64::from(*h)).sum();
            let approximate = f64::from(scale) * f64::from(shadow.scales()[v]) * sum as f64;
            let exact = canonical_dot(&weight[v * cols..][..cols], hidden);
            let bound = f64::from(bound.of((f64::from(shadow.errors()[v]) * shrink) as f32, shadow.norms()[v]));
            (approximate - exact).abs() / bound
        };
        (0..rows).map(share).fold(0.0, f64::max)
    }

    #[test]
    fn the_bound_holds() {
        for (rows, cols) in [(40, 1), (40, 2), (30, 63), (20, 64), (9, 1000)] {
            let weight = values(rows * cols, 0.3);
            for salt in [1.0, 2.0] {
                let share = largest_share(&weight, cols, &values(cols, salt), 2, 1.0);
                assert!(share <= 1.0, "[{rows}, {cols}]: {share}");
            }
        }
    }

    /// A hidden state along the residual of a row reaches the bound, so each part of it is needed.
    #[test]
    fn smaller_bounds_do_not_hold() {
        let cols = 256;
        let weight = values(cols, 0.3);
        let buffer = ShadowBuffer::new(&Matrix::new(&weight, 1, cols).unwrap()).unwrap();
        let shadow = buffer.shadow();
        let residual: Vec<f32> =
            weight.iter().zip(shadow.codes()).map(|(w, c)| w - shadow.scales()[0] * f32::from(*c)).collect();
        assert!((norm(&residual) / f64::from(shadow.errors()[0]) - 1.0).abs() < 1e-5);
        let share = largest_share(&weight, cols, &residual, 2, 1.0);
        assert!((0.9..=1.0).contains(&share), "{share}");
        // The negative controls: a residual norm that is too small, and one digit where the bound is of two.
        assert!(largest_share(&weight, cols, &residual, 2, 0.9) > 1.0);
        let exact: Vec<f32> = (0..cols).map(|k| (k % 2) as f32).collect();
        let mut hidden = vec![1.0 / 256.0; cols];
        hidden[0] = 1.0;
        assert!(largest_share(&exact, cols, &hidden, 2, 1.0) <= 1.0);
        assert!(largest_share(&exact, cols, &hidden, 1, 1.0) > 1.0);
    }

    #[test]
    fn codes_hold_a_row_up_to_half_a_step() {
        for row in [values(100, 0.1), vec![0.0; 5], vec![1e-40, -1e-41], vec![1.0], vec![-3e38, 1e30], vec![1.1e-36; 9]]
        {
            let mut codes = vec![99; row.len()];
            let [scale, error, size] = shadow_row(&row, &mut codes);
            let half = if scale > 0.0 { 0.5001 * f64::from(scale) } else { 127.0 * f64::from(f32::MIN_POSITIVE) };
            let copy = codes.iter().map(|c| f64::from(scale) * f64::from(*c));
            let residual = row.iter().zip(copy.clone()).map(|(w, c)| f64::from(*w) - c);
            assert!(residual.clone().all(|difference| difference.abs() <= half), "{row:?}");
            let norm = |of: &mut dyn Iterator<Item = f64>| of.map(|x| x * x).sum::<f64>().sqrt();
            assert!(norm(&mut residual.clone()) <= f64::from(error), "{row:?}");
            assert!(norm(&mut copy.clone()) <= f64::from(size), "{row:?}");
        }
        for bad in [f32::NAN, f32::INFINITY, f32::NEG_INFINITY] {
            assert_eq!(shadow_row(&[1.0, bad, 2.0], &mut [1; 3]), [0.0, f32::INFINITY, 0.0]);
        }
    }

    #[test]
    fn digits_hold_a_hidden_state() {
        let mut hidden = values(500, 0.7);
        hidden[77] = -40.0;
        let mut copy = vec![0i32; 500];
        let (scale, size, error) =
            hidden_digits(&hidden, |k, [high, low]| copy[k] = 256 * i32::from(high) + i32::from(low));
        assert_eq!(copy[77], -32_639);
        let difference: Vec<f32> =
            hidden.iter().zip(&copy).map(|(x, c)| (f64::from(*x) - f64::from(scale) * f64::from(*c)) as f32).collect();
        assert!((size - norm(&hidden)).abs() < 1e-9 && (error - norm(&difference)).abs() < 1e-6);
        assert!(error < 1e-3 * size);
        for bad in [f32::NAN, f32::INFINITY] {
            let (_, size, _) = hidden_digits(&[1.0, bad], |_, _| {});
            assert!(!size.is_finite() && ShadowBound::new(2, size, 0.0, 1.0).is_none());
        }
        assert_eq!(hidden_digits(&[0.0; 3], |_, digits| assert_eq!(digits, [0, 0])), (0.0, 0.0, 0.0));
        assert!(ShadowBound::new(2, 1e20, 0.0, 1e20).is_none());
    }

    #[test]
    fn parts_of_other_sizes_are_refused() {
        let weight: Vec<bf16> = values(300 * 3, 0.0).into_iter().map(bf16::from_f32).collect();
        let buffer = ShadowBuffer::new(&Matrix::new(&weight, 300, 3).unwrap()).unwrap();
        let shadow = buffer.shadow();
        let parts = [shadow.scales(), shadow.errors(), shadow.norms()];
        assert!(Shadow::new(shadow.codes(), 3, parts).is_ok());
        let error = Shadow::new(&shadow.codes()[1..], 3, parts).unwrap_err();
        assert!(error.to_string().contains("codes"), "{error}");
        assert!(Shadow::new(shadow.codes(), 3, [parts[0], parts[1], &parts[2][1..]]).is_err());
        let some = shadow.row_range(256..300);
        assert_eq!((some.rows(), some.codes()), (44, &shadow.codes()[256 * 64..]));
        let blocks = Matrix::from_bytes(&[0; 34], DType::Q8_0, 1, 32, 32).unwrap();
        assert!(matches!(ShadowBuffer::new(&blocks), Err(HeadError::ShadowType { dtype: DType::Q8_0 })));
    }
}
