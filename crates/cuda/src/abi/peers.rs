//! The arguments of the exchange over NVLink.

use crate::abi::{DeviceAddress, Draw, Row, layout};
use bytemuck::{Pod, Zeroable};

/// The maximum number of ranks in a group.
pub(crate) const MAX_PEERS: usize = 32;

/// Bytes of a row's draw in an exchange.
pub(crate) const SLOT_BYTES: usize = 32;

/// Words in a rank's record of a row with filters: `PeerRecords::WORDS`.
pub(crate) const RECORD_WORDS: usize = 129;

/// Bytes of such a record in an exchange.
pub(crate) const RECORD_BYTES: usize = RECORD_WORDS * 16;

/// The state of a rank between launches.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Pod, Zeroable)]
pub(crate) struct PeerState {
    pub(crate) step: u32,
    pub(crate) arrived: u32,
    /// A bit for each rank that timed out.
    pub(crate) late: u32,
    pub(crate) unused: u32,
}
layout!(PeerState 16: step 0, arrived 4, late 8, unused 12);

/// The parameters of a launch.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Peers {
    /// The mailbox of every rank, as this rank's device addresses it: `[turns, world, max_rows]` slots.
    pub(crate) mailboxes: [DeviceAddress<u8>; MAX_PEERS],
    pub(crate) rows: DeviceAddress<Row>,
    pub(crate) draws: DeviceAddress<Draw>,
    pub(crate) state: DeviceAddress<PeerState>,
    /// Nanoseconds before a wait times out.
    pub(crate) limit: u64,
    /// Nanoseconds between sending and receiving; 0 except in tests.
    pub(crate) pause: u64,
    /// Identifies the call; equal on every rank.
    pub(crate) mark: u64,
    pub(crate) rank: u32,
    pub(crate) world: u32,
    /// `world`, rounded up to a power of two.
    pub(crate) lanes: u32,
    pub(crate) row_count: u32,
    pub(crate) max_rows: u32,
    /// Mailboxes used in turn: 2, except in the negative control.
    pub(crate) turns: u32,
}
layout!(Peers 328:
    mailboxes 0, rows 256, draws 264, state 272, limit 280, pause 288, mark 296, rank 304, world 308, lanes 312,
    row_count 316, max_rows 320, turns 324
);

/// The parameters of a launch with records.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub(crate) struct PeerRecords {
    /// No rows and draws.
    pub(crate) peers: Peers,
    /// Bytes from the start of a mailbox to its records, `[kinds, world, max_rows]`.
    pub(crate) offset: u64,
}
layout!(PeerRecords 336: peers 0, offset 328);

/// The parameters of a copy of a shard's logits into the memory of all ranks.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub(crate) struct GatherLogits {
    /// The matrix of every rank, as this rank's device addresses it: `[rows, vocab]`.
    pub(crate) matrices: [DeviceAddress<f32>; MAX_PEERS],
    pub(crate) state: DeviceAddress<PeerState>,
    /// In elements.
    pub(crate) row_stride: u64,
    pub(crate) first_token: u32,
    /// The tokens of the shard.
    pub(crate) tokens: u32,
    pub(crate) rank: u32,
    pub(crate) world: u32,
}
layout!(GatherLogits 288:
    matrices 0, state 256, row_stride 264, first_token 272, tokens 276, rank 280, world 284
);
