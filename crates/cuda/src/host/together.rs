//! Which rows with filters ranks decide together on their GPUs.

use crate::abi::RowFilters;
use crate::device::fused_hopper::MAX_ROWS;
use crate::host::resident::DecidedFrom;
use flash_sampling_core::DType;

/// Types of hidden states, in the order in which a rank tells of them.
const TYPES: [DType; 3] = [DType::BF16, DType::F16, DType::F32];

/// What a rank can do with rows that have filters, or all of a group can.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct FiltersTogether {
    /// Of each type of hidden states: whether draws are decided from lists, and top-p alone from stored logits.
    lists: [bool; 3],
    masses: [bool; 3],
    /// Draws of a launch.
    pub(crate) most: usize,
}

impl FiltersTogether {
    /// `can` tells of a type whether draws are decided from lists, and from stored logits.
    pub(crate) fn of(most: usize, can: impl Fn(DType) -> (bool, bool)) -> Self {
        FiltersTogether { lists: TYPES.map(|dtype| can(dtype).0), masses: TYPES.map(|dtype| can(dtype).1), most }
    }

    /// What a rank tells the others.
    pub(crate) fn encode(&self) -> Vec<u8> {
        let flags = self.lists.iter().chain(&self.masses).map(|&can| u8::from(can));
        flags.chain((self.most.min(MAX_ROWS) as u32).to_le_bytes()).collect()
    }

    /// What all ranks can do, from what each told: nothing where one told nothing.
    pub(crate) fn of_all(told: &[Vec<u8>]) -> Self {
        let decode = |bytes: &Vec<u8>| {
            let bytes: &[u8; 10] = bytes.as_slice().try_into().ok()?;
            let flag = |at: usize| bytes[at] == 1;
            let most = u32::from_le_bytes([bytes[6], bytes[7], bytes[8], bytes[9]]) as usize;
            Some(FiltersTogether { lists: [0, 1, 2].map(flag), masses: [3, 4, 5].map(flag), most })
        };
        let both = |a: FiltersTogether, b: FiltersTogether| FiltersTogether {
            lists: [0, 1, 2].map(|i| a.lists[i] && b.lists[i]),
            masses: [0, 1, 2].map(|i| a.masses[i] && b.masses[i]),
            most: a.most.min(b.most),
        };
        told.iter().map(|bytes| decode(bytes).unwrap_or_default()).reduce(both).unwrap_or_default()
    }

    /// Whether anything is decided together.
    pub(crate) fn is_any(&self) -> bool {
        self.most > 0 && self.lists.iter().chain(&self.masses).any(|&can| can)
    }

    /// What draws with these filters are decided from; draws without filters go either way.
    pub(crate) fn decides(&self, dtype: DType, filters: &RowFilters) -> Option<DecidedFrom> {
        let at = TYPES.iter().position(|&of| of == dtype).filter(|_| self.most > 0)?;
        if *filters == RowFilters::OFF || filters.is_listed() {
            return self.lists[at].then_some(DecidedFrom::Lists);
        }
        (self.masses[at] && filters.is_top_p_alone()).then_some(DecidedFrom::Logits)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ranks_decide_what_all_of_them_can() {
        let of = |most, lists, masses| FiltersTogether::of(most, |dtype| (lists && dtype != DType::F32, masses));
        let all = |ranks: &[FiltersTogether]| {
            FiltersTogether::of_all(&ranks.iter().map(FiltersTogether::encode).collect::<Vec<_>>())
        };
        assert_eq!(all(&[of(64, true, true)]), of(64, true, true));
        assert_eq!(all(&[of(64, true, true), of(40, true, false)]), of(40, true, false));
        assert!(!all(&[of(64, false, true), of(40, true, false)]).is_any() && !all(&[]).is_any());
        let told = [of(64, true, true).encode(), Vec::new()];
        assert_eq!(FiltersTogether::of_all(&told), FiltersTogether::default());
    }

    #[test]
    fn rows_go_where_they_are_decided() {
        let can = FiltersTogether::of(8, |dtype| (dtype == DType::BF16, dtype == DType::BF16));
        let top_p = RowFilters { top_p: 0.9, ..RowFilters::OFF };
        let listed = RowFilters { top_k: 5, ..top_p };
        let of = |filters| can.decides(DType::BF16, &filters);
        assert_eq!([of(RowFilters::OFF), of(listed)], [Some(DecidedFrom::Lists); 2]);
        assert_eq!(of(top_p), Some(DecidedFrom::Logits));
        assert_eq!(of(RowFilters { rescale: 2.0, ..top_p }), None);
        assert_eq!(can.decides(DType::F16, &listed), None);
    }
}
