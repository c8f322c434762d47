//! The entry points of the kernels, with the types of their arguments.
#![allow(unsafe_code)]

#[cfg(feature = "nccl")]
use crate::abi::Reduction;
use crate::abi::{
    Call, Candidates, Canonical, DeviceAddress, EncodeRows, Existing, FilterCall, FilterListCall, GatherLogits,
    KeptCall, LogitStore, LogprobCall, Maps, Masses, Matrices, NearTies, PeerRecords, Peers, RowLists, RowSummaries,
    ScaledHidden, ScanSums, ScanTokens, Selection, ShadowCall, Summaries, SummaryRequest, TopLists, UndecidedRows,
    WidenRows, WriteTokens,
};
use crate::device::Entry;

/// Defines entry points: constant, kernel name, argument types.
macro_rules! entries {
    ($($(#[$attribute:meta])* $entry:ident $name:literal ($($argument:ty),+);)+) => {$(
        $(#[$attribute])*
        // SAFETY: the kernel's source has these parameters; `layout!` asserts equal layouts in Rust and CUDA.
        pub(crate) const $entry: Entry<($($argument,)+)> = unsafe { Entry::new($name) };
    )+};
}

entries! {
    FUSED_HOPPER "fused_hopper" (Call, Maps);
    FUSED_HOPPER_STORES "fused_hopper" (Call, Maps, LogitStore);
    FUSED_HOPPER_LISTS "fused_hopper" (Call, Maps, RowLists);
    FUSED_HOPPER_LOG_Z "fused_hopper" (Call, Maps, Masses);
    FUSED_HOPPER_FAN_OUT "fused_hopper" (Call, Maps, Peers);
    FUSED_HOPPER_CANDIDATES "fused_hopper" (Call, Maps, Candidates);
    FUSED_HOPPER_LISTED_CANDIDATES "fused_hopper" (Call, Maps, Candidates, RowLists);
    SCALE_HIDDEN "scale_hidden" (ScaledHidden);
    HIDDEN_DIGITS "hidden_digits" (ShadowCall);
    EXACT_WINNERS "exact_winners" (Call, ShadowCall);
    EXACT_LISTS "exact_lists" (Call, ShadowCall, FilterListCall);
    FUSED_DRAW "fused" (Call, Matrices, LogitStore);
    FUSED_DRAW_UNALIGNED "fused_unaligned" (Call, Matrices, LogitStore);
    FUSED_CANDIDATES "fused" (Call, Matrices, Candidates);
    FUSED_SUMMARY "fused" (Call, Matrices, Summaries);
    FUSED_SUMMARY_UNALIGNED "fused_unaligned" (Call, Matrices, Summaries);
    SELECT_GROUPS "select_groups" (Selection);
    STANDALONE "standalone" (Call, Existing);
    FILTER_LIST "filter_list" (FilterListCall);
    FILTER_LIST_RANKS "filter_list_ranks" (FilterListCall, PeerRecords);
    FILTER_ROW "filter_row" (FilterCall, DeviceAddress<f64>);
    FIND_BLOCK_MAXIMA "find_block_maxima" (FilterCall, DeviceAddress<u16>);
    TOP_P "top_p" (FilterCall, UndecidedRows);
    TOP_P_BLOCK_MAX "top_p_block_max" (FilterCall, UndecidedRows);
    TOP_P_RESOLVE "top_p_resolve" (FilterCall, UndecidedRows);
    TOP_P_RANKS "top_p_ranks" (FilterCall, UndecidedRows, PeerRecords);
    TOP_P_BLOCK_MAX_RANKS "top_p_block_max_ranks" (FilterCall, UndecidedRows, PeerRecords);
    TOP_P_RESOLVE_RANKS "top_p_resolve_ranks" (FilterCall, UndecidedRows, PeerRecords);
    PART_SUMMARIES "part_summaries" (RowSummaries);
    ROW_SUMMARIES "row_summaries" (RowSummaries);
    TOP_LIST "top_list" (TopLists);
    NEAR_TIES "near_ties" (NearTies);
    CANONICAL "canonical" (Canonical);
    FRONTIERS "frontiers" (ScanTokens);
    TOKENS_ABOVE "tokens_above" (ScanTokens);
    PREFIX_MASSES "prefix_masses" (ScanSums);
    PREFIX_COUNTS "prefix_counts" (ScanSums);
    MOMENTS "moments" (ScanSums);
    ENCODE_ROWS "encode_rows" (EncodeRows);
    WRITE_TOKENS "write_tokens" (WriteTokens);
    WIDEN_ROWS "widen_rows" (WidenRows);
    REQUEST_SUMMARIES "request_summaries" (FilterCall, RowSummaries, DeviceAddress<SummaryRequest>);
    ROW_LOGPROBS "row_logprobs" (LogprobCall);
    WRITE_KEPT "write_kept" (KeptCall);
    JOIN_PEERS "join_peers" (Peers);
    JOIN_LOGITS "join_logits" (Peers, DeviceAddress<u32>);
    GATHER_LOGITS "gather_logits" (GatherLogits);
    #[cfg(feature = "nccl")]
    TO_WORDS "to_words" (Reduction);
    #[cfg(feature = "nccl")]
    FROM_WORDS "from_words" (Reduction);
}
