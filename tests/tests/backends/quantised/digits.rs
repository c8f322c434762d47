//! Splits float weights into the codes of quantised weights.

use super::codes::{TABLE_SLOTS, e4m3, flip_code, least_code, set_scale, table_codes};
use flash_sampling_core::{DType, Head, Matrix, f16};

/// How a float weight is split into codes.
#[derive(Clone, Copy, Debug)]
pub(super) struct Digits {
    pub(super) dtype: DType,
    /// Quantised weights per column of the head.
    pub(super) slots: usize,
    /// Slots that hold a digit. The other slots hold one constant code, or codes of infinite weights.
    used: usize,
    /// Bits of a digit.
    bits: i32,
    /// Bits of the largest code.
    code_bits: i32,
    /// All finite weights are below `2^exponent` in absolute value.
    exponent: i32,
    /// All finite weights are below `2^top` after scaling.
    top: i32,
    /// Whether all weights are finite. If they are, the last slot of a column is for infinite hidden states.
    pub(super) is_finite: bool,
}

/// The least `e` with `|w| < 2^e`.
fn exponent(w: f32) -> i32 {
    if w == 0.0 { i32::MIN } else { (f64::from(w).abs().to_bits() >> 52) as i32 - 1022 }
}

impl Digits {
    pub(super) fn new(head: &Head<'_>, dtype: DType) -> Self {
        let weight = head.weight();
        let mut row = vec![0.0; weight.cols()];
        let (mut largest, mut is_finite) = (i32::MIN, true);
        for r in 0..weight.rows() {
            weight.row_to_f32(r, &mut row);
            largest = row.iter().filter(|w| w.is_finite()).map(|w| exponent(*w)).fold(largest, i32::max);
            is_finite &= row.iter().all(|w| w.is_finite());
        }
        // The largest codes of `MXFP4` and `IQ4_NL` have more bits than a digit.
        let (bits, code_bits) = match dtype {
            DType::Q8_0 | DType::I8 => (7, 7),
            DType::Q6_K => (5, 5),
            DType::Q5_K | DType::F8_E4M3 => (4, 4),
            DType::MXFP4 => (2, 4),
            DType::IQ4_NL => (1, 6),
            _ => (3, 3),
        };
        // A NaN or infinite factor of a block must not affect another column.
        let slots = match dtype {
            _ if dtype.is_scaled() => 16,
            _ if !is_finite => dtype.block_elements(),
            DType::Q6_K => 16,
            _ => 32,
        };
        let exponent = if largest == i32::MIN { 0 } else { largest };
        // `IQ4_NL` needs the whole range of an f16 factor: smaller weights take more slots.
        let top = if dtype == DType::IQ4_NL { 20 } else { 8 };
        let mut digits = Digits { dtype, slots, used: slots, bits, code_bits, exponent, top, is_finite };
        if dtype == DType::IQ4_NL {
            // The table has no 0, so every used slot adds to the rounding of sums.
            digits.used = digits.used_slots(&weight);
        }
        digits
    }

    /// The largest number of slots that a weight needs.
    fn used_slots(&self, weight: &Matrix<'_>) -> usize {
        let (mut row, mut used) = (vec![0.0; weight.cols()], TABLE_SLOTS);
        for r in 0..weight.rows() {
            weight.row_to_f32(r, &mut row);
            for w in row.iter().filter(|w| w.is_finite() && **w != 0.0) {
                let mut left = self.scaled(*w) / 2f64.powi(self.unit(&[*w]));
                let mut slots = 1;
                while left.fract() != 0.0 {
                    (left, slots) = (2.0 * left, slots + 1);
                }
                used = used.max(slots);
            }
        }
        // The unused slots form pairs.
        used = used.next_multiple_of(2);
        assert!(used < self.slots, "a weight needs {used} slots");
        used
    }

    /// Columns of the quantised weight.
    pub(super) fn cols(&self, hidden: usize) -> usize {
        (hidden * self.slots).next_multiple_of(self.dtype.block_elements())
    }

