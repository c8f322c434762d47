//! The arguments of the exchange over NVLink.

use crate::abi::{DeviceAddress, Draw, Row, layout};
use bytemuck::{Pod, Zeroable};

/// The maximum number of ranks in a group.
pub(crate) const MAX_PEERS: usize = 32;

/// Bytes of a row's draw in an exchange.
pub(crate) const SLOT_BYTES: usize = 32;

/// Words in a rank's record of a row with filters: `PeerRecords::WORDS`.
pub(crate) const RECORD_WORDS: usize = 129;

/// Bytes of a rank's record of a row with filters in an exchange.
pub(crate) const RECORD_BYTES: usize = RECORD_WORDS * 16;

layout! {
    /// The state of a rank between launches.
    #[derive(Default, PartialEq, Pod, Zeroable)]
    pub(crate) struct PeerState = 16 {
        pub(crate) step: u32 = 0,
        pub(crate) arrived: u32 = 4,
        /// A bit for each rank that timed out.
        pub(crate) late: u32 = 8,
        pub(crate) unused: u32 = 12,
    }

    /// The parameters of a launch.
    #[derive(Default)]
    pub(crate) struct Peers = 328 {
        /// The mailbox of every rank, as this rank's device addresses it: `[turns, world, max_rows]` slots.
        pub(crate) mailboxes: [DeviceAddress<u8>; MAX_PEERS] = 0,
        pub(crate) rows: DeviceAddress<Row> = 256,
        pub(crate) draws: DeviceAddress<Draw> = 264,
        pub(crate) state: DeviceAddress<PeerState> = 272,
        /// Nanoseconds before a wait times out.
        pub(crate) limit: u64 = 280,
        /// Nanoseconds between sending and receiving; 0 except in tests.
        pub(crate) pause: u64 = 288,
        /// Identifies the call; equal on every rank.
        pub(crate) mark: u64 = 296,
        pub(crate) rank: u32 = 304,
        pub(crate) world: u32 = 308,
        /// `world`, rounded up to a power of two.
        pub(crate) lanes: u32 = 312,
        pub(crate) row_count: u32 = 316,
        pub(crate) max_rows: u32 = 320,
        /// Mailboxes used in turn: 2, except in the negative control.
        pub(crate) turns: u32 = 324,
    }

    /// The parameters of a launch with records.
    pub(crate) struct PeerRecords = 336 {
        /// The parameters of the launch; `rows` and `draws` are not used.
        pub(crate) peers: Peers = 0,
        /// Bytes from the start of a mailbox to its records, `[kinds, world, max_rows]`.
        pub(crate) offset: u64 = 328,
    }

    /// The parameters of a copy of a shard's logits into the memory of all ranks.
    pub(crate) struct GatherLogits = 288 {
        /// The matrix of every rank, as this rank's device addresses it: `[rows, vocab]`.
        pub(crate) matrices: [DeviceAddress<f32>; MAX_PEERS] = 0,
        pub(crate) state: DeviceAddress<PeerState> = 256,
        /// In elements.
        pub(crate) row_stride: u64 = 264,
        pub(crate) first_token: u32 = 272,
        /// The tokens of the shard.
        pub(crate) tokens: u32 = 276,
        pub(crate) rank: u32 = 280,
        pub(crate) world: u32 = 284,
    }
}
