//! The arguments of the kernels of a shard's survey.

use crate::abi::layout::layout;
use crate::abi::stored::{KeptTokens, StoredLogits};
use bytemuck::{Pod, Zeroable};

/// The argument of the kernels of survey.cu that keep tokens.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub(crate) struct SurveyTokens {
    pub(crate) stored: StoredLogits,
    pub(crate) out: KeptTokens,
    pub(crate) rows: u64,
    pub(crate) items: u64,
}
layout!(SurveyTokens 64: stored 0, out 24, rows 48, items 56);

/// A place in a stored row, or what its logits are multiplied by.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Pod, Zeroable)]
pub(crate) struct Look {
    pub(crate) source: u32,
    pub(crate) token: u32,
    pub(crate) value: f32,
    pub(crate) padding: u32,
}
layout!(Look 16: source 0, token 4, value 8, padding 12);

/// The argument of the kernels of survey.cu that sum.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub(crate) struct SurveySums {
    pub(crate) stored: StoredLogits,
    pub(crate) looks: u64,
    pub(crate) sums: u64,
}
layout!(SurveySums 40: stored 0, looks 24, sums 32);
