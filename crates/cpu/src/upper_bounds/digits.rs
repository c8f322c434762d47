//! Hidden states as integers of two 8-bit digits, packed once per call.

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
    /// integers, each `256 * high + low`, multiplied by the negated offset of this variant.
    #[cfg(target_arch = "x86_64")]
    GroupsAndOffsets(i32),
    /// As [`DigitLayout::Groups`], but 16 numbers in f32 follow each group. A number is the sum of four elements'
    /// integers, each `256 * high + low`.
    #[cfg(any(target_arch = "x86_64", target_arch = "aarch64"))]
    GroupsAndSums,
    /// AMX tiles of 64 elements by 16 columns, in panels of 16 columns. A hidden row has two adjacent columns: its high
    /// digits, and its low digits.
    #[cfg(target_arch = "x86_64")]
    Panels,
    /// AMX tiles of 64 elements by [`columns`] columns. A hidden row is a column. Each panel has the tiles of low
    /// digits, then the tiles of high digits, then 16 numbers in f32 for each [`SPAN`] elements: each column's sum of
    /// the integers `256 * high + low`. With fewer than 16 columns, copies of these sums fill the 16 numbers.
    #[cfg(target_arch = "x86_64")]
    PanelsAndSums,
}

/// The number of elements of a sum in [`DigitLayout::PanelsAndSums`].
#[cfg(target_arch = "x86_64")]
pub(crate) const SPAN: usize = 32;

/// The number of columns of each panel, for `rows` hidden rows in [`DigitLayout::PanelsAndSums`].
#[cfg(target_arch = "x86_64")]
pub(crate) fn columns(rows: usize) -> usize {
    rows.next_power_of_two().clamp(4, 16)
}

/// The bytes of a panel with this number of columns: of the low digits, of all digits, and of digits and sums.
#[cfg(target_arch = "x86_64")]
fn panel_bytes(columns: usize, cols: usize) -> [usize; 3] {
    let digits = columns * code_stride(cols);
    [digits, 2 * digits, 2 * digits + cols.div_ceil(SPAN) * 64]
}

/// A panel in [`DigitLayout::PanelsAndSums`].
#[cfg(target_arch = "x86_64")]
pub(crate) struct Panel<'a> {
    /// The tiles of low digits, then the tiles of high digits.
    pub(crate) digits: &'a [u8],
    pub(crate) sums: &'a [u8],
    /// The indices of the tiles to multiply: tiles of high digits that are not all zeros, then all tiles of low digits.
    pub(crate) tiles: &'a [u32],
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

    /// Whether kernels skip high digits that are zero, so that few of them should not be.
    pub(crate) const fn skips_zeros(self) -> bool {
        #[cfg(target_arch = "x86_64")]
        return matches!(self, DigitLayout::PanelsAndSums);
        #[cfg(not(target_arch = "x86_64"))]
        false
    }

    /// Bytes of a group.
    pub(crate) const fn group_bytes(self) -> usize {
        if matches!(self, DigitLayout::Groups) { 128 } else { 192 }
    }

    /// Bytes from one row to the next: the groups, and one more cache line, so that rows do not share cache sets.
    fn row_bytes(self, cols: usize) -> usize {
        cols.div_ceil(GROUP) * self.group_bytes() + 64
    }

    /// Bytes of `rows` rows.
    fn bytes(self, rows: usize, cols: usize) -> usize {
        match self {
            #[cfg(target_arch = "x86_64")]
            DigitLayout::Panels => (2 * rows).next_multiple_of(16) * code_stride(cols),
            #[cfg(target_arch = "x86_64")]
            DigitLayout::PanelsAndSums => rows.div_ceil(16) * panel_bytes(16, cols)[2],
            _ => rows * self.row_bytes(cols),
        }
    }
}

/// The scale, bound and sums of a packed hidden state. An element is about `scale * (256 * high + low)`.
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
    /// The layouts for which the memory has room.
    layouts: Vec<DigitLayout>,
    layout: DigitLayout,
    cols: usize,
    lines: Vec<Line>,
    /// [`Panel::tiles`] of each panel.
    #[cfg(target_arch = "x86_64")]
    tiles: [Vec<u32>; MAX_ROWS / 16],
    pub(crate) rows: Vec<RowDigits>,
    row: Row,
}

