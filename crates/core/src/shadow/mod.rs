//! The shadow of a weight: an 8-bit copy with a bound on its error.
//!
//! A sampler multiplies hidden states by the shadow, which has half the bytes of a bf16 weight. The bounds show which
//! tokens can win. The sampler computes only the logits of these tokens from the weight. So a draw with a shadow has
//! the token, score and logit of the draw without it. Proof: `docs/exactness.md`.

#[cfg(test)]
mod tests;

use crate::error::HeadError;
use crate::matrix::Matrix;
use core::ops::Range;

/// The number of bytes from one row of codes to the next is a multiple of this number.
const ALIGNMENT: usize = 64;
/// The largest code.
const MAX_CODE: f32 = 127.0;

/// Returns the bytes from one row of codes to the next, for a weight with `cols` columns.
pub fn code_stride(cols: usize) -> usize {
    cols.next_multiple_of(ALIGNMENT)
}

/// An 8-bit copy of a weight `[rows, cols]` in bf16, f16 or f32, borrowed.
///
/// Row `v` of the copy is `scales[v] * codes[v]`. Its Euclidean distance to row `v` of the weight is at most
/// `errors[v]`, and its Euclidean norm at most `norms[v]`. The error of a weight row with a NaN or an infinity is
/// infinite.
#[derive(Clone, Copy, Debug)]
pub struct Shadow<'a> {
    codes: &'a [i8],
    cols: usize,
    scales: &'a [f32],
    errors: &'a [f32],
    norms: &'a [f32],
}

