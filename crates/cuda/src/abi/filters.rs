//! The filters that the GPU supports, and the arguments of their kernels.

use crate::abi::{DeviceAddress, Draw, Row, SkipIf, layout};
use bytemuck::{Pod, Zeroable};
use flash_sampling_core::backend::{Filter, Filters};

/// The largest top-k of [`RowFilters`].
pub const TOP_K_MAX: u32 = 1024;

layout! {
    /// Min-p, top-k and top-p of a row. If all are off, the draw does not change.
    #[derive(PartialEq, Pod, Zeroable)]
    pub struct RowFilters = 24 {
        /// The logarithm of min-p; `-inf` = off.
        pub ln_min_p: f64 = 0,
        /// 1 = off.
        pub top_p: f32 = 8,
        /// 0 = off; at most [`TOP_K_MAX`].
        pub top_k: u32 = 12,
        /// Factor from the logits of the filters to the logits of the draw; 1 if filters come after the temperature.
        pub rescale: f32 = 16,
        /// The order of the filters. 0: min-p, top-k, top-p. 1: top-k, top-p, min-p.
        pub min_p_last: u32 = 20,
    }
}

impl RowFilters {
    /// No filters: the draw does not change.
    pub const OFF: RowFilters =
        RowFilters { ln_min_p: f64::NEG_INFINITY, top_p: 1.0, top_k: 0, rescale: 1.0, min_p_last: 0 };

    /// Whether a list of the largest logits suffices: a min-p of at least e^-8 comes first, or there is a top-k.
    pub fn is_listed(&self) -> bool {
        self.begins_with_min_p() || self.top_k > 0
    }

    /// Whether min-p comes first and is at least e^-8.
    pub(crate) fn begins_with_min_p(&self) -> bool {
        self.ln_min_p > -8.0 && self.min_p_last == 0
    }

    /// Whether top-p comes first, so that sums of masses decide.
    pub(crate) fn is_by_mass(&self) -> bool {
        self.top_p < 1.0 && self.top_k == 0 && (self.ln_min_p == f64::NEG_INFINITY || self.min_p_last > 0)
    }

    /// Whether top-p is the only filter, or no filter is on.
    pub(crate) fn is_top_p_alone(&self) -> bool {
        let off = RowFilters::OFF;
        *self == RowFilters { top_p: self.top_p, ..off } || *self == RowFilters { rescale: self.rescale, ..off }
    }

    /// Converts filters; `None` if the GPU does not support them in this order.
    pub fn of(filters: &Filters) -> Option<RowFilters> {
        let mut all = RowFilters { rescale: filters.rescale, ..RowFilters::OFF };
        for (i, step) in filters.steps().iter().enumerate() {
            match *step {
                Filter::MinP(p) => {
                    all.ln_min_p = f64::from(p).ln();
                    all.min_p_last = u32::from(i > 0);
                }
                Filter::TopK(k) if k <= TOP_K_MAX && all.top_p == 1.0 => all.top_k = k,
                Filter::TopP(p) if all.min_p_last == 0 => all.top_p = p,
                _ => return None,
            }
        }
        (all != RowFilters { rescale: filters.rescale, ..RowFilters::OFF }).then_some(all)
    }
}

/// The capacity of a row's list, in tokens: `RowLists::ROOM` of row_lists.cuh.
pub(crate) const LIST_ROOM: usize = 8192;
/// The number of posted logits of a row, each the largest of a block: `RowLists::POSTS` of row_lists.cuh.
pub(crate) const LIST_POSTS: usize = 16;

layout! {
    /// The counters of a row's list.
    pub(crate) struct ListCounters = 8 {
        /// The number of listed tokens. If it exceeds [`LIST_ROOM`], the list lacks tokens.
        count: u32 = 0,
        /// The largest cutoff that a block has used, as monotone bits; 0 = none.
        cut: u32 = 4,
    }
}
pub(crate) const LIST_COUNTERS_BYTES: usize = size_of::<ListCounters>();

layout! {
    /// The output of the fused kernel for lists of the largest logits of rows.
    #[derive(Default)]
    pub(crate) struct RowLists = 32 {
        /// One [`RowFilters`] per row.
        pub(crate) filters: DeviceAddress<RowFilters> = 0,
        /// One `ListCounters` per row, zeros between launches.
        pub(crate) counters: DeviceAddress<ListCounters> = 8,
        /// [`LIST_POSTS`] largest logits of blocks per row, as monotone bits; zeros between launches.
        pub(crate) posted: DeviceAddress<u32> = 16,
        /// The listed logits and tokens: [`LIST_ROOM`] words of 64 bits per row.
        pub(crate) keys: DeviceAddress<u64> = 24,
    }
}

/// The passes of a call with filters that does not wait, as a word in device memory: `FilterPasses` of row_lists.cuh.
#[repr(u32)]
#[derive(Clone, Copy, Debug)]
pub(crate) enum FilterPasses {
    /// Lists have decided all rows so far.
    Lists = 0,
    /// The filters of a row need all logits, so no lists are made.
    Logits = 1,
}

