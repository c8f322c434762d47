//! The types that cross from the host to the kernels. Each has a twin of its name in `kernels/`; both sides state sizes
//! and places of fields, and a test that they state the same. Rust asserts all of it, the kernels' compilers too where they
//! know how (see platform.cuh). Pointers are of type [`DeviceAddress`].
//!
//! Public is what callers of the entry points over device memory write and read.

mod address;
mod filters;
mod fused;
mod groups;
pub(crate) mod layout;
mod peers;
#[cfg(any(test, feature = "nccl"))]
mod reduction;
mod stored;
mod stored_scan;

pub use address::DeviceAddress;
pub(crate) use filters::{
    FilterCall, FilterListCall, LIST_COUNTERS_BYTES, LIST_POSTS, LIST_ROOM, RowLists, UNDECIDED_ROWS_SUMMED,
    UndecidedRows,
};
pub use filters::{RowFilters, TOP_K_MAX};
pub(crate) use fused::{
    Call, HeadTransform, LogitStore, Maps, Matrices, TensorMap, block_maxima_bytes, element, element_name,
};
pub(crate) use groups::{Groups, PARTIAL_BYTES, RUNNING_BYTES, Selection, Summaries};
pub(crate) use peers::{MAX_PEERS, PeerRecords, PeerState, Peers, RECORD_BYTES, RECORD_WORDS, SLOT_BYTES};
#[cfg(feature = "nccl")]
pub(crate) use reduction::Reduction;
pub(crate) use stored::{
    Canonical, Existing, Item, KeptToken, KeptTokens, Masses, NearTies, PART_MASSES_BYTES, RowSummaries,
    SUMMARY_LISTED, SUMMARY_TOKENS, StoredLogits, SummaryRequest, SummaryResult, TopLists,
};
pub(crate) use stored_scan::{ScanSums, ScanTokens, SumQuery};

use bytemuck::{Pod, Zeroable};
use cudarc::driver::{DeviceRepr, ValidAsZeroBits};
use layout::layout;

/// A token and what is added to its logit.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Pod, Zeroable)]
pub struct LogitBias {
    /// Global token id.
    pub token: u32,
    /// In nats; not NaN, not +inf.
    pub value: f32,
}
layout!(LogitBias 8: token 0, value 4);

/// What is done to a biased logit.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Pod, Zeroable)]
pub struct Penalty {
    /// Divides a positive logit and multiplies another; positive and finite; 1 = none.
    pub repetition: f32,
    /// Subtracted last; finite; 0 = none.
    pub subtract: f32,
}
layout!(Penalty 8: repetition 0, subtract 4);

/// Added to [`Row::biases`]: behind the biases lie a [`Penalty`] with the smallest of all values, and at most 1 and 0, and
/// then one [`Penalty`] for each bias. Larger values in the first of them would lose tokens that should win.
pub const PENALISED: u32 = 1 << 31;

/// All that differs from row to row.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Pod, Zeroable)]
pub struct Row {
    /// The key of the row's noise.
    pub seed: u64,
    /// The token's place in its sequence, below 2^56.
    pub position: u64,
    /// `mask_words` words, 1 = allowed, by global token id; 0 = every token is allowed.
    pub mask: DeviceAddress<u32>,
    /// `biases` entries of [`LogitBias`], tokens strictly ascending; penalties follow where there is [`PENALISED`].
    pub bias: DeviceAddress<LogitBias>,
    /// Words of the mask; tokens beyond them are forbidden.
    pub mask_words: u32,
    /// Number of biases; with [`PENALISED`] where penalties follow them.
    pub biases: u32,
    /// One over the temperature, positive and finite: tokens are left out by bounds that grow with it. 1 for a greedy row.
    pub inv_temperature: f32,
    /// The largest of the biases and 0. A smaller value would lose tokens that should win.
    pub largest_bias: f32,
    /// Number of the draw.
    pub draw: u32,
    /// 1 = no noise.
    pub greedy: u32,
}
layout!(Row 56:
    seed 0, position 8, mask 16, bias 24, mask_words 32, biases 36, inv_temperature 40, largest_bias 44, draw 48,
    greedy 52
);

/// The result of a row; for an invalid row `token` is the offending one and `score` 1 where its raw logit was valid and a
/// transform made it what it is, else 0; for a failed exchange `token` is the rank to blame.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Pod, Zeroable)]
pub struct Draw {
    /// Global token id.
    pub token: u32,
    /// Transformed logit plus noise, in nats.
    pub score: f32,
    /// Transformed logit, in nats.
    pub logit: f32,
    /// One of the constants of [`status`].
    pub status: u32,
}
layout!(Draw 16: token 0, score 4, logit 8, status 12);

/// Lets these types lie in typed device memory.
macro_rules! device_repr {
    ($($type:ty),+) => {$(
        // SAFETY: plain data, as `Pod` states, with the layout that `layout!` asserts.
        #[allow(unsafe_code)]
        unsafe impl DeviceRepr for $type {}
        // SAFETY: all zeros is a value, as `Pod` states.
        #[allow(unsafe_code)]
        unsafe impl ValidAsZeroBits for $type {}
    )+};
}
device_repr!(Row, Draw, RowFilters, KeptToken, Item, SumQuery, SummaryRequest);

/// What a row came to.
pub mod status {
    /// A token was drawn.
    pub const DRAWN: u32 = 0;
    /// No token has a finite logit.
    pub const NO_FINITE_LOGIT: u32 = 1;
    /// A logit is NaN.
    pub const NAN: u32 = 2;
    /// A logit is +inf.
    pub const POSITIVE_INFINITY: u32 = 3;
    /// A rank of the group did not come in time; `token` is the rank.
    pub const LATE_RANK: u32 = 4;
    /// A rank of the group was called otherwise; `token` is the rank.
    pub const OTHER_CALL: u32 = 5;
    /// The filters of the row are left to the host; only [`DeviceFilters`](crate::DeviceFilters) leaves any.
    pub const UNDECIDED: u32 = 6;
}
