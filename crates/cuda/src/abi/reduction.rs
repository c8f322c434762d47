//! The arguments of the kernels around a max all-reduce.

use crate::abi::{DeviceAddress, Draw, Row, layout};

layout! {
    /// The parameters of both launches.
    pub(crate) struct Reduction = 40 {
        /// `max_rows + 3` words.
        pub(crate) words: DeviceAddress<u64> = 0,
        pub(crate) rows: DeviceAddress<Row> = 8,
        pub(crate) draws: DeviceAddress<Draw> = 16,
        /// Identifies the call; equal on every rank.
        pub(crate) mark: u64 = 24,
        pub(crate) row_count: u32 = 32,
        pub(crate) max_rows: u32 = 36,
    }
}
