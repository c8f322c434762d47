//! The arguments of the kernels of groups.

use crate::abi::{DeviceAddress, Draw, Row, layout};

/// The output for summaries of groups: `[rows, slots]` of [`PARTIAL_BYTES`] each.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub(crate) struct Summaries {
    pub(crate) partials: DeviceAddress<u8>,
    /// Tokens of a group: a multiple of 64.
    pub(crate) size: u32,
    /// Slots per row.
    pub(crate) slots: u32,
}
layout!(Summaries 16: partials 0, size 8, slots 12);

/// The groups and the blocks of a launch.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub(crate) struct Groups {
    pub(crate) size: u32,
    pub(crate) first_token: u32,
    pub(crate) tokens: u32,
    pub(crate) blocks: u32,
}
layout!(Groups 16: size 0, first_token 4, tokens 8, blocks 12);

impl Groups {
    /// The summaries of a row: one per group, and one more per block, which may share a group with the previous block.
    pub(crate) fn slots(&self) -> u32 {
        let last = u64::from(self.first_token) + u64::from(self.tokens.max(1)) - 1;
        (last / u64::from(self.size)) as u32 - self.first_token / self.size + 1 + self.blocks
    }
}

/// The arguments of the kernel that draws from the summaries of groups.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub(crate) struct Selection {
    pub(crate) rows: DeviceAddress<Row>,
    pub(crate) partials: DeviceAddress<u8>,
    pub(crate) running: DeviceAddress<u8>,
    pub(crate) invalid: DeviceAddress<u64>,
    pub(crate) draws: DeviceAddress<Draw>,
    /// 0 = not requested.
    pub(crate) log_z: DeviceAddress<f64>,
    pub(crate) groups: Groups,
    pub(crate) row_count: u32,
    /// A [`GroupRule`](crate::GroupRule).
    pub(crate) rule: u32,
    /// `begins`: 1 if the launch has the head's first tokens. `ends`: 1 if it has the last.
    pub(crate) begins: u32,
    pub(crate) ends: u32,
}
layout!(Selection 80:
    rows 0, partials 8, running 16, invalid 24, draws 32, log_z 40, groups 48, row_count 64, rule 68, begins 72,
    ends 76
);

/// Bytes of a block's summary of a group and row: `Partial` of partial.cuh.
pub(crate) const PARTIAL_BYTES: usize = 24;

/// Bytes of a row's state between the launches of a head in parts: `Running` of groups.cuh.
pub(crate) const RUNNING_BYTES: usize = 40;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn slots_count_groups_on_the_absolute_grid_and_blocks() {
        let slots = |first_token, tokens, size, blocks| Groups { size, first_token, tokens, blocks }.slots();
        assert_eq!(slots(0, 64, 64, 1), 2);
        assert_eq!(slots(63, 2, 64, 1), 3);
        assert_eq!(slots(0, 151_936, 512, 132), 297 + 132);
        assert_eq!(slots(u32::MAX - 63, 64, 64, 1), 2);
    }
}