/// A hidden state before packing. `integers` and `digits` have zeros up to a multiple of [`GROUP`].
#[derive(Debug)]
struct Row {
    floats: Vec<f32>,
    integers: Vec<i32>,
    /// The high digits, and the low digits.
    digits: [Vec<u8>; 2],
}

impl Row {
    fn new(cols: usize) -> Self {
        let padded = cols.next_multiple_of(GROUP);
        Row { floats: vec![0.0; cols], integers: vec![0; padded], digits: [vec![0; padded], vec![0; padded]] }
    }

    /// Computes integers and digits. Takes the argument of [`hidden_digits`], and returns its result.
    fn convert(&mut self, coarsest: f32) -> (f32, f64, f64) {
        let result = hidden_digits(&self.floats, coarsest, &mut self.integers[..self.floats.len()]);
        let groups = self.integers.as_chunks::<GROUP>().0;
        let [highs, lows] = self.digits.each_mut().map(|digits| digits.as_chunks_mut::<GROUP>().0);
        for ((integers, high), low) in groups.iter().zip(highs).zip(lows) {
            for k in 0..GROUP {
                [high[k], low[k]] = digits(integers[k]).map(|digit| digit as u8);
            }
        }
        result
    }

    /// The sum of the high digits, and of the low digits.
    fn totals(&self) -> [i32; 2] {
        self.digits.each_ref().map(|digits| digits.iter().map(|&digit| i32::from(digit as i8)).sum())
    }
}

impl Digits {
    /// Reserves memory for `max_rows` rows, but at most [`MAX_ROWS`], in any of these layouts.
    pub(crate) fn new(max_rows: usize, cols: usize, layouts: Vec<DigitLayout>) -> Self {
        let max_rows = max_rows.min(MAX_ROWS);
        let most = layouts.iter().map(|layout| layout.bytes(max_rows, cols)).max().unwrap_or(0);
        let (lines, rows) = (vec![Line::ZERO; most / 64], Vec::with_capacity(max_rows));
        Digits {
            #[cfg(target_arch = "x86_64")]
            tiles: core::array::from_fn(|_| Vec::with_capacity(2 * cols.div_ceil(GROUP))),
            layouts,
            layout: DigitLayout::Groups,
            cols,
            lines,
            rows,
            row: Row::new(cols),
        }
    }

    /// Reserves memory for a new maximum number of rows.
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

    /// A panel, in [`DigitLayout::PanelsAndSums`].
    #[cfg(target_arch = "x86_64")]
    pub(crate) fn panel(&self, panel: usize) -> Panel<'_> {
        assert_eq!(self.layout, DigitLayout::PanelsAndSums);
        let [_, digits, all] = panel_bytes(columns(self.rows.len()), self.cols);
        let (digits, sums) = bytes(&self.lines)[panel * all..][..all].split_at(digits);
        Panel { digits, sums, tiles: &self.tiles[panel] }
    }

    /// Packs hidden states. Returns false if a row has no upper bounds.
    ///
    /// `coarsest` is the argument of [`hidden_digits`]. `bound` creates the bound of a row from the row's norm and the
    /// error of the row's digits.
    pub(crate) fn pack(
        &mut self,
        layout: DigitLayout,
        hidden: &Matrix<'_>,
        coarsest: f32,
        bound: impl Fn(f64, f64) -> Option<ShadowBound>,
    ) -> bool {
        self.layout = layout;
        self.rows.clear();
        let out = &mut bytes_mut(&mut self.lines)[..layout.bytes(hidden.rows(), self.cols)];
        out.fill(0);
        for r in 0..hidden.rows() {
            hidden.row_to_f32(r, &mut self.row.floats);
            let (scale, norm, error) = self.row.convert(coarsest);
            let totals = if layout == DigitLayout::Groups { self.row.totals() } else { [0; 2] };
            if layout.has_panels() {
                #[cfg(target_arch = "x86_64")]
                if layout == DigitLayout::Panels {
                    write_panel(r, &self.row, out);
                } else {
                    write_column((r, hidden.rows()), &self.row, out, &mut self.tiles[r / 16]);
                }
            } else {
                let size = layout.row_bytes(self.cols);
                let groups = out[r * size..][..size - 64].chunks_exact_mut(layout.group_bytes());
                let [highs, lows] = self.row.digits.each_ref().map(|digits| digits.chunks_exact(GROUP));
                for (group, (high, low)) in groups.zip(highs.zip(lows)) {
                    group[..GROUP].copy_from_slice(high);
                    group[GROUP..2 * GROUP].copy_from_slice(low);
                }
                #[cfg(any(target_arch = "x86_64", target_arch = "aarch64"))]
                if layout.has_numbers() {
                    write_sums(layout, &self.row.integers, out[r * size..][..size - 64].as_chunks_mut().0);
                }
            }
            let Some(bound) = bound(norm, error) else { return false };
            self.rows.push(RowDigits { scale, bound, totals });
        }
        true
    }
}

