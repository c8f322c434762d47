//! The types that cross from the host to the kernels: the twin of `kernels/include/flash_sampling/abi.cuh`; both assert
//! the sizes. Pointers are device addresses.

use bytemuck::{Pod, Zeroable};
use cudarc::driver::{DeviceRepr, ValidAsZeroBits};
use flash_sampling_core::DType;

/// A token and what is added to its logit.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Pod, Zeroable)]
pub struct LogitBias {
    /// Global token id.
    pub token: u32,
    /// In nats; not NaN, not +inf.
    pub value: f32,
}

/// All that differs from row to row.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Pod, Zeroable)]
pub struct Row {
    /// The key of the row's noise.
    pub seed: u64,
    /// The token's place in its sequence, below 2^56.
    pub position: u64,
    /// `mask_words` words, 1 = allowed, by global token id; 0 = every token is allowed.
    pub mask: u64,
    /// `biases` entries of [`LogitBias`], tokens strictly ascending.
    pub bias: u64,
    /// Words of the mask; tokens beyond them are forbidden.
    pub mask_words: u32,
    /// Number of biases.
    pub biases: u32,
    /// One over the temperature; 1 for a greedy row.
    pub inv_temperature: f32,
    /// The largest of the biases and 0. A smaller value would lose tokens that should win.
    pub largest_bias: f32,
    /// Number of the draw.
    pub draw: u32,
    /// 1 = no noise.
    pub greedy: u32,
}

/// The result of a row; for an invalid row `token` is the offending one.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Pod, Zeroable)]
pub struct Draw {
    /// Global token id.
    pub token: u32,
    /// Transformed logit plus noise, in nats.
    pub score: f32,
    /// Transformed logit, in nats.
    pub logit: f32,
    /// One of the constants of [`status`].
    pub status: u32,
}

// SAFETY: both are plain data with the layout that the kernels know, and all zeros is a value of each.
#[allow(unsafe_code)]
unsafe impl DeviceRepr for Row {}
// SAFETY: as above.
#[allow(unsafe_code)]
unsafe impl ValidAsZeroBits for Row {}
// SAFETY: as above.
#[allow(unsafe_code)]
unsafe impl DeviceRepr for Draw {}
// SAFETY: as above.
#[allow(unsafe_code)]
unsafe impl ValidAsZeroBits for Draw {}

/// What a row came to.
pub mod status {
    /// A token was drawn.
    pub const DRAWN: u32 = 0;
    /// No token has a finite logit.
    pub const NO_FINITE_LOGIT: u32 = 1;
    /// A logit is NaN.
    pub const NAN: u32 = 2;
    /// A logit is +inf.
    pub const POSITIVE_INFINITY: u32 = 3;
}

/// From dot products to raw logits.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub(crate) struct HeadTransform {
    /// 0 = none.
    pub(crate) soft_cap: f32,
    pub(crate) scale: f32,
}

/// The head and the batch of one launch.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub(crate) struct Call {
    pub(crate) rows: u64,
    pub(crate) bias: u64,
    pub(crate) best: u64,
    pub(crate) invalid: u64,
    pub(crate) logits: u64,
    pub(crate) arrived: u64,
    pub(crate) draws: u64,
    pub(crate) head: HeadTransform,
    pub(crate) row_count: u32,
    pub(crate) hidden: u32,
    pub(crate) first_token: u32,
    pub(crate) tokens: u32,
}

/// The two factors in device memory, in any layout.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub(crate) struct Matrices {
    pub(crate) weight: u64,
    pub(crate) hidden: u64,
    /// Bytes from one row to the next.
    pub(crate) weight_stride: u64,
    pub(crate) hidden_stride: u64,
    /// 0 = bf16, 1 = f16, 2 = f32.
    pub(crate) weight_type: u32,
    pub(crate) hidden_type: u32,
    /// Bytes read at once: a power of two up to 16 that divides address and stride.
    pub(crate) weight_unit: u32,
    pub(crate) hidden_unit: u32,
}

/// Where transformed logits go, `[rows, tokens]`; 0 = nowhere.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Stored {
    pub(crate) logits: u64,
    /// Floats from one row to the next.
    pub(crate) stride: u64,
}

/// The logits that the standalone kernel draws from.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub(crate) struct Existing {
    pub(crate) logits: u64,
    /// The row of each draw, u32; 0 = draw `i` takes row `i`.
    pub(crate) sources: u64,
    pub(crate) row_stride: u64,
    pub(crate) blocks: u32,
    pub(crate) parts_of_block: u32,
}

/// Transformed logits that were stored: the twin of stored.cuh, as are the five below.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub(crate) struct StoredLogits {
    pub(crate) logits: u64,
    pub(crate) row_stride: u64,
    pub(crate) first_token: u32,
    pub(crate) tokens: u32,
}

/// Something asked of a stored row: the `limit` best, and all within `slack` of the last of those.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Pod, Zeroable)]
pub(crate) struct Item {
    pub(crate) source: u32,
    pub(crate) limit: u32,
    /// 0 = none, infinite = every token.
    pub(crate) slack: f32,
    pub(crate) padding: u32,
}

/// A token that an item keeps.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Pod, Zeroable)]
pub(crate) struct Entry {
    /// Ordered bits; 0 = canonically forbidden.
    pub(crate) key: u64,
    pub(crate) logit: f32,
    pub(crate) item: u32,
}

