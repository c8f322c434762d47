//! The types that the host passes to the kernels.
//!
//! Each type has a twin of the same name in `kernels/`. Both sides declare sizes and field offsets, and a test compares
//! the declarations. The Rust compiler asserts all of them. Each compiler of the kernels asserts as many as it supports
//! (see platform.cuh). Pointers have the type [`DeviceAddress`].
//!
//! Types that callers of the device-memory entry points write or read are public.

mod address;
mod columns;
mod filters;
mod fused;
mod groups;
pub(crate) mod layout;
mod logprobs;
mod peers;
#[cfg(any(test, feature = "nccl"))]
mod reduction;
mod shadow;
mod stored;
mod stored_scan;

pub use address::DeviceAddress;
pub(crate) use columns::{EncodeRows, WriteTokens};
pub use columns::{RowColumns, TokenColumns, TokenLists, failed_rank, invalid_parameter};
pub(crate) use filters::{
    FilterCall, FilterListCall, FilterPasses, LIST_COUNTERS_BYTES, LIST_POSTS, LIST_ROOM, RowLists,
    UNDECIDED_ROWS_SUMMED, UndecidedRows,
};
pub use filters::{RowFilters, TOP_K_MAX};
pub(crate) use fused::{
    Call, HeadTransform, LogitStore, Maps, Matrices, ScaledHidden, SkipIf, TensorMap, WeightScales, block_maxima_bytes,
    element, element_name,
};
pub(crate) use groups::{Groups, PARTIAL_BYTES, RUNNING_BYTES, Selection, Summaries};
pub(crate) use logprobs::{KeptCall, LogprobCall};
pub use logprobs::{KeptColumns, LogprobColumns, TOP_N_MAX};
pub(crate) use peers::{
    GatherLogits, MAX_PEERS, PeerRecords, PeerState, Peers, RECORD_BYTES, RECORD_WORDS, SLOT_BYTES,
};
#[cfg(feature = "nccl")]
pub(crate) use reduction::Reduction;
pub(crate) use shadow::{
    CANDIDATE_ROOM, Candidates, EstimateCounts, HiddenBound, MAX_PARTS, PartWinner, ShadowCall, ShadowWords,
};
pub(crate) use stored::{
    Canonical, Existing, Item, KeptToken, KeptTokens, Masses, NearTies, PART_MASSES_BYTES, RowSummaries,
    SUMMARY_LISTED, SUMMARY_TOKENS, StoredLogits, SummaryRequest, SummaryResult, TopLists, WidenRows,
};
pub(crate) use stored_scan::{ScanSums, ScanTokens, SumQuery};

use bytemuck::{Pod, Zeroable};
use cudarc::driver::{DeviceRepr, ValidAsZeroBits};
use layout::layout;

layout! {
    /// A token and the value added to its logit.
    #[derive(Default, PartialEq, Pod, Zeroable)]
    pub struct LogitBias = 8 {
        /// Global token id.
        pub token: u32 = 0,
        /// In nats; not NaN, not +inf.
        pub value: f32 = 4,
    }

    /// The penalties of a biased logit.
    #[derive(Default, PartialEq, Pod, Zeroable)]
    pub struct Penalty = 8 {
        /// Divides a positive logit, and multiplies any other logit; positive and finite; 1 = none.
        pub repetition: f32 = 0,
        /// Subtracted last; finite; 0 = none.
        pub subtract: f32 = 4,
    }
}

/// A flag in [`Row::biases`]: penalties follow the biases.
///
/// The first [`Penalty`] has the smallest `repetition`, at most 1, and the smallest `subtract`, at most 0. One
/// [`Penalty`] per bias follows. With larger values in the first [`Penalty`], kernels would skip tokens that should
/// win.
pub const PENALISED: u32 = 1 << 31;

layout! {
    /// The parameters of a row.
    #[derive(Default, PartialEq, Pod, Zeroable)]
    pub struct Row = 56 {
        /// The key of the row's noise.
        pub seed: u64 = 0,
        /// The position of the token in its sequence, below 2^56.
        pub position: u64 = 8,
        /// `mask_words` words, 1 = allowed, by global token id; 0 = every token is allowed.
        pub mask: DeviceAddress<u32> = 16,
        /// `biases` entries of [`LogitBias`], tokens strictly ascending. Penalties follow if [`PENALISED`] is set.
        pub bias: DeviceAddress<LogitBias> = 24,
        /// Words of the mask; tokens beyond them are forbidden.
        pub mask_words: u32 = 32,
        /// Number of biases, plus [`PENALISED`] if penalties follow them.
        pub biases: u32 = 36,
        /// The inverse of the temperature; 1 for a greedy row. It must be positive and finite, because the bounds that
        /// skip tokens must grow with this factor.
        pub inv_temperature: f32 = 40,
        /// The largest of the biases and 0. With a smaller value, kernels would skip tokens that should win.
        pub largest_bias: f32 = 44,
        /// Number of the draw.
        pub draw: u32 = 48,
        /// 1 = no noise.
        pub greedy: u32 = 52,
    }

    /// The result of a row.
    ///
    /// For an invalid row, `token` is the invalid token, and `score` is 1 if its raw logit was valid and a transform
    /// made it invalid, else 0. For a failed exchange, `token` is the failed rank.
    #[derive(Default, PartialEq, Pod, Zeroable)]
    pub struct Draw = 16 {
        /// Global token id.
        pub token: u32 = 0,
        /// Transformed logit plus noise, in nats.
        pub score: f32 = 4,
        /// Transformed logit, in nats.
        pub logit: f32 = 8,
        /// One of the constants of [`status`].
        pub status: u32 = 12,
    }
}

/// Allows these types in typed device memory.
macro_rules! device_repr {
    ($($type:ty),+) => {$(
        // SAFETY: plain data, as `Pod` states, with the layout that `layout!` states.
        #[allow(unsafe_code)]
        unsafe impl DeviceRepr for $type {}
        // SAFETY: all zeros is a value, as `Pod` states.
        #[allow(unsafe_code)]
        unsafe impl ValidAsZeroBits for $type {}
    )+};
}
device_repr!(Row, Draw, RowFilters, KeptToken, Item, SumQuery, SummaryRequest);

/// The statuses of a row's result.
pub mod status {
    /// A token was drawn.
    pub const DRAWN: u32 = 0;
    /// No token has a finite logit.
    pub const NO_FINITE_LOGIT: u32 = 1;
    /// A logit is NaN.
    pub const NAN: u32 = 2;
    /// A logit is +inf.
    pub const POSITIVE_INFINITY: u32 = 3;
    /// A rank of the group timed out; `token` is the rank.
    pub const LATE_RANK: u32 = 4;
    /// A rank of the group made a different call; `token` is the rank.
    pub const OTHER_CALL: u32 = 5;
    /// The host applies the row's filters. Only [`DeviceFilters`](crate::DeviceFilters) and
    /// [`DeviceSampler::enqueue`](crate::DeviceSampler::enqueue) return this status.
    pub const UNDECIDED: u32 = 6;
    /// A parameter is invalid, or a row has more adjusted tokens than planned. Only
    /// [`DeviceSampler::enqueue`](crate::DeviceSampler::enqueue) returns this status.
    pub const PARAMETERS: u32 = 7;
}
