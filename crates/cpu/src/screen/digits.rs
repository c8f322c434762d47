//! Hidden states in two digits of 8 bits, packed once per call.

use crate::dot::pack::{Line, bytes, bytes_mut};
use flash_sampling_core::Matrix;
use flash_sampling_core::backend::{ShadowBound, hidden_digits};

/// Elements of a group.
pub(crate) const GROUP: usize = 64;

/// What a group holds after its high digits and its low digits, 64 bytes each.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Sums {
    /// Nothing.
    None,
    /// For each four elements, minus this offset times the sum of the integers, as i32.
    #[cfg(target_arch = "x86_64")]
    Offset(i32),
    /// For each four elements, the sum of the integers as f32.
    #[cfg(target_arch = "x86_64")]
    Float,
}

impl Sums {
    /// Bytes of a group.
    pub(crate) const fn group_bytes(self) -> usize {
        if matches!(self, Sums::None) { 128 } else { 192 }
    }
}

/// A hidden state: `scale * (256 * high + low)`.
#[derive(Clone, Copy, Debug)]
pub(crate) struct RowDigits {
    pub(crate) scale: f32,
    /// `None`: no upper bound of this row is known.
    pub(crate) bound: Option<ShadowBound>,
    /// The sums of the high digits, and of the low digits.
    pub(crate) totals: [i32; 2],
}

/// The packed hidden states of a call.
#[derive(Debug)]
pub(crate) struct Digits {
    sums: Sums,
    cols: usize,
    lines: Vec<Line>,
    pub(crate) rows: Vec<RowDigits>,
    row: Vec<f32>,
}

impl Digits {
    /// Reserves memory for up to `max_rows` rows.
    pub(crate) fn new(max_rows: usize, cols: usize, sums: Sums) -> Self {
        let rows = Vec::with_capacity(max_rows);
        let mut digits = Digits { sums, cols, lines: Vec::new(), rows, row: vec![0.0; cols] };
        digits.lines = vec![Line::ZERO; max_rows * digits.row_bytes() / 64];
        digits
    }

    /// Reserves memory for another number of rows.
    pub(crate) fn replan(&mut self, max_rows: usize) {
        *self = Digits::new(max_rows, self.cols, self.sums);
    }

    /// Bytes from one row to the next: its groups, and a line, so that rows do not share sets of the cache.
    pub(crate) fn row_bytes(&self) -> usize {
        self.cols.div_ceil(GROUP) * self.sums.group_bytes() + 64
    }

    /// Returns the first byte of the first row.
    #[cfg(target_arch = "x86_64")]
    pub(crate) fn as_ptr(&self) -> *const u8 {
        self.lines.as_ptr().cast()
    }

    /// The groups of a row without sums: high digits, then low digits.
    pub(crate) fn groups(&self, row: usize) -> &[[u8; 2 * GROUP]] {
        assert_eq!(self.sums, Sums::None);
        bytes(&self.lines)[row * self.row_bytes()..][..self.row_bytes() - 64].as_chunks().0
    }

    /// Packs hidden states. `largest` is the largest norm of a token plus its error, and `terms` the number of terms of
    /// a dot product in the bound.
    pub(crate) fn pack(&mut self, hidden: &Matrix<'_>, largest: f64, terms: usize) {
        let (lines, group) = (self.row_bytes() / 64, self.sums.group_bytes());
        self.rows.clear();
        for r in 0..hidden.rows() {
            hidden.row_to_f32(r, &mut self.row);
            let out = bytes_mut(&mut self.lines[r * lines..][..lines - 1]);
            out.fill(0);
            let mut totals = [0i32; 2];
            let (scale, norm, error) = hidden_digits(&self.row, |k, digits| {
                let at = k / GROUP * group + k % GROUP;
                for (i, digit) in digits.into_iter().enumerate() {
                    out[at + 64 * i] = digit as u8;
                    totals[i] += i32::from(digit);
                }
            });
            #[cfg(target_arch = "x86_64")]
            for group in out.chunks_exact_mut(group).filter(|_| self.sums != Sums::None) {
                let (digits, sums) = group.split_at_mut(128);
                for (q, sum) in sums.as_chunks_mut::<4>().0.iter_mut().enumerate() {
                    let integer = |k: usize| 256 * i32::from(digits[k] as i8) + i32::from(digits[64 + k] as i8);
                    let integers: i32 = (4 * q..4 * q + 4).map(integer).sum();
                    *sum = match self.sums {
                        Sums::Offset(offset) => (-offset * integers).to_ne_bytes(),
                        _ => (integers as f32).to_ne_bytes(),
                    };
                }
            }
            self.rows.push(RowDigits { scale, bound: ShadowBound::new(terms, norm, error, largest), totals });
        }
    }
}
