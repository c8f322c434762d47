//! The kinds of filters in a call.

use crate::abi::RowFilters;
use crate::device::RowFeatures;

/// The kinds of selection that the rows of a call need.
#[derive(Clone, Copy, Debug)]
pub struct FilterKinds {
    pub(super) by_mass: bool,
    pub(super) gathered: bool,
    /// Every row with top-p first has no other filter.
    is_top_p_alone: bool,
    rows: RowFeatures,
}

impl FilterKinds {
    /// Any rows, any filters.
    pub const ALL: FilterKinds =
        FilterKinds { by_mass: true, gathered: true, is_top_p_alone: false, rows: RowFeatures::Any };

    /// Top-p, or other filters before top-p, or both, for rows with these features.
    pub(crate) fn new(top_p: bool, others: bool, rows: RowFeatures) -> FilterKinds {
        FilterKinds { by_mass: top_p, gathered: others, is_top_p_alone: true, rows }
    }

    /// The kinds of these filters, for any rows.
    pub fn of(filters: &[RowFilters]) -> FilterKinds {
        let gathered = |f: &RowFilters| !f.is_by_mass() && *f != RowFilters { rescale: f.rescale, ..RowFilters::OFF };
        FilterKinds {
            by_mass: filters.iter().any(RowFilters::is_by_mass),
            gathered: filters.iter().any(gathered),
            is_top_p_alone: filters.iter().all(|filters| !filters.is_by_mass() || filters.is_top_p_alone()),
            ..FilterKinds::ALL
        }
    }

    /// Restricts the kinds to rows with these features.
    pub fn with_rows(self, rows: RowFeatures) -> FilterKinds {
        FilterKinds { rows, ..self }
    }

    /// Whether any row may have min-p or top-k first, so that lists of the largest logits may decide it.
    pub(crate) fn has_lists(&self) -> bool {
        self.gathered
    }

    /// Whether block maxima can select the few logits that decide.
    pub(super) fn is_by_block_maxima(&self) -> bool {
        self.is_top_p_alone && self.rows == RowFeatures::Bare
    }
}