impl<'a> Shadow<'a> {
    /// Creates a shadow from its parts: codes `[rows, code_stride(cols)]`, zero beyond `cols`; scales, errors and norms
    /// `[rows]`, in this order.
    ///
    /// # Errors
    /// [`HeadError::ShadowLength`] if the length of a part does not match `cols` and the number of scales.
    pub fn new(codes: &'a [i8], cols: usize, [scales, errors, norms]: [&'a [f32]; 3]) -> Result<Self, HeadError> {
        let rows = scales.len();
        let parts = [
            ("codes", codes.len(), rows.saturating_mul(cols.checked_next_multiple_of(ALIGNMENT).unwrap_or(usize::MAX))),
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

    /// The factor of each row's codes, `[rows]`.
    pub fn scales(&self) -> &'a [f32] {
        self.scales
    }

    /// An upper bound of each row's Euclidean distance to its weight row, `[rows]`.
    pub fn errors(&self) -> &'a [f32] {
        self.errors
    }

    /// An upper bound of each row's Euclidean norm, `[rows]`.
    pub fn norms(&self) -> &'a [f32] {
        self.norms
    }

    /// The rows `range`.
    ///
    /// # Panics
    /// If `range` exceeds the rows.
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
    /// Makes the shadow of a weight `[rows, cols]` on the caller's thread.
    ///
    /// # Errors
    /// [`HeadError::ShadowType`] if the weight's elements are not bf16, f16 or f32.
    pub fn new(weight: &Matrix<'_>) -> Result<Self, HeadError> {
        ShadowBuffer::new_in_parts(weight, |parts| parts.for_each(ShadowRows::fill))
    }

    /// Makes the shadow of a weight in parts. `fill` calls [`ShadowRows::fill`] of every part, on any threads.
    ///
    /// # Errors
    /// As for [`ShadowBuffer::new`].
    pub fn new_in_parts<'w>(
        weight: &Matrix<'w>,
        fill: impl FnOnce(&mut (dyn Iterator<Item = ShadowRows<'_, 'w>> + Send)),
    ) -> Result<Self, HeadError> {
        /// Weight rows of a part.
        const PART_ROWS: usize = 256;
        if !weight.dtype().is_float() {
            return Err(HeadError::ShadowType { dtype: weight.dtype() });
        }
        let (rows, cols) = (weight.rows(), weight.cols());
        let stride = code_stride(cols);
        let mut buffer = ShadowBuffer {
            codes: vec![0; rows * stride],
            cols,
            scales: vec![0.0; rows],
            // A row that `fill` leaves out has no bound.
            errors: vec![f32::INFINITY; rows],
            norms: vec![0.0; rows],
        };
        let numbers = buffer.scales.chunks_mut(PART_ROWS).zip(buffer.errors.chunks_mut(PART_ROWS));
        let numbers = numbers.zip(buffer.norms.chunks_mut(PART_ROWS));
        let mut parts = numbers.zip(buffer.codes.chunks_mut(PART_ROWS * stride)).zip((0..rows).step_by(PART_ROWS)).map(
            |((((scales, errors), norms), codes), at)| {
                let weight = weight.row_range(at..rows.min(at + PART_ROWS));
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
}

/// A part of the rows of an unfinished shadow.
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

    /// Computes codes, scales, errors and norms of the rows.
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

/// Writes the codes of a weight row, and returns the row's scale, error and norm.
///
/// `row` and `codes` have the same length. A code is the weight times `1 / scale` in float32, rounded to nearest, ties
/// to even. With a scale of 0, all codes are 0.
pub fn shadow_row(row: &[f32], codes: &mut [i8]) -> [f32; 3] {
    let largest = row.iter().fold(0.0f32, |most, weight| most.max(weight.abs()));
    if !row.iter().all(|weight| weight.is_finite()) {
        codes.fill(0);
        return [0.0, f32::INFINITY, 0.0];
    }
    // A subnormal scale has too few bits: codes would exceed the largest code.
    let scale = (largest / MAX_CODE).next_up();
    let scale = if scale.is_normal() { scale } else { 0.0 };
    let inverse = if scale > 0.0 { 1.0 / scale } else { 0.0 };
    for (code, weight) in codes.iter_mut().zip(row) {
        *code = (weight * inverse).round_ties_even().clamp(-MAX_CODE, MAX_CODE) as i8;
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

/// Returns a float32 above the true value, if the relative error of `x` is at most 2^-20.
fn round_up(x: f64) -> f32 {
    if x == 0.0 { 0.0 } else { ((x * (1.0 + 2f64.powi(-20))) as f32).next_up() }
}

/// The bounds of one hidden state: for token `v`, the dot products of shadow and weight differ by at most
/// `error * errors[v] + norm * norms[v] + constant`.
///
/// The dot product of the weight is a float32 sum. The dot product of the shadow uses the hidden state in
/// [digits](hidden_digits), and has at most `cols / 16 + 40` roundings to float32. Proof: `docs/exactness.md`.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct ShadowBound {
    /// The factor of [`Shadow::errors`].
    pub error: f32,
    /// The factor of [`Shadow::norms`].
    pub norm: f32,
    /// The term of the bound that is the same for every token.
    pub constant: f32,
}

impl ShadowBound {
    /// Creates the bounds of a hidden state with `cols` elements and Euclidean norm `hidden_norm`.
    ///
    /// `digits_error` is the norm of the difference between the hidden state and its digits. `largest_norm` is the
    /// largest sum of a token's [`Shadow::norms`] and [`Shadow::errors`].
    ///
    /// Returns `None` if a dot product may overflow, or if an argument is not finite.
    pub fn new(cols: usize, hidden_norm: f64, digits_error: f64, largest_norm: f64) -> Option<Self> {
        let limit = 2f64.powi(100);
        if !(hidden_norm * largest_norm < limit && hidden_norm < limit && largest_norm < limit) {
            return None;
        }
        let [rounding, tiny] = Self::roundings(cols);
        Some(ShadowBound {
            error: round_up(hidden_norm * (1.0 + rounding) + tiny),
            norm: round_up(digits_error * (1.0 + rounding) + hidden_norm * rounding + tiny),
            // The product of two scales may underflow to 0. The integers that it multiplies are below 2^22.
            constant: round_up(tiny * (hidden_norm + 2f64.powi(23))),
        })
    }

    /// Creates the bounds of a hidden state for a weight in blocks, whose codes and scales define the weight exactly.
    ///
    /// Takes the arguments of [`ShadowBound::new`]. In the result, `error` is the factor of a weight row's norm. `norm`
    /// is the factor of the norm of the row's [magnitudes](crate::Matrix::row_magnitudes), which may be several times
    /// as large.
    pub fn of_blocks(cols: usize, hidden_norm: f64, digits_error: f64, largest_norm: f64) -> Option<Self> {
        let [rounding, tiny] = Self::roundings(cols);
        Some(ShadowBound {
            error: round_up(digits_error * (1.0 + rounding)),
            norm: round_up(hidden_norm * rounding + tiny),
            ..Self::new(cols, hidden_norm, digits_error, largest_norm)?
        })
    }

    /// The relative error of a dot product from rounding, and the absolute error from underflow for numbers of size 1.
    fn roundings(cols: usize) -> [f64; 2] {
        let terms = cols as f64 + 2.0;
        [terms * (2f64.powi(-23) + 2f64.powi(-28)) + 2f64.powi(-18), terms * 2f64.powi(-126)]
    }

    /// The bound of a token with this error and norm.
    #[inline(always)]
    pub fn of(&self, error: f32, norm: f32) -> f32 {
        error * self.error + (norm * self.norm + self.constant)
    }
}

/// Converts a hidden state to integers of two 8-bit [`digits`]: `hidden[k]` is about `scale * integers[k]`.
///
/// The scale is `max(two, min(one, coarsest))`. `two` is the smallest scale for which two digits hold every integer,
/// and `one` is the smallest scale for which one digit holds every integer. A larger scale makes more high digits zero,
/// and increases the rounding errors.
///
/// Returns the scale, the Euclidean norm of the hidden state, and the norm of the difference between hidden state and
/// integers. If an element is NaN or infinite, the norms are not finite.
///
/// # Panics
/// If the lengths differ.
pub fn hidden_digits(hidden: &[f32], coarsest: f32, integers: &mut [i32]) -> (f32, f64, f64) {
    /// The largest integer of two digits, `256 * 127 + 127`.
    const MAX_INTEGER: f32 = 32_639.0;
    /// The largest integer of one digit.
    const MAX_DIGIT: f32 = 127.0;
    assert_eq!(hidden.len(), integers.len());
    let (whole, rest) = hidden.as_chunks::<LANES>();
    let mut most = [0.0f32; LANES];
    for hidden in whole {
        most.iter_mut().zip(hidden).for_each(|(most, x)| *most = if x.abs() > *most { x.abs() } else { *most });
    }
    let most = most.iter().chain(rest).fold(0.0, |most: f32, x| most.max(x.abs()));
    let [of_two, of_one] = [MAX_INTEGER, MAX_DIGIT].map(|integer| (most / integer).next_up());
    let scale = of_one.min(coarsest).max(of_two);
    let scale = if scale.is_normal() { scale } else { 0.0 };
    let inverse = if scale > 0.0 { 1.0 / scale } else { 0.0 };
    let mut sums = [[0.0; LANES]; 2];
    let (integers, last) = integers.as_chunks_mut::<LANES>();
    for (hidden, integers) in whole.iter().zip(integers) {
        *integers = round([scale, inverse], hidden, &mut sums);
    }
    let mut padded = [0.0; LANES];
    padded[..rest.len()].copy_from_slice(rest);
    last.copy_from_slice(&round([scale, inverse], &padded, &mut sums)[..rest.len()]);
    let [norm, error] = sums.map(|squares| squares.iter().sum::<f64>().sqrt());
    (scale, norm, error + 1e-15 * norm)
}

/// The number of elements that [`hidden_digits`] converts at a time. Each lane has its own sums.
const LANES: usize = 8;

/// Rounds elements to multiples of the scale. Adds the squares of the elements and of the rounding errors to the sums
/// of the lanes.
#[inline(always)]
fn round([scale, inverse]: [f32; 2], hidden: &[f32; LANES], [norm, error]: &mut [[f64; LANES]; 2]) -> [i32; LANES] {
    /// A sum of this number and a float32 below 2^22 is rounded to an integer, ties to even. Without SSE 4.1,
    /// `round_ties_even` is a function call: with it, the conversion of 16 rows of 1024 elements took 0.3 ms.
    const ROUND: f32 = 12_582_912.0;
    // The product is at most the largest integer and two roundings, so it is rounded to at most the largest integer.
    let rounded = hidden.map(|x| x * inverse + ROUND);
    let copies = rounded.map(|x| f64::from(scale) * f64::from(x - ROUND));
    for ((x, copy), (norm, error)) in hidden.iter().zip(copies).zip(norm.iter_mut().zip(error)) {
        let x = f64::from(*x);
        *norm += x * x;
        *error += (x - copy) * (x - copy);
    }
    rounded.map(|x| x.to_bits().wrapping_sub(ROUND.to_bits()) as i32)
}

/// The digits `[high, low]` of an integer of [`hidden_digits`], which is `256 * high + low`.
#[inline(always)]
pub fn digits(integer: i32) -> [i8; 2] {
    [(integer.wrapping_add(128) >> 8) as i8, integer as i8]
}
