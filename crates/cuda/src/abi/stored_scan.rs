//! The arguments of stored_scan.cu.

use crate::abi::{DeviceAddress, Item, KeptTokens, Row, StoredLogits, layout};
use bytemuck::{Pod, Zeroable};
use flash_sampling_core::backend::LogitRank;

/// The argument of the kernels that keep tokens.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub(crate) struct ScanTokens {
    pub(crate) stored: StoredLogits,
    pub(crate) out: KeptTokens,
    pub(crate) rows: DeviceAddress<Row>,
    pub(crate) items: DeviceAddress<Item>,
}
layout!(ScanTokens 64: stored 0, out 24, rows 48, items 56);

/// A logit rank in a stored row, or the factor of the row's logits.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Pod, Zeroable)]
pub(crate) struct SumQuery {
    pub(crate) source: u32,
    pub(crate) token: u32,
    pub(crate) value: f32,
    pub(crate) padding: u32,
}
layout!(SumQuery 16: source 0, token 4, value 8, padding 12);

impl SumQuery {
    /// Requests the sum over the tokens before a rank in a stored row.
    pub(crate) fn before(source: usize, rank: &LogitRank) -> Self {
        SumQuery { source: source as u32, token: rank.token, value: rank.logit, padding: 0 }
    }
}

/// The argument of the kernels that sum.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub(crate) struct ScanSums {
    pub(crate) stored: StoredLogits,
    pub(crate) queries: DeviceAddress<SumQuery>,
    pub(crate) sums: DeviceAddress<u64>,
}
layout!(ScanSums 40: stored 0, queries 24, sums 32);
