//! The arguments of the kernels over existing or stored logits.

use crate::abi::{DeviceAddress, Draw, HeadTransform, Row, RowFilters, WeightScales, layout};
use bytemuck::{Pod, Zeroable};
use flash_sampling_core::backend::MassHistogram;

/// The logits that the standalone kernel draws from.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub(crate) struct Existing {
    pub(crate) logits: DeviceAddress<u8>,
    /// The row of each draw, u32; 0 = draw `i` takes row `i`.
    pub(crate) sources: DeviceAddress<u32>,
    pub(crate) row_stride: u64,
    pub(crate) blocks: u32,
    pub(crate) parts_of_block: u32,
}
layout!(Existing 32: logits 0, sources 8, row_stride 16, blocks 24, parts_of_block 28);

/// The argument of `widen_rows`.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub(crate) struct WidenRows {
    pub(crate) logits: DeviceAddress<u8>,
    /// The row of each draw; null = draw `i` takes row `i`.
    pub(crate) sources: DeviceAddress<u32>,
    /// Rows without filters are not copied; null = all rows are copied.
    pub(crate) filters: DeviceAddress<RowFilters>,
    pub(crate) copies: DeviceAddress<f32>,
    pub(crate) row_stride: u64,
    pub(crate) copy_stride: u64,
    pub(crate) element: u32,
    pub(crate) tokens: u32,
}
layout!(WidenRows 56:
    logits 0, sources 8, filters 16, copies 24, row_stride 32, copy_stride 40, element 48, tokens 52
);

/// The output for masses: the twin of row_mass.cuh.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub(crate) struct Masses {
    /// The blocks' masses, 8 bytes each.
    pub(crate) parts: DeviceAddress<u8>,
    /// A float64 for each draw.
    pub(crate) log_z: DeviceAddress<f64>,
}
layout!(Masses 16: parts 0, log_z 8);

/// Stored, transformed logits: the twin of stored.cuh, as are the next five types.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub(crate) struct StoredLogits {
    pub(crate) logits: DeviceAddress<f32>,
    pub(crate) row_stride: u64,
    pub(crate) first_token: u32,
    pub(crate) tokens: u32,
}
layout!(StoredLogits 24: logits 0, row_stride 8, first_token 16, tokens 20);

/// A request about a stored row: the `limit` best tokens, and all tokens within `slack` of the last of these.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Pod, Zeroable)]
pub(crate) struct Item {
    pub(crate) source: u32,
    pub(crate) limit: u32,
    /// 0 = none, infinite = every token.
    pub(crate) slack: f32,
    pub(crate) padding: u32,
}
layout!(Item 16: source 0, limit 4, slack 8, padding 12);

/// A token that an item keeps.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Pod, Zeroable)]
pub(crate) struct KeptToken {
    /// Ordered bits; 0 = canonically forbidden.
    pub(crate) key: u64,
    pub(crate) logit: f32,
    pub(crate) item: u32,
}
layout!(KeptToken 16: key 0, logit 8, item 12);

/// The output for kept tokens.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub(crate) struct KeptTokens {
    pub(crate) tokens: DeviceAddress<KeptToken>,
    pub(crate) count: DeviceAddress<u64>,
    pub(crate) capacity: u64,
}
layout!(KeptTokens 24: tokens 0, count 8, capacity 16);

/// The argument of top_list.cu.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub(crate) struct TopLists {
    pub(crate) stored: StoredLogits,
    pub(crate) out: KeptTokens,
    pub(crate) rows: DeviceAddress<Row>,
    pub(crate) items: DeviceAddress<Item>,
    pub(crate) scores: DeviceAddress<u32>,
    pub(crate) item_count: u32,
    pub(crate) padding: u32,
}
layout!(TopLists 80: stored 0, out 24, rows 48, items 56, scores 64, item_count 72, padding 76);

/// The argument of near_ties.cu.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub(crate) struct NearTies {
    pub(crate) stored: StoredLogits,
    pub(crate) out: KeptTokens,
    pub(crate) rows: DeviceAddress<Row>,
    pub(crate) items: DeviceAddress<Item>,
    pub(crate) draws: DeviceAddress<Draw>,
    pub(crate) blocks: u32,
    pub(crate) parts_of_block: u32,
}
layout!(NearTies 80: stored 0, out 24, rows 48, items 56, draws 64, blocks 72, parts_of_block 76);