/// Writes the digits of row `r` to its two columns of a panel, in [`DigitLayout::Panels`].
#[cfg(target_arch = "x86_64")]
fn write_panel(r: usize, row: &Row, out: &mut [u8]) {
    let (panel, column, size) = (2 * r / 16, 2 * r % 16, 16 * row.integers.len());
    for (digit, digits) in row.digits.iter().enumerate() {
        write_tiles(16, column + digit, &mut out[panel * size..][..size], digits);
    }
}

/// Writes digits to a column of AMX tiles: four digits to each line.
#[cfg(target_arch = "x86_64")]
fn write_tiles(columns: usize, column: usize, out: &mut [u8], digits: &[u8]) {
    for (line, four) in out.chunks_exact_mut(4 * columns).zip(digits.as_chunks::<4>().0) {
        line[4 * column..4 * column + 4].copy_from_slice(four);
    }
}

/// Writes the digits and the sums of row `r` of `rows` rows to a column of a panel, in [`DigitLayout::PanelsAndSums`].
/// The last row of a panel completes [`Panel::tiles`].
#[cfg(target_arch = "x86_64")]
fn write_column((r, rows): (usize, usize), row: &Row, out: &mut [u8], tiles: &mut Vec<u32>) {
    let (panel, column, columns, groups) = (r / 16, r % 16, columns(rows), (row.integers.len() / GROUP) as u32);
    let [low, both, all] = panel_bytes(columns, row.floats.len());
    let (digits, sums) = out[panel * all..][..all].split_at_mut(both);
    let (lows, highs) = digits.split_at_mut(low);
    write_tiles(columns, column, lows, &row.digits[1]);
    if column == 0 {
        tiles.clear();
    }
    let highs = highs.chunks_exact_mut(GROUP * columns).zip(row.digits[0].chunks_exact(GROUP));
    for (tile, (out, digits)) in (groups..).zip(highs) {
        if digits.iter().fold(0, |any, digit| any | digit) != 0 {
            write_tiles(columns, column, out, digits);
            tiles.push(tile);
        }
    }
    tiles.sort_unstable();
    tiles.dedup();
    if column == 15 || r == rows - 1 {
        tiles.extend(0..groups);
    }
    for (sums, integers) in sums.as_chunks_mut::<64>().0.iter_mut().zip(row.integers.chunks_exact(SPAN)) {
        let sum = (integers.iter().sum::<i32>() as f32).to_ne_bytes();
        sums.chunks_exact_mut(4 * columns).for_each(|sums| sums[4 * column..4 * column + 4].copy_from_slice(&sum));
    }
}

/// Writes the 16 numbers after the digits of each group.
#[cfg(any(target_arch = "x86_64", target_arch = "aarch64"))]
fn write_sums(layout: DigitLayout, integers: &[i32], groups: &mut [[u8; 3 * GROUP]]) {
    for (group, integers) in groups.iter_mut().zip(integers.chunks_exact(GROUP)) {
        let sums = group[2 * GROUP..].as_chunks_mut::<4>().0;
        for (sum, four) in sums.iter_mut().zip(integers.chunks_exact(4)) {
            let total: i32 = four.iter().sum();
            *sum = match layout {
                #[cfg(target_arch = "x86_64")]
                DigitLayout::GroupsAndOffsets(offset) => (-offset * total).to_ne_bytes(),
                _ => (total as f32).to_ne_bytes(),
            };
        }
    }
}
