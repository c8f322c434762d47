//! The arguments of the kernels around a max all-reduce.

use crate::abi::{DeviceAddress, Draw, Row, layout};

/// The parameters of both launches.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub(crate) struct Reduction {
    /// `max_rows + 3` words.
    pub(crate) words: DeviceAddress<u64>,
    pub(crate) rows: DeviceAddress<Row>,
    pub(crate) draws: DeviceAddress<Draw>,
    /// Identifies the call; equal on every rank.
    pub(crate) mark: u64,
    pub(crate) row_count: u32,
    pub(crate) max_rows: u32,
}
layout!(Reduction 40: words 0, rows 8, draws 16, mark 24, row_count 32, max_rows 36);