/// The argument of canonical.cu.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub(crate) struct Canonical {
    pub(crate) out: KeptTokens,
    pub(crate) items: DeviceAddress<Item>,
    pub(crate) noise: DeviceAddress<Row>,
    pub(crate) rows: DeviceAddress<Row>,
    pub(crate) weight: DeviceAddress<u8>,
    pub(crate) hidden: DeviceAddress<u8>,
    pub(crate) bias: DeviceAddress<f32>,
    /// Bytes.
    pub(crate) weight_stride: u64,
    /// Elements.
    pub(crate) hidden_stride: u64,
    pub(crate) head: HeadTransform,
    pub(crate) weight_type: u32,
    pub(crate) hidden_type: u32,
    pub(crate) width: u32,
    pub(crate) first_token: u32,
    pub(crate) scales: WeightScales,
}
layout!(Canonical 136:
    out 0, items 24, noise 32, rows 40, weight 48, hidden 56, bias 64, weight_stride 72, hidden_stride 80, head 88,
    weight_type 96, hidden_type 100, width 104, first_token 108, scales 112
);

/// A request about a row, for row_summary.cu.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Pod, Zeroable)]
pub(crate) struct SummaryRequest {
    /// Largest logits.
    pub(crate) limit: u32,
    /// Whether transformed logits are stored: 1 or 0.
    pub(crate) stores: u32,
    /// Whether the masses are written besides their sum: 1 or 0.
    pub(crate) masses: u32,
    /// The number of the drawn token among the row's, to count the tokens before it.
    pub(crate) token: u32,
    /// The logit of the drawn token; inf = nothing is drawn.
    pub(crate) logit: f32,
}
layout!(SummaryRequest 20: limit 0, stores 4, masses 8, token 12, logit 16);

/// The summary of a row by row_summary.cu: its mass is `sum * e^max`.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Pod, Zeroable)]
pub(crate) struct SummaryResult {
    /// The first invalid logit; all ones if there is none.
    pub(crate) invalid: u64,
    pub(crate) sum: f64,
    /// -inf: no finite logit.
    pub(crate) max: f32,
    /// Number of largest logits, at most `limit`; all ones if too many tokens may belong to the list.
    pub(crate) listed: u32,
}
layout!(SummaryResult 24: invalid 0, sum 8, max 16, listed 20);

/// The argument of row_summary.cu.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub(crate) struct RowSummaries {
    pub(crate) stored: StoredLogits,
    pub(crate) raw: DeviceAddress<u8>,
    pub(crate) sources: DeviceAddress<u32>,
    pub(crate) rows: DeviceAddress<Row>,
    pub(crate) requests: DeviceAddress<SummaryRequest>,
    pub(crate) results: DeviceAddress<SummaryResult>,
    pub(crate) top: DeviceAddress<KeptToken>,
    pub(crate) words: DeviceAddress<u64>,
    pub(crate) parts: DeviceAddress<u8>,
    pub(crate) listed: DeviceAddress<u8>,
    pub(crate) listed_counts: DeviceAddress<u32>,
    pub(crate) weights: DeviceAddress<f64>,
    pub(crate) raw_stride: u64,
    pub(crate) element: u32,
    pub(crate) top_stride: u32,
    pub(crate) before: DeviceAddress<u32>,
}
layout!(RowSummaries 136:
    stored 0, raw 24, sources 32, rows 40, requests 48, results 56, top 64, words 72, parts 80, listed 88, listed_counts 96,
    weights 104, raw_stride 112, element 120, top_stride 124,
    before 128
);

/// Tokens of a block of row_summary.cu.
pub(crate) const SUMMARY_TOKENS: usize = 8192;
/// Bytes of a part's masses.
pub(crate) const PART_MASSES_BYTES: usize = 8 + 8 * (MassHistogram::WORDS - 1);
/// Tokens that the blocks of a row may list.
pub(crate) const SUMMARY_LISTED: usize = 4096;