    /// Writes the hidden states of a column's slots.
    pub(super) fn expand(&self, column: usize, h: f32, out: &mut [f32]) {
        let last = out.len() - 1;
        for (j, out) in out.iter_mut().enumerate() {
            let shift = (self.exponent - self.top - self.bits * j as i32 - self.code_shift(column)).max(-100);
            *out = match () {
                // The slots of a pair have equal codes and opposite hidden states, so the two products cancel. An
                // infinite weight needs a hidden state other than 0.
                () if !self.is_finite && j >= self.used => h * 2f32.powi(-90) * if j % 2 == 0 { 1.0 } else { -1.0 },
                () if !self.is_finite => h * 2f32.powi(shift),
                () if j == last => {
                    if h.is_infinite() {
                        h
                    } else {
                        0.0
                    }
                }
                () if h.is_infinite() || j >= self.used => 0.0,
                () => h * 2f32.powi(shift),
            };
        }
    }

    /// Returns a weight in units of `2^(exponent - top)`.
    fn scaled(&self, w: f32) -> f64 {
        f64::from(w) * 2f64.powi(self.top - self.exponent)
    }

    /// The binary logarithm of the factor of some weights.
    pub(super) fn unit(&self, weights: &[f32]) -> i32 {
        let finite = weights.iter().filter(|w| w.is_finite());
        let largest = finite.map(|w| exponent(*w)).fold(i32::MIN, i32::max).max(-1000) - self.exponent + self.top;
        // The least positive f16 is 2^-24.
        let least = if self.dtype.is_scaled() || self.dtype == DType::MXFP4 { -100 } else { -24 };
        (largest - self.code_bits).max(least)
    }

    /// The binary logarithm of the factor of a block. Neighbouring blocks have different factors, and a block with
    /// swapped indices has another factor unless the difference of the indices is a multiple of 3. The factors change with
    /// the range of the weights in steps of 2^16, so most shards have the factors of the whole head.
    pub(super) fn unit_of_all(&self, row_block: usize, column_block: usize) -> i32 {
        let above = (3 - self.exponent).rem_euclid(16);
        self.top + above - self.code_bits + (row_block + 2 * column_block) as i32 % 3
    }

    /// The block of codes that stand for 0.
    pub(super) fn zeros(&self) -> Vec<u8> {
        let mut block = vec![0; self.dtype.block_bytes()];
        (0..self.dtype.block_elements()).for_each(|i| flip_code(self.dtype, &mut block, i, least_code(self.dtype)));
        block
    }

    /// Writes the weights of some columns as a block over `zeros`.
    pub(super) fn block(&self, weights: &[f32], zeros: &[u8], block: &mut [u8]) {
        block.copy_from_slice(zeros);
        let unit = self.unit(weights);
        let bad = weights.iter().copied().find(|w| !w.is_finite());
        let mut factor = bad.map_or(f16::from_f32(2f32.powi(unit)), f16::from_f32);
        if self.dtype == DType::IQ4_NL && weights.iter().all(|w| *w == 0.0) {
            factor = f16::ZERO;
        }
        let minimum = if bad.is_none() { factor } else { f16::ZERO };
        match self.dtype {
            DType::Q6_K => block[208..210].copy_from_slice(&factor.to_le_bytes()),
            DType::Q4_K | DType::Q5_K => {
                block[..2].copy_from_slice(&factor.to_le_bytes());
                block[2..4].copy_from_slice(&minimum.to_le_bytes());
            }
            // With the largest factor, the codes that `codes` sets are infinite weights in float32.
            DType::MXFP4 => block[0] = if bad.is_some() { u8::MAX } else { (unit + 128) as u8 },
            _ => block[..2].copy_from_slice(&factor.to_le_bytes()),
        }
        let run = if self.dtype == DType::Q6_K { 16 } else { 32 };
        for i in (0..self.dtype.block_elements()).step_by(run) {
            set_scale(self.dtype, block, i, self.scale(i / self.slots));
        }
        for (column, &w) in weights.iter().enumerate() {
            self.codes(w, unit + self.scale(column) as i32, |slot, code| {
                flip_code(self.dtype, block, column * self.slots + slot, least_code(self.dtype));
                flip_code(self.dtype, block, column * self.slots + slot, code);
            });
        }
    }

