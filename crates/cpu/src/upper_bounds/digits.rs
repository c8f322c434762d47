//! Hidden states in two 8-bit digits per element, packed once per call.

use super::MAX_ROWS;
use crate::dot::pack::{Line, bytes, bytes_mut};
use flash_sampling_core::Matrix;
#[cfg(target_arch = "x86_64")]
use flash_sampling_core::backend::code_stride;
use flash_sampling_core::backend::{ShadowBound, hidden_digits};

/// Elements of a group.
pub(crate) const GROUP: usize = 64;

/// The order of the digits in memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum DigitLayout {
    /// Rows of groups: the high digits of 64 elements, then their low digits.
    Groups,
    /// Groups, each followed by 16 numbers in i32: minus this offset times the sum of four elements' integers.
    #[cfg(target_arch = "x86_64")]
    GroupsAndOffsets(i32),
    /// Groups, each followed by 16 numbers in f32: the sum of four elements' integers.
    #[cfg(any(target_arch = "x86_64", target_arch = "aarch64"))]
    GroupsAndSums,
    /// AMX tiles of 16 rows by 64 elements. The rows alternate between high and low digits.
    #[cfg(target_arch = "x86_64")]
    Panels,
}

impl DigitLayout {
    /// Whether numbers follow each group.
    #[cfg(any(target_arch = "x86_64", target_arch = "aarch64"))]
    const fn has_numbers(self) -> bool {
        match self {
            DigitLayout::GroupsAndSums => true,
            #[cfg(target_arch = "x86_64")]
            DigitLayout::GroupsAndOffsets(_) => true,
            _ => false,
        }
    }

    /// Bytes of a group.
    pub(crate) const fn group_bytes(self) -> usize {
        if matches!(self, DigitLayout::Groups) { 128 } else { 192 }
    }

    /// Bytes from one row to the next: the groups, and a cache line, so that rows do not share sets of the cache.
    fn row_bytes(self, cols: usize) -> usize {
        cols.div_ceil(GROUP) * self.group_bytes() + 64
    }

    /// Bytes of `rows` rows.
    fn bytes(self, rows: usize, cols: usize) -> usize {
        match self {
            #[cfg(target_arch = "x86_64")]
            DigitLayout::Panels => (2 * rows).next_multiple_of(16) * code_stride(cols),
            _ => rows * self.row_bytes(cols),
        }
    }
}

/// A hidden state: `scale * (256 * high + low)`.
#[derive(Clone, Copy, Debug)]
pub(crate) struct RowDigits {
    pub(crate) scale: f32,
    pub(crate) bound: ShadowBound,
    /// The sums of the high digits, and of the low digits.
    #[cfg_attr(not(target_arch = "x86_64"), allow(dead_code))]
    pub(crate) totals: [i32; 2],
}

/// The packed hidden states of a call.
#[derive(Debug)]
pub(crate) struct Digits {
    /// The layouts that the memory has room for.
    layouts: Vec<DigitLayout>,
    layout: DigitLayout,
    cols: usize,
    lines: Vec<Line>,
    pub(crate) rows: Vec<RowDigits>,
    row: Vec<f32>,
}

impl Digits {
    /// Reserves memory for `max_rows` rows, but at most [`MAX_ROWS`], in any of these layouts.
    pub(crate) fn new(max_rows: usize, cols: usize, layouts: Vec<DigitLayout>) -> Self {
        let max_rows = max_rows.min(MAX_ROWS);
        let most = layouts.iter().map(|layout| layout.bytes(max_rows, cols)).max().unwrap_or(0);
        let (lines, rows) = (vec![Line::ZERO; most / 64], Vec::with_capacity(max_rows));
        Digits { layouts, layout: DigitLayout::Groups, cols, lines, rows, row: vec![0.0; cols] }
    }

    /// Reserves memory for another number of rows.
    pub(crate) fn replan(&mut self, max_rows: usize) {
        *self = Digits::new(max_rows, self.cols, core::mem::take(&mut self.layouts));
    }