layout! {
    /// The argument of filter_list.cu and filter_list_ranks.cu.
    pub(crate) struct FilterListCall = 56 {
        pub(crate) lists: RowLists = 0,
        pub(crate) rows: DeviceAddress<Row> = 32,
        pub(crate) draws: DeviceAddress<Draw> = 40,
        /// A word with the [`FilterPasses`]; null in a call that waits.
        pub(crate) passes: DeviceAddress<u32> = 48,
    }

    /// The argument of filter_row.cu, top_p.cu and top_p_ranks.cu.
    pub(crate) struct FilterCall = 88 {
        pub(crate) logits: DeviceAddress<f32> = 0,
        pub(crate) row_stride: u64 = 8,
        pub(crate) sources: DeviceAddress<u32> = 16,
        pub(crate) rows: DeviceAddress<Row> = 24,
        pub(crate) filters: DeviceAddress<RowFilters> = 32,
        pub(crate) draws: DeviceAddress<Draw> = 40,
        pub(crate) first_token: u32 = 48,
        pub(crate) tokens: u32 = 52,
        pub(crate) is_transformed: u32 = 56,
        pub(crate) count: u32 = 60,
        pub(crate) block_maxima: DeviceAddress<u16> = 64,
        pub(crate) skip_if: SkipIf = 72,
    }
}

/// Bytes of an `UndecidedRow`, the minimum capacity, the bins per row, and the rows with sums (undecided_rows.cuh).
const UNDECIDED_ROW_BYTES: usize = 64;
const UNDECIDED_ROWS_LEAST: usize = 32;
const OPEN_BINS: usize = 32;
pub(crate) const UNDECIDED_ROWS_SUMMED: usize = 256;

layout! {
    /// Device memory for the rows that the first pass leaves undecided. Zeros before the first call.
    pub(crate) struct UndecidedRows = 64 {
        pub(crate) counters: DeviceAddress<u32> = 0,
        pub(crate) arrived: DeviceAddress<u32> = 8,
        pub(crate) masses: DeviceAddress<u64> = 16,
        pub(crate) all: DeviceAddress<u64> = 24,
        pub(crate) best: DeviceAddress<u64> = 32,
        pub(crate) rows: DeviceAddress<u8> = 40,
        pub(crate) sums: DeviceAddress<u64> = 48,
        pub(crate) barrier: DeviceAddress<u32> = 56,
    }
}

impl UndecidedRows {
    /// Returns the bytes for up to `draws` draws.
    pub(crate) fn bytes(draws: usize) -> usize {
        let sums = 2 * 2 * 8 * UNDECIDED_ROWS_SUMMED;
        UNDECIDED_ROW_BYTES * draws.max(UNDECIDED_ROWS_LEAST) + sums + draws * (2 * 8 * OPEN_BINS + 8 + 4) + 16
    }

    /// Divides the memory at `base`, a multiple of 16.
    pub(crate) fn at(base: DeviceAddress<u8>, draws: usize) -> UndecidedRows {
        let sums = base.add(UNDECIDED_ROW_BYTES * draws.max(UNDECIDED_ROWS_LEAST)).cast::<u64>();
        let masses = sums.add(2 * 2 * UNDECIDED_ROWS_SUMMED);
        let best = masses.add(OPEN_BINS * draws);
        let all = best.add(OPEN_BINS * draws);
        let counters = all.add(draws).cast::<u32>();
        let (barrier, arrived) = (counters.add(2), counters.add(4));
        UndecidedRows { counters, arrived, masses, all, best, rows: base, sums, barrier }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn of(steps: &[Filter]) -> Option<RowFilters> {
        let mut all = [None; Filters::MAX];
        all.iter_mut().zip(steps).for_each(|(slot, &step)| *slot = Some(step));
        RowFilters::of(&Filters::new(all, 1.0))
    }

    #[test]
    fn unsupported_filters_are_none() {
        let (k, p, m) = (Filter::TopK(50), Filter::TopP(0.9), Filter::MinP(0.5));
        let ln_min_p = 0.5f64.ln();
        assert_eq!(of(&[k, p]), Some(RowFilters { top_k: 50, top_p: 0.9, ..RowFilters::OFF }));
        assert_eq!(of(&[m, k, p]), Some(RowFilters { ln_min_p, top_k: 50, top_p: 0.9, ..RowFilters::OFF }));
        assert_eq!(of(&[k, m]), Some(RowFilters { ln_min_p, top_k: 50, min_p_last: 1, ..RowFilters::OFF }));
        // A min-p that is not first is last.
        for unknown in [&[p, k][..], &[k, m, p], &[Filter::TopK(TOP_K_MAX + 1)], &[k, Filter::Epsilon(0.1)], &[]] {
            assert_eq!(of(unknown), None);
        }
    }

    #[test]
    fn the_parts_of_undecided_rows_do_not_overlap() {
        for draws in [1, 31, 32, 33, 256] {
            let open = UndecidedRows::at(DeviceAddress::new(4096), draws);
            let [counters, arrived, barrier] = [open.counters, open.arrived, open.barrier].map(DeviceAddress::get);
            let [masses, all, best, sums] = [open.masses, open.all, open.best, open.sums].map(DeviceAddress::get);
            let rows = open.rows.get();
            assert_eq!((rows, sums % 16, counters % 8), (4096, 0, 0));
            assert!(sums - rows >= (64 * draws.max(32)) as u64, "{draws}");
            assert_eq!(
                [masses - sums, best - masses, all - best, counters - all, barrier - counters, arrived - barrier],
                [8192, 256 * draws as u64, 256 * draws as u64, 8 * draws as u64, 8, 8]
            );
            assert_eq!(arrived + 4 * draws as u64 - rows, UndecidedRows::bytes(draws) as u64);
        }
    }
}
