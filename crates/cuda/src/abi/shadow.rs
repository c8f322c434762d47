//! The arguments of a draw from a shadow of the weight: twins of the types in shadow/pass.cuh.

use crate::abi::{DeviceAddress, layout};

layout! {
    /// The numbers of a hidden state that give the error bound of each token, and the factor of its digits.
    pub(crate) struct HiddenBound = 16 {
        pub(crate) scale: f32 = 0,
        pub(crate) error: f32 = 4,
        pub(crate) norm: f32 = 8,
        pub(crate) constant: f32 = 12,
    }

    /// Counts of the listed estimates of a row with a top-k.
    pub(crate) struct EstimateCounts = 128 {
        pub(crate) base: f32 = 0,
        pub(crate) width: f32 = 4,
        pub(crate) counts: [u32; 30] = 8,
    }

    /// The shadow's numbers per token, the lists of candidates, and the factors of the exact logits.
    pub(crate) struct Candidates = 104 {
        pub(crate) scales: DeviceAddress<f32> = 0,
        pub(crate) errors: DeviceAddress<f32> = 8,
        pub(crate) norms: DeviceAddress<f32> = 16,
        pub(crate) bounds: DeviceAddress<HiddenBound> = 24,
        pub(crate) counts: DeviceAddress<u32> = 32,
        /// `[rows, CANDIDATE_ROOM]`.
        pub(crate) keys: DeviceAddress<u64> = 40,
        /// `[rows, CANDIDATE_ROOM]` of rows with filters.
        pub(crate) estimates: DeviceAddress<u32> = 48,
        pub(crate) weight: DeviceAddress<u8> = 56,
        pub(crate) hidden: DeviceAddress<u8> = 64,
        /// Bytes between rows.
        pub(crate) weight_stride: u64 = 72,
        pub(crate) hidden_stride: u64 = 80,
        pub(crate) width: u32 = 88,
        /// The code of [`element`](crate::abi::element).
        pub(crate) element: u32 = 92,
        /// `[rows]`.
        pub(crate) estimated: DeviceAddress<EstimateCounts> = 96,
    }
}

/// The number of candidates that the list of a row can hold.
pub(crate) const CANDIDATE_ROOM: usize = 16384;
/// The maximum number of blocks that share a row's candidates.
pub(crate) const MAX_PARTS: usize = 32;

layout! {
    /// The state of a planned head between the kernels of a call.
    pub(crate) struct ShadowWords = 8 {
        pub(crate) open: u32 = 0,
        pub(crate) published: u32 = 4,
    }

    /// The best candidate of a part of a row's candidates.
    #[repr(align(16))]
    pub(crate) struct PartWinner = 16 {
        pub(crate) key: u64 = 0,
        pub(crate) logit: f32 = 8,
        pub(crate) zero: u32 = 12,
    }

    /// The argument of `hidden_digits`, `exact_winners` and `exact_lists`.
    pub(crate) struct ShadowCall = 176 {
        pub(crate) candidates: Candidates = 0,
        /// For each octet of rows, 8 rows of high digits and 8 rows of low digits.
        pub(crate) digits: DeviceAddress<u8> = 104,
        pub(crate) digit_stride: u64 = 112,
        pub(crate) bounds: DeviceAddress<HiddenBound> = 120,
        pub(crate) best: DeviceAddress<u64> = 128,
        /// `[rows, MAX_PARTS]`.
        pub(crate) winners: DeviceAddress<PartWinner> = 136,
        pub(crate) arrived: DeviceAddress<u32> = 144,
        pub(crate) words: DeviceAddress<ShadowWords> = 152,
        pub(crate) largest: f32 = 160,
        pub(crate) zero: u32 = 164,
        /// A counter in page-locked host memory: the rows of all launches that the shadow did not decide.
        pub(crate) undecided: DeviceAddress<u32> = 168,
    }
}