    /// The layout of the packed rows.
    #[cfg(target_arch = "x86_64")]
    pub(crate) fn layout(&self) -> DigitLayout {
        self.layout
    }

    /// The groups of a row in [`DigitLayout::Groups`].
    pub(crate) fn groups(&self, row: usize) -> &[[u8; 2 * GROUP]] {
        assert_eq!(self.layout, DigitLayout::Groups);
        let size = self.layout.row_bytes(self.cols);
        bytes(&self.lines)[row * size..][..size - 64].as_chunks().0
    }

    /// The address of the first group, and the bytes from one row to the next, for every layout with groups.
    #[cfg(any(target_arch = "x86_64", target_arch = "aarch64"))]
    pub(crate) fn first_group(&self) -> (*const u8, usize) {
        #[cfg(target_arch = "x86_64")]
        assert_ne!(self.layout, DigitLayout::Panels);
        (self.lines.as_ptr().cast(), self.layout.row_bytes(self.cols))
    }

    /// The panels, for [`integer_tile`](crate::dot::amx::integer_tile).
    #[cfg(target_arch = "x86_64")]
    pub(crate) fn panels(&self) -> crate::dot::pack::PackedRows<'_> {
        assert_eq!(self.layout, DigitLayout::Panels);
        crate::dot::pack::PackedRows::panels(2 * self.rows.len(), code_stride(self.cols) / 2, &self.lines)
    }

    /// Packs hidden states. `largest_norm` and `terms` go to [`ShadowBound::new`]. Returns false if a row has no upper
    /// bounds.
    pub(crate) fn pack(&mut self, layout: DigitLayout, hidden: &Matrix<'_>, largest_norm: f64, terms: usize) -> bool {
        let (cols, size, group) = (self.cols, layout.row_bytes(self.cols), layout.group_bytes());
        self.layout = layout;
        self.rows.clear();
        let out = &mut bytes_mut(&mut self.lines)[..layout.bytes(hidden.rows(), cols)];
        out.fill(0);
        for r in 0..hidden.rows() {
            hidden.row_to_f32(r, &mut self.row);
            let mut totals = [0i32; 2];
            let (scale, norm, error) = hidden_digits(&self.row, |k, digits| {
                for (i, digit) in digits.into_iter().enumerate() {
                    let at = match layout {
                        #[cfg(target_arch = "x86_64")]
                        DigitLayout::Panels => {
                            let row = 2 * r + i;
                            row / 16 * 16 * code_stride(cols) + k / 64 * 1024 + k % 64 / 4 * 64 + row % 16 * 4 + k % 4
                        }
                        _ => r * size + k / GROUP * group + i * GROUP + k % GROUP,
                    };
                    out[at] = digit as u8;
                    totals[i] += i32::from(digit);
                }
            });
            #[cfg(any(target_arch = "x86_64", target_arch = "aarch64"))]
            if layout.has_numbers() {
                write_sums(layout, out[r * size..][..size - 64].as_chunks_mut().0);
            }
            let Some(bound) = ShadowBound::new(terms, norm, error, largest_norm) else { return false };
            self.rows.push(RowDigits { scale, bound, totals });
        }
        true
    }
}

/// Writes the 16 numbers after the digits of each group.
#[cfg(any(target_arch = "x86_64", target_arch = "aarch64"))]
fn write_sums(layout: DigitLayout, groups: &mut [[u8; 3 * GROUP]]) {
    for group in groups {
        let (digits, sums) = group.split_at_mut(2 * GROUP);
        for (four, sum) in sums.as_chunks_mut::<4>().0.iter_mut().enumerate() {
            let integer = |k: usize| 256 * i32::from(digits[k] as i8) + i32::from(digits[GROUP + k] as i8);
            let integers: i32 = (4 * four..4 * four + 4).map(integer).sum();
            *sum = match layout {
                #[cfg(target_arch = "x86_64")]
                DigitLayout::GroupsAndOffsets(offset) => (-offset * integers).to_ne_bytes(),
                _ => (integers as f32).to_ne_bytes(),
            };
        }
    }
}
