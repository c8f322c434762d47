//! The filters that ranks can decide on their GPUs.

use crate::abi::{RECORD_WORDS, RowFilters};
use crate::device::MAX_ROWS;
use crate::sampler::FilterSource;
use flash_sampling_core::DType;

/// The maximum number of listed tokens that a rank sends for a row, after their count.
const SENT: u32 = RECORD_WORDS as u32 - 1;

/// The filters that a rank, or every rank of a group, supports for hidden states of the weight's type.
///
/// A rank does not know the hidden states of other ranks, so the actual type of hidden states has no influence.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct FilterSupport {
    /// Whether lists decide listed filters.
    pub(crate) lists: bool,
    /// Whether stored logits decide top-p alone.
    pub(crate) masses: bool,
    /// The maximum number of draws in a launch.
    pub(crate) most: usize,
}

impl FilterSupport {
    /// Encodes the support of a rank with a weight of this type, for the other ranks.
    pub(crate) fn encode(&self, weight: DType) -> Vec<u8> {
        let flags = [weight.code(), self.lists.into(), self.masses.into()];
        flags.into_iter().chain((self.most.min(MAX_ROWS) as u32).to_le_bytes()).collect()
    }

    /// The common support of all ranks, from their messages; none if a message is invalid or the weights' types differ.
    pub(crate) fn of_all(messages: &[Vec<u8>]) -> Self {
        let decode = |bytes: &Vec<u8>| {
            let &[weight, lists, masses, a, b, c, d] = bytes.as_slice() else { return None };
            let most = u32::from_le_bytes([a, b, c, d]) as usize;
            Some((weight, FilterSupport { lists: lists == 1, masses: masses == 1, most }))
        };
        let both = |(weight, a): (u8, FilterSupport), (other, b): (u8, FilterSupport)| {
            let all =
                FilterSupport { lists: a.lists && b.lists, masses: a.masses && b.masses, most: a.most.min(b.most) };
            (weight == other).then_some((weight, all))
        };
        let mut all = messages.iter().map(decode);
        let first = all.next().flatten();
        all.fold(first, |all, rank| both(all?, rank?)).map(|(_, all)| all).unwrap_or_default()
    }

    /// Whether ranks support any filters.
    pub(crate) fn is_any(&self) -> bool {
        self.most > 0 && (self.lists || self.masses)
    }

    /// The logits that decide these filters; `None` if unsupported. Draws without filters fit both sources.
    pub(crate) fn decides(&self, filters: &RowFilters) -> Option<FilterSource> {
        // One shard may have all tokens that a top-k keeps, unless min-p comes first and keeps fewer.
        let is_long = filters.top_k > SENT && !filters.begins_with_min_p();
        if self.most == 0 || is_long {
            return None;
        }
        if *filters == RowFilters::OFF || filters.is_listed() {
            return self.lists.then_some(FilterSource::Lists);
        }
        (self.masses && filters.is_top_p_alone()).then_some(FilterSource::Logits)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ranks_decide_what_all_of_them_can() {
        let of = |most, lists, masses| FilterSupport { lists, masses, most };
        let all = |ranks: &[FilterSupport]| {
            FilterSupport::of_all(&ranks.iter().map(|rank| rank.encode(DType::BF16)).collect::<Vec<_>>())
        };
        let both = of(64, true, true);
        assert_eq!(all(&[both]), both);
        assert_eq!(all(&[both, of(40, true, false)]), of(40, true, false));
        assert!(!all(&[of(64, false, true), of(40, true, false)]).is_any() && !all(&[]).is_any());
        for other in [Vec::new(), both.encode(DType::F16)] {
            let supports = [both.encode(DType::BF16), other, both.encode(DType::BF16)];
            assert_eq!(FilterSupport::of_all(&supports), FilterSupport::default());
        }
    }

    #[test]
    fn rows_go_where_they_are_decided() {
        let can = FilterSupport { lists: true, masses: true, most: 8 };
        let top_p = RowFilters { top_p: 0.9, ..RowFilters::OFF };
        let listed = RowFilters { top_k: 5, ..top_p };
        let of = |filters| can.decides(&filters);
        assert_eq!([of(RowFilters::OFF), of(listed)], [Some(FilterSource::Lists); 2]);
        assert_eq!(of(top_p), Some(FilterSource::Logits));
        assert_eq!(of(RowFilters { rescale: 2.0, ..top_p }), None);
        assert_eq!(FilterSupport { most: 0, ..can }.decides(&listed), None);
    }

    #[test]
    fn a_record_has_as_many_words_as_the_kernels_send() {
        let kernels = include_str!("../../kernels/include/flash_sampling/exchange/peer_records.cuh");
        assert!(kernels.contains(&format!("u32 WORDS = {RECORD_WORDS};")));
    }

    #[test]
    fn lists_longer_than_a_rank_sends_are_left_to_the_hosts() {
        let can = FilterSupport { lists: true, masses: true, most: 8 };
        let of = |top_k, ln_min_p, min_p_last| {
            can.decides(&RowFilters { top_k, ln_min_p, min_p_last, ..RowFilters::OFF }).is_some()
        };
        let none = f64::NEG_INFINITY;
        assert_eq!([of(128, none, 0), of(129, none, 0), of(1024, none, 0)], [true, false, false]);
        assert_eq!([of(129, -3.0, 0), of(129, -3.0, 1), of(129, -9.0, 0)], [true, false, false]);
    }
}
