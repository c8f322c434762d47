//! The arguments of stored_scan.cu.

use crate::abi::{DeviceAddress, Item, KeptTokens, Row, StoredLogits, layout};
use bytemuck::{Pod, Zeroable};
use flash_sampling_core::backend::LogitRank;

layout! {
    /// The argument of the kernels that keep tokens.
    pub(crate) struct ScanTokens = 64 {
        pub(crate) stored: StoredLogits = 0,
        pub(crate) out: KeptTokens = 24,
        pub(crate) rows: DeviceAddress<Row> = 48,
        pub(crate) items: DeviceAddress<Item> = 56,
    }

    /// A query of a stored row: a logit rank, or the factor of the row's logits.
    #[derive(Default, PartialEq, Pod, Zeroable)]
    pub(crate) struct SumQuery = 16 {
        pub(crate) source: u32 = 0,
        pub(crate) token: u32 = 4,
        pub(crate) value: f32 = 8,
        pub(crate) padding: u32 = 12,
    }
}

impl SumQuery {
    /// Requests the sum over the tokens before a rank in a stored row.
    pub(crate) fn before(source: usize, rank: &LogitRank) -> Self {
        SumQuery { source: source as u32, token: rank.token, value: rank.logit, padding: 0 }
    }
}

layout! {
    /// The argument of the kernels that sum.
    pub(crate) struct ScanSums = 40 {
        pub(crate) stored: StoredLogits = 0,
        pub(crate) queries: DeviceAddress<SumQuery> = 24,
        pub(crate) sums: DeviceAddress<u64> = 32,
    }
}
