//! Hidden states in two 8-bit digits per element, packed once per call.

use super::MAX_ROWS;
use crate::dot::pack::{Line, bytes, bytes_mut};
use flash_sampling_core::Matrix;
#[cfg(target_arch = "x86_64")]
use flash_sampling_core::backend::code_stride;
use flash_sampling_core::backend::{ShadowBound, digits, hidden_digits};

/// Elements of a group.
pub(crate) const GROUP: usize = 64;

/// The order of the digits in memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum DigitLayout {
    /// Rows of groups: the high digits of 64 elements, then their low digits.
    Groups,
    /// As [`DigitLayout::Groups`], but 16 numbers in i32 follow each group. A number is the sum of four elements'
    /// integers `256 * high + low`, times minus this offset.
    #[cfg(target_arch = "x86_64")]
    GroupsAndOffsets(i32),
    /// As [`DigitLayout::Groups`], but 16 numbers in f32 follow each group. A number is the sum of four elements'
    /// integers `256 * high + low`.
    #[cfg(any(target_arch = "x86_64", target_arch = "aarch64"))]
    GroupsAndSums,
    /// AMX tiles of 64 elements by 16 columns, in panels of 16 columns. A hidden row has two adjacent columns: its high
    /// digits, and its low digits.
    #[cfg(target_arch = "x86_64")]
    Panels,
    /// As [`DigitLayout::Panels`], but if one panel holds all rows, it has only [`columns`] columns. After all panels,
    /// there are 16 numbers in f32 for each panel and each [`SPAN`] elements: the sum of each column's digits. With
    /// fewer than 16 columns, these sums are repeated.
    #[cfg(target_arch = "x86_64")]
    PanelsAndSums,
}

/// The number of elements of a sum in [`DigitLayout::PanelsAndSums`].
#[cfg(target_arch = "x86_64")]
pub(crate) const SPAN: usize = 32;

/// The number of columns of each panel, for `rows` hidden rows in [`DigitLayout::PanelsAndSums`].
#[cfg(target_arch = "x86_64")]
pub(crate) fn columns(rows: usize) -> usize {
    (2 * rows).next_power_of_two().clamp(4, 16)
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

    /// Whether the digits are in panels, in which rows are interleaved.
    const fn has_panels(self) -> bool {
        #[cfg(target_arch = "x86_64")]
        return matches!(self, DigitLayout::Panels | DigitLayout::PanelsAndSums);
        #[cfg(not(target_arch = "x86_64"))]
        false
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
            #[cfg(target_arch = "x86_64")]
            DigitLayout::PanelsAndSums => (2 * rows).div_ceil(16) * (16 * code_stride(cols) + cols.div_ceil(SPAN) * 64),
            _ => rows * self.row_bytes(cols),
        }
    }
}

/// The numbers of a packed hidden state. Its elements are about `scale * (256 * high + low)`.
#[derive(Clone, Copy, Debug)]
pub(crate) struct RowDigits {
    pub(crate) scale: f32,
    pub(crate) bound: ShadowBound,
    /// The sums of the high digits, and of the low digits, in [`DigitLayout::Groups`]; otherwise 0.
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
    integers: Vec<i32>,
}

impl Digits {
    /// Reserves memory for `max_rows` rows, but at most [`MAX_ROWS`], in any of these layouts.
    pub(crate) fn new(max_rows: usize, cols: usize, layouts: Vec<DigitLayout>) -> Self {
        let max_rows = max_rows.min(MAX_ROWS);
        let most = layouts.iter().map(|layout| layout.bytes(max_rows, cols)).max().unwrap_or(0);
        let (lines, rows) = (vec![Line::ZERO; most / 64], Vec::with_capacity(max_rows));
        Digits {
            layouts,
            layout: DigitLayout::Groups,
            cols,
            lines,
            rows,
            row: vec![0.0; cols],
            integers: vec![0; cols],
        }
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
        assert!(!self.layout.has_panels());
        (self.lines.as_ptr().cast(), self.layout.row_bytes(self.cols))
    }

