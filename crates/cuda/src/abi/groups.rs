//! The arguments of the kernels of groups.

use crate::abi::{DeviceAddress, Draw, Row, layout};

layout! {
    /// The output for summaries of groups: `[rows, slots]` of [`PARTIAL_BYTES`] each.
    pub(crate) struct Summaries = 16 {
        pub(crate) partials: DeviceAddress<u8> = 0,
        /// Tokens of a group: a multiple of 64.
        pub(crate) size: u32 = 8,
        /// Slots per row.
        pub(crate) slots: u32 = 12,
    }

    /// The groups and the blocks of a launch.
    pub(crate) struct Groups = 16 {
        pub(crate) size: u32 = 0,
        pub(crate) first_token: u32 = 4,
        pub(crate) tokens: u32 = 8,
        pub(crate) blocks: u32 = 12,
    }
}

impl Groups {
    /// The summaries of a row: one per group, and one more per block, which may share a group with the previous block.
    pub(crate) fn slots(&self) -> u32 {
        let last = u64::from(self.first_token) + u64::from(self.tokens.max(1)) - 1;
        (last / u64::from(self.size)) as u32 - self.first_token / self.size + 1 + self.blocks
    }
}

layout! {
    /// The arguments of the kernel that draws from the summaries of groups.
    pub(crate) struct Selection = 80 {
        pub(crate) rows: DeviceAddress<Row> = 0,
        pub(crate) partials: DeviceAddress<u8> = 8,
        pub(crate) running: DeviceAddress<u8> = 16,
        pub(crate) invalid: DeviceAddress<u64> = 24,
        pub(crate) draws: DeviceAddress<Draw> = 32,
        /// 0 = not requested.
        pub(crate) log_z: DeviceAddress<f64> = 40,
        pub(crate) groups: Groups = 48,
        pub(crate) row_count: u32 = 64,
        /// A [`GroupRule`](crate::device::GroupRule).
        pub(crate) rule: u32 = 68,
        /// `begins`: 1 if the launch has the head's first tokens. `ends`: 1 if it has the last.
        pub(crate) begins: u32 = 72,
        pub(crate) ends: u32 = 76,
    }
}

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