/// Where items keep their entries.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub(crate) struct Entries {
    pub(crate) entries: u64,
    pub(crate) count: u64,
    pub(crate) capacity: u64,
}

/// The argument of top_list.cu.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub(crate) struct TopLists {
    pub(crate) stored: StoredLogits,
    pub(crate) out: Entries,
    pub(crate) rows: u64,
    pub(crate) items: u64,
    pub(crate) scores: u64,
    pub(crate) item_count: u32,
    pub(crate) padding: u32,
}

/// The argument of near_ties.cu.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub(crate) struct NearTies {
    pub(crate) stored: StoredLogits,
    pub(crate) out: Entries,
    pub(crate) rows: u64,
    pub(crate) items: u64,
    pub(crate) draws: u64,
    pub(crate) blocks: u32,
    pub(crate) parts_of_block: u32,
}

/// The argument of canonical.cu.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub(crate) struct Canonical {
    pub(crate) out: Entries,
    pub(crate) items: u64,
    pub(crate) noise: u64,
    pub(crate) rows: u64,
    pub(crate) weight: u64,
    pub(crate) hidden: u64,
    pub(crate) bias: u64,
    pub(crate) weight_stride: u64,
    pub(crate) hidden_stride: u64,
    pub(crate) head: HeadTransform,
    pub(crate) weight_type: u32,
    pub(crate) hidden_type: u32,
    pub(crate) width: u32,
    pub(crate) first_token: u32,
}

/// The argument of transform.cu.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub(crate) struct Transform {
    pub(crate) raw: u64,
    pub(crate) stored: u64,
    pub(crate) invalid: u64,
    pub(crate) rows: u64,
    pub(crate) sources: u64,
    pub(crate) raw_stride: u64,
    pub(crate) stored_stride: u64,
    pub(crate) element: u32,
    pub(crate) first_token: u32,
    pub(crate) tokens: u32,
    pub(crate) padding: u32,
}

/// The kernels' number of a type.
pub(crate) fn element(dtype: DType) -> u32 {
    match dtype {
        DType::BF16 => 0,
        DType::F16 => 1,
        DType::F32 => 2,
    }
}

/// Where the summaries of groups go: `[rows, slots]` of [`PARTIAL_BYTES`] each.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub(crate) struct Summaries {
    pub(crate) partials: u64,
    /// Tokens of a group: a multiple of 64.
    pub(crate) size: u32,
    /// Of a row.
    pub(crate) slots: u32,
}

/// Bytes that a block leaves of a group and row.
pub(crate) const PARTIAL_BYTES: usize = 24;

/// Bytes that are kept of a row between the launches of a head in parts.
pub(crate) const RUNNING_BYTES: usize = 40;

/// The groups of a launch and who works on them.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub(crate) struct Groups {
    pub(crate) size: u32,
    pub(crate) first_token: u32,
    pub(crate) tokens: u32,
    pub(crate) blocks: u32,
}

impl Groups {
    /// Places for summaries of a row: one for each group, and one more for each block, which may share a group with the
    /// block before.
    pub(crate) fn slots(&self) -> u32 {
        let last = u64::from(self.first_token) + u64::from(self.tokens.max(1)) - 1;
        (last / u64::from(self.size)) as u32 - self.first_token / self.size + 1 + self.blocks
    }
}

/// From the summaries of groups to draws.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub(crate) struct Selection {
    pub(crate) rows: u64,
    pub(crate) partials: u64,
    pub(crate) running: u64,
    pub(crate) invalid: u64,
    pub(crate) draws: u64,
    /// 0 = not wanted.
    pub(crate) log_z: u64,
    pub(crate) groups: Groups,
    pub(crate) row_count: u32,
    /// A [`GroupRule`](crate::GroupRule).
    pub(crate) rule: u32,
    /// 1 = these are the head's first tokens, and its last ones.
    pub(crate) begins: u32,
    pub(crate) ends: u32,
}

/// What the driver encodes.
#[repr(C, align(64))]
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct TensorMap(pub(crate) [u64; 16]);

/// The tensors of one launch as boxes of one slab.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub(crate) struct Maps {
    pub(crate) weight: TensorMap,
    pub(crate) granule: TensorMap,
    pub(crate) hidden: TensorMap,
}

const _: () = assert!(size_of::<LogitBias>() == 8);
const _: () = assert!(size_of::<Row>() == 56);
const _: () = assert!(size_of::<Draw>() == 16);
const _: () = assert!(size_of::<Call>() == 80);
const _: () = assert!(size_of::<Maps>() == 384);
const _: () = assert!(size_of::<Matrices>() == 48);
const _: () = assert!(size_of::<Stored>() == 16);
const _: () = assert!(size_of::<Existing>() == 32);
const _: () = assert!(size_of::<StoredLogits>() == 24);
const _: () = assert!(size_of::<Item>() == 16);
const _: () = assert!(size_of::<Entry>() == 16);
const _: () = assert!(size_of::<Entries>() == 24);
const _: () = assert!(size_of::<TopLists>() == 80);
const _: () = assert!(size_of::<NearTies>() == 80);
const _: () = assert!(size_of::<Canonical>() == 112);
const _: () = assert!(size_of::<Transform>() == 72);
const _: () = assert!(size_of::<Summaries>() == 16);
const _: () = assert!(size_of::<Selection>() == 80);

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