    /// Writes a weight in codes of a type with scales; the scale is `2^unit`.
    pub(super) fn elements(&self, column: usize, w: f32, unit: i32, out: &mut [u8]) {
        out.fill(0);
        self.codes(w, unit, |slot, code| {
            out[slot] = match self.dtype {
                DType::I8 => code as u8,
                _ => e4m3(code, self.code_shift(column)),
            };
        });
    }

    /// The binary logarithm of a column's scale. Scales differ between the columns of a block, if it has several.
    fn scale(&self, column: usize) -> usize {
        // A minimum is a scale times half the number of codes, in 6 bits.
        let scales = match self.dtype {
            DType::Q4_K => 3,
            DType::Q5_K => 2,
            _ => 7,
        };
        if self.slots >= self.dtype.block_elements() { 0 } else { column % scales }
    }

    /// The binary logarithm of the factor of a column's codes, so that the codes of `F8_E4M3` have several exponents.
    /// The hidden states have the inverse factor.
    fn code_shift(&self, column: usize) -> i32 {
        if self.dtype == DType::F8_E4M3 { column as i32 % 3 - 1 } else { 0 }
    }

    /// Calls `set` with the slot and the code of each digit of a weight that is not 0; `unit` is the binary logarithm
    /// of the first digit's unit after scaling.
    fn codes(&self, w: f32, unit: i32, mut set: impl FnMut(usize, i32)) {
        if !w.is_finite() {
            let code = |slot: usize| match (self.dtype, w < 0.0) {
                // `MXFP4` has no NaN, but a sum of infinite weights of both signs is NaN.
                (DType::MXFP4, is_negative) if is_negative || w.is_nan() && slot == 1 => -12,
                (DType::MXFP4, _) => 12,
                // The factor has the sign of the weight. The hidden states of a pair have opposite signs, so codes of
                // opposite signs give both products the same sign.
                (DType::IQ4_NL, _) if slot >= self.used && slot % 2 == 1 => -10,
                _ => 1,
            };
            return (0..self.slots).for_each(|slot| set(slot, code(slot)));
        }
        if w == 0.0 {
            return;
        }
        let sign = if w < 0.0 { -1 } else { 1 };
        if self.is_finite {
            let is_table = self.dtype == DType::IQ4_NL && sign < 0;
            set(self.slots - 1, if is_table { -10 } else { sign });
        }
        if self.dtype == DType::IQ4_NL {
            return table_codes(self.scaled(w) / 2f64.powi(unit), self.used, set);
        }
        // The digits before this slot are 0.
        let first = (unit + 1 - (exponent(w) - self.exponent + self.top)).max(0) / self.bits;
        let (mut unit, mut left) = (2f64.powi(unit - self.bits * first), self.scaled(w).abs());
        let slots = (92 / self.bits as usize + 1).min(self.slots - usize::from(self.is_finite));
        for slot in first as usize..slots {
            if left == 0.0 {
                break;
            }
            let digit = match self.dtype {
                DType::MXFP4 => {
                    [12, 8, 6, 4, 3, 2, 1, 0].into_iter().find(|d| f64::from(*d) <= left / unit).unwrap_or(0)
                }
                _ => (left / unit) as i32,
            };
            left -= f64::from(digit) * unit;
            unit /= f64::from(1 << self.bits);
            if digit != 0 {
                set(slot, sign * digit);
            }
        }
        assert_eq!(left, 0.0, "{w} has more digits than {:?} has slots", self.dtype);
    }
}
