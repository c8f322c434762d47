//! The arguments of a draw from a shadow of the weight: the twins of shadow/pass.cuh.

use crate::abi::{DeviceAddress, layout};

/// The bounds of a hidden state on all tokens, and the factor of its digits.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub(crate) struct HiddenBound {
    pub(crate) scale: f32,
    pub(crate) error: f32,
    pub(crate) norm: f32,
    pub(crate) constant: f32,
}
layout!(HiddenBound 16: scale 0, error 4, norm 8, constant 12);

/// Counts of the estimates that a row with a top-k has listed.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub(crate) struct EstimateCounts {
    pub(crate) base: f32,
    pub(crate) width: f32,
    pub(crate) counts: [u32; 30],
}
layout!(EstimateCounts 128: base 0, width 4, counts 8);

/// The shadow's numbers per token, the lists of candidates, and the factors of the exact logits.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub(crate) struct Candidates {
    pub(crate) scales: DeviceAddress<f32>,
    pub(crate) errors: DeviceAddress<f32>,
    pub(crate) norms: DeviceAddress<f32>,
    pub(crate) bounds: DeviceAddress<HiddenBound>,
    pub(crate) counts: DeviceAddress<u32>,
    /// `[rows, CANDIDATE_ROOM]`.
    pub(crate) keys: DeviceAddress<u64>,
    /// `[rows, CANDIDATE_ROOM]` of rows with filters.
    pub(crate) estimates: DeviceAddress<u32>,
    pub(crate) weight: DeviceAddress<u8>,
    pub(crate) hidden: DeviceAddress<u8>,
    /// Bytes between rows.
    pub(crate) weight_stride: u64,
    pub(crate) hidden_stride: u64,
    pub(crate) width: u32,
    /// The code of [`element`](crate::abi::element).
    pub(crate) element: u32,
    /// `[rows]`.
    pub(crate) estimated: DeviceAddress<EstimateCounts>,
}
layout!(Candidates 104:
    scales 0, errors 8, norms 16, bounds 24, counts 32, keys 40, estimates 48, weight 56, hidden 64, weight_stride 72,
    hidden_stride 80, width 88, element 92, estimated 96
);

/// The candidates that the list of a row holds.
pub(crate) const CANDIDATE_ROOM: usize = 16384;
/// The maximum number of blocks that share a row's candidates.
pub(crate) const MAX_PARTS: usize = 32;

/// Words of a planned head.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub(crate) struct ShadowWords {
    pub(crate) open: u32,
    pub(crate) published: u32,
}
layout!(ShadowWords 8: open 0, published 4);

/// The best candidate of some blocks.
#[repr(C, align(16))]
#[derive(Clone, Copy, Debug)]
pub(crate) struct PartWinner {
    pub(crate) key: u64,
    pub(crate) logit: f32,
    pub(crate) zero: u32,
}
layout!(PartWinner 16: key 0, logit 8, zero 12);

/// The argument of `hidden_digits`, `exact_winners` and `exact_lists`.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub(crate) struct ShadowCall {
    pub(crate) candidates: Candidates,
    /// For each octet of rows, 8 rows of high digits and 8 rows of low digits.
    pub(crate) digits: DeviceAddress<u8>,
    pub(crate) digit_stride: u64,
    pub(crate) bounds: DeviceAddress<HiddenBound>,
    pub(crate) best: DeviceAddress<u64>,
    /// `[rows, MAX_PARTS]`.
    pub(crate) winners: DeviceAddress<PartWinner>,
    pub(crate) arrived: DeviceAddress<u32>,
    pub(crate) words: DeviceAddress<ShadowWords>,
    pub(crate) largest: f32,
    pub(crate) zero: u32,
    /// In page-locked host memory: the rows of all launches that the shadow did not decide.
    pub(crate) undecided: DeviceAddress<u32>,
}
layout!(ShadowCall 176:
    candidates 0, digits 104, digit_stride 112, bounds 120, best 128, winners 136, arrived 144, words 152,
    largest 160, zero 164, undecided 168
);