    /// The panels, for [`integer_tile`](crate::dot::amx::integer_tile).
    #[cfg(target_arch = "x86_64")]
    pub(crate) fn panels(&self) -> crate::dot::pack::PackedRows<'_> {
        assert_eq!(self.layout, DigitLayout::Panels);
        crate::dot::pack::PackedRows::panels(2 * self.rows.len(), code_stride(self.cols) / 2, &self.lines)
    }

    /// The digits and the sums of a panel, in [`DigitLayout::PanelsAndSums`].
    #[cfg(target_arch = "x86_64")]
    pub(crate) fn panel(&self, panel: usize) -> (&[u8], &[u8]) {
        assert_eq!(self.layout, DigitLayout::PanelsAndSums);
        let (size, sums) = (columns(self.rows.len()) * code_stride(self.cols), self.cols.div_ceil(SPAN) * 64);
        let (panels, all_sums) = bytes(&self.lines).split_at((2 * self.rows.len()).div_ceil(16) * size);
        (&panels[panel * size..][..size], &all_sums[panel * sums..][..sums])
    }

    /// Packs hidden states. `largest_norm` and `terms` go to [`ShadowBound::new`]. Returns false if a row has no upper
    /// bounds.
    pub(crate) fn pack(&mut self, layout: DigitLayout, hidden: &Matrix<'_>, largest_norm: f64, terms: usize) -> bool {
        self.layout = layout;
        self.rows.clear();
        let out = &mut bytes_mut(&mut self.lines)[..layout.bytes(hidden.rows(), self.cols)];
        out.fill(0);
        for r in 0..hidden.rows() {
            hidden.row_to_f32(r, &mut self.row);
            let (scale, norm, error) = hidden_digits(&self.row, &mut self.integers);
            let totals = if layout == DigitLayout::Groups { sums_of_digits(&self.integers) } else { [0; 2] };
            if layout.has_panels() {
                #[cfg(target_arch = "x86_64")]
                write_panel(layout, (r, hidden.rows()), &self.integers, out);
            } else {
                let size = layout.row_bytes(self.cols);
                let groups = out[r * size..][..size - 64].chunks_exact_mut(layout.group_bytes());
                for (group, integers) in groups.zip(self.integers.chunks(GROUP)) {
                    let (high, low) = group.split_at_mut(GROUP);
                    for ((&integer, high), low) in integers.iter().zip(high).zip(low) {
                        [*high, *low] = digits(integer).map(|digit| digit as u8);
                    }
                }
                #[cfg(any(target_arch = "x86_64", target_arch = "aarch64"))]
                if layout.has_numbers() {
                    write_sums(layout, out[r * size..][..size - 64].as_chunks_mut().0);
                }
            }
            let Some(bound) = ShadowBound::new(terms, norm, error, largest_norm) else { return false };
            self.rows.push(RowDigits { scale, bound, totals });
        }
        true
    }
}

/// The sum of the high digits, and of the low digits.
fn sums_of_digits(integers: &[i32]) -> [i32; 2] {
    let digits = integers.iter().map(|&integer| digits(integer).map(i32::from));
    digits.fold([0; 2], |[high, low], [h, l]| [high + h, low + l])
}

/// Writes the digits of row `r` of `rows` rows to its two columns of a panel.
#[cfg(target_arch = "x86_64")]
fn write_panel(layout: DigitLayout, (r, rows): (usize, usize), integers: &[i32], out: &mut [u8]) {
    let columns = if layout == DigitLayout::Panels { 16 } else { columns(rows) };
    let (panel, column, size) = (2 * r / 16, 2 * r % 16, columns * code_stride(integers.len()));
    let (panels, all_sums) = out.split_at_mut((2 * rows).div_ceil(16) * size);
    for (lines, integers) in panels[panel * size..][..size].chunks_exact_mut(4 * columns).zip(integers.chunks(4)) {
        let (high, low) = lines[4 * column..4 * column + 8].split_at_mut(4);
        for ((&integer, high), low) in integers.iter().zip(high).zip(low) {
            [*high, *low] = digits(integer).map(|digit| digit as u8);
        }
    }
    if layout == DigitLayout::PanelsAndSums {
        let sums = all_sums[panel * integers.len().div_ceil(SPAN) * 64..].as_chunks_mut::<4>().0;
        for (sums, integers) in sums.chunks_exact_mut(16).zip(integers.chunks(SPAN)) {
            let pair = sums_of_digits(integers).map(|sum| (sum as f32).to_ne_bytes());
            sums.chunks_exact_mut(columns).for_each(|sums| sums[column..column + 2].copy_from_slice(&pair));
        }
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
