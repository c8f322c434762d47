//! The arguments of the kernels over existing or stored logits.

use crate::abi::{DeviceAddress, Draw, HeadTransform, Row, RowFilters, WeightScales, layout};
use bytemuck::{Pod, Zeroable};
use flash_sampling_core::backend::MassHistogram;

layout! {
    /// The logits that the standalone kernel draws from.
    pub(crate) struct Existing = 32 {
        pub(crate) logits: DeviceAddress<u8> = 0,
        /// The row of each draw, u32; 0 = draw `i` takes row `i`.
        pub(crate) sources: DeviceAddress<u32> = 8,
        pub(crate) row_stride: u64 = 16,
        pub(crate) blocks: u32 = 24,
        pub(crate) parts_of_block: u32 = 28,
    }

    /// The argument of `widen_rows`.
    pub(crate) struct WidenRows = 56 {
        pub(crate) logits: DeviceAddress<u8> = 0,
        /// The row of each draw; null = draw `i` takes row `i`.
        pub(crate) sources: DeviceAddress<u32> = 8,
        /// Rows without filters are not copied; null = all rows are copied.
        pub(crate) filters: DeviceAddress<RowFilters> = 16,
        pub(crate) copies: DeviceAddress<f32> = 24,
        pub(crate) row_stride: u64 = 32,
        pub(crate) copy_stride: u64 = 40,
        pub(crate) element: u32 = 48,
        pub(crate) tokens: u32 = 52,
    }

    /// The output for masses: the twin of the type in row_mass.cuh.
    pub(crate) struct Masses = 16 {
        /// The blocks' masses, 8 bytes each.
        pub(crate) parts: DeviceAddress<u8> = 0,
        /// A float64 for each draw.
        pub(crate) log_z: DeviceAddress<f64> = 8,
    }

    /// Stored, transformed logits. This type and the next five types have their twins in stored.cuh.
    pub(crate) struct StoredLogits = 24 {
        pub(crate) logits: DeviceAddress<f32> = 0,
        pub(crate) row_stride: u64 = 8,
        pub(crate) first_token: u32 = 16,
        pub(crate) tokens: u32 = 20,
    }

    /// A request about a stored row: the `limit` best tokens, and all tokens within `slack` of the last of these.
    #[derive(Default, PartialEq, Pod, Zeroable)]
    pub(crate) struct Item = 16 {
        pub(crate) source: u32 = 0,
        pub(crate) limit: u32 = 4,
        /// 0 = none, infinite = every token.
        pub(crate) slack: f32 = 8,
        pub(crate) padding: u32 = 12,
    }

    /// A token that an item keeps.
    #[derive(Default, PartialEq, Pod, Zeroable)]
    pub(crate) struct KeptToken = 16 {
        /// Ordered bits; 0 = canonically forbidden.
        pub(crate) key: u64 = 0,
        pub(crate) logit: f32 = 8,
        pub(crate) item: u32 = 12,
    }

    /// The output for kept tokens.
    pub(crate) struct KeptTokens = 24 {
        pub(crate) tokens: DeviceAddress<KeptToken> = 0,
        pub(crate) count: DeviceAddress<u64> = 8,
        pub(crate) capacity: u64 = 16,
    }

    /// The argument of top_list.cu.
    pub(crate) struct TopLists = 80 {
        pub(crate) stored: StoredLogits = 0,
        pub(crate) out: KeptTokens = 24,
        pub(crate) rows: DeviceAddress<Row> = 48,
        pub(crate) items: DeviceAddress<Item> = 56,
        pub(crate) scores: DeviceAddress<u32> = 64,
        pub(crate) item_count: u32 = 72,
        pub(crate) padding: u32 = 76,
    }

    /// The argument of near_ties.cu.
    pub(crate) struct NearTies = 80 {
        pub(crate) stored: StoredLogits = 0,
        pub(crate) out: KeptTokens = 24,
        pub(crate) rows: DeviceAddress<Row> = 48,
        pub(crate) items: DeviceAddress<Item> = 56,
        pub(crate) draws: DeviceAddress<Draw> = 64,
        pub(crate) blocks: u32 = 72,
        pub(crate) parts_of_block: u32 = 76,
    }

    /// The argument of canonical.cu.
    pub(crate) struct Canonical = 136 {
        pub(crate) out: KeptTokens = 0,
        pub(crate) items: DeviceAddress<Item> = 24,
        pub(crate) noise: DeviceAddress<Row> = 32,
        pub(crate) rows: DeviceAddress<Row> = 40,
        pub(crate) weight: DeviceAddress<u8> = 48,
        pub(crate) hidden: DeviceAddress<u8> = 56,
        pub(crate) bias: DeviceAddress<f32> = 64,
        /// Bytes.
        pub(crate) weight_stride: u64 = 72,
        /// Elements.
        pub(crate) hidden_stride: u64 = 80,
        pub(crate) head: HeadTransform = 88,
        pub(crate) weight_type: u32 = 96,
        pub(crate) hidden_type: u32 = 100,
        pub(crate) width: u32 = 104,
        pub(crate) first_token: u32 = 108,
        pub(crate) scales: WeightScales = 112,
    }

    /// A request about a row, for row_summary.cu.
    #[derive(Default, PartialEq, Pod, Zeroable)]
    pub(crate) struct SummaryRequest = 20 {
        /// The number of requested largest logits.
        pub(crate) limit: u32 = 0,
        /// Whether transformed logits are stored: 1 or 0.
        pub(crate) stores: u32 = 4,
        /// Whether the masses are written besides their sum: 1 or 0.
        pub(crate) masses: u32 = 8,
        /// The index of the drawn token in the row. The kernel counts the tokens before the drawn token.
        pub(crate) token: u32 = 12,
        /// The logit of the drawn token; inf = nothing is drawn.
        pub(crate) logit: f32 = 16,
    }

    /// The summary of a row by row_summary.cu: its mass is `sum * e^max`.
    #[derive(PartialEq, Pod, Zeroable)]
    pub(crate) struct SummaryResult = 24 {
        /// The first invalid logit; all ones if there is none.
        pub(crate) invalid: u64 = 0,
        pub(crate) sum: f64 = 8,
        /// -inf: no finite logit.
        pub(crate) max: f32 = 16,
        /// The number of listed largest logits, at most `limit`; all ones if too many tokens may belong to the list.
        pub(crate) listed: u32 = 20,
    }

    /// The argument of row_summary.cu.
    pub(crate) struct RowSummaries = 136 {
        pub(crate) stored: StoredLogits = 0,
        pub(crate) raw: DeviceAddress<u8> = 24,
        pub(crate) sources: DeviceAddress<u32> = 32,
        pub(crate) rows: DeviceAddress<Row> = 40,
        pub(crate) requests: DeviceAddress<SummaryRequest> = 48,
        pub(crate) results: DeviceAddress<SummaryResult> = 56,
        pub(crate) top: DeviceAddress<KeptToken> = 64,
        pub(crate) words: DeviceAddress<u64> = 72,
        pub(crate) parts: DeviceAddress<u8> = 80,
        pub(crate) listed: DeviceAddress<u8> = 88,
        pub(crate) listed_counts: DeviceAddress<u32> = 96,
        pub(crate) weights: DeviceAddress<f64> = 104,
        pub(crate) raw_stride: u64 = 112,
        pub(crate) element: u32 = 120,
        pub(crate) top_stride: u32 = 124,
        pub(crate) before: DeviceAddress<u32> = 128,
    }
}

/// The number of tokens per block of row_summary.cu.
pub(crate) const SUMMARY_TOKENS: usize = 8192;
/// Bytes of a part's masses.
pub(crate) const PART_MASSES_BYTES: usize = 8 + 8 * (MassHistogram::WORDS - 1);
/// The number of tokens that the blocks of a row can list.
pub(crate) const SUMMARY_LISTED: usize = 4096;
