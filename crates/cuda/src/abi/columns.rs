//! Parameters and results of rows in device memory: one array per parameter, one array per result.

use crate::abi::{
    DeviceAddress, Draw, KeptColumns, LogitBias, LogprobColumns, MAX_PEERS, Row, RowFilters, layout, status,
};
use flash_sampling_core::Knob;

layout! {
    /// Lists of tokens: list `e` is `tokens[begin[e]..end[e]]`. If `tokens` is null, every list is empty.
    ///
    /// For lists in CSR form, `begin` is the address of the first offset, and `end` is the address of the second
    /// offset.
    #[derive(Default)]
    pub struct TokenLists = 24 {
        /// The index of each list's first token.
        pub begin: DeviceAddress<i64> = 0,
        /// The index after each list's last token.
        pub end: DeviceAddress<i64> = 8,
        /// Token ids in any order. Ids outside of the vocabulary are ignored.
        pub tokens: DeviceAddress<i32> = 16,
    }

    /// Parameters of rows in device memory, one array per parameter, for
    /// [`DeviceSampler::enqueue`](crate::DeviceSampler::enqueue).
    ///
    /// The parameters have the meaning and the order of [`RowParams`](flash_sampling_core::RowParams). A null array
    /// gives all rows the default value, and every array is null by default.
    ///
    /// `position` and `mask` have one element per row. For every other parameter, row `r` uses element or list
    /// `index[r]`, or element or list `r` if `index` is null. So several rows can share parameters. No kernel checks
    /// that `index` is within the arrays.
    #[derive(Default)]
    pub struct RowColumns = 240 {
        /// For each row, the element or list of every parameter except `position` and `mask`.
        pub index: DeviceAddress<i32> = 0,
        /// Seeds; default 0.
        pub seed: DeviceAddress<u64> = 8,
        /// The position of each row's next token in its sequence, below 2^56; default 0. With `has_short_positions`,
        /// the elements are `i32`.
        pub position: DeviceAddress<u64> = 16,
        /// Temperatures; 0 = greedy; default 1.
        pub temperature: DeviceAddress<f32> = 24,
        /// At most [`TOP_K_MAX`](crate::abi::TOP_K_MAX), except in greedy rows. A number below 1 or at least the size
        /// of the vocabulary = off.
        pub top_k: DeviceAddress<i32> = 32,
        /// Above 0 and at most 1; 1 = off.
        pub top_p: DeviceAddress<f32> = 40,
        /// From 0 to 1; 0 = off.
        pub min_p: DeviceAddress<f32> = 48,
        /// Divides the positive logits of tokens in prompt or output, and multiplies their other logits; 1 = off.
        pub repetition_penalty: DeviceAddress<f32> = 56,
        /// Subtracted for each occurrence of a token in the output; 0 = off.
        pub frequency_penalty: DeviceAddress<f32> = 64,
        /// Subtracted if a token is in the output; 0 = off.
        pub presence_penalty: DeviceAddress<f32> = 72,
        /// Bans the stop tokens while the output has fewer tokens; 0 = off.
        pub min_tokens: DeviceAddress<i32> = 80,
        /// Bit sets of allowed tokens: 1 = allowed, least significant bit first, as in xgrammar and llguidance.
        pub mask: DeviceAddress<u32> = 88,
        /// Words from the start of one row's mask to the start of the next.
        pub mask_stride: u64 = 96,
        /// Words of a mask. Tokens beyond them are forbidden.
        pub mask_words: u32 = 104,
        /// 1: `position` has elements of `i32`.
        pub has_short_positions: u32 = 108,
        /// The tokens with a bias, each at most once in a row.
        pub logit_bias: TokenLists = 112,
        /// The bias of each token in `logit_bias`; not NaN, not +inf.
        pub logit_bias_values: DeviceAddress<f32> = 136,
        /// Tokens that are never drawn.
        pub banned: TokenLists = 144,
        /// The stop tokens, which `min_tokens` bans.
        pub stop_tokens: TokenLists = 168,
        /// The tokens of each prompt.
        pub prompt: TokenLists = 192,
        /// The tokens generated so far.
        pub output: TokenLists = 216,
    }

    /// Results of rows in device memory, one array per field, each with one element per row. A null array is not
    /// written.
    #[derive(Default)]
    pub struct TokenColumns = 192 {
        /// The token ids; -1 for a row without a draw, or 0 with `is_complete`.
        pub tokens: DeviceAddress<i64> = 0,
        /// Transformed logit plus noise, in nats; -inf for a row without a draw.
        pub scores: DeviceAddress<f32> = 8,
        /// Transformed logits, in nats; -inf for a row without a draw.
        pub logits: DeviceAddress<f32> = 16,
        /// A constant of [`status`](crate::abi::status) in the low byte. With
        /// [`PARAMETERS`](crate::abi::status::PARAMETERS), [`invalid_parameter`] reads the other bits. After a failed
        /// exchange of ranks, [`failed_rank`] reads them.
        pub statuses: DeviceAddress<u32> = 24,
        /// Log-probabilities in the law of the draws:
        /// [`LogprobsMode::Processed`](flash_sampling_core::LogprobsMode::Processed).
        pub processed: LogprobColumns = 32,
        /// Log-probabilities in the law of the model: [`LogprobsMode::Raw`](flash_sampling_core::LogprobsMode::Raw).
        pub raw: LogprobColumns = 96,
        /// The tokens that the filters keep.
        pub kept: KeptColumns = 160,
        /// 1: each element of `tokens` and of [`LogprobColumns::top_tokens`] is a token, also for a row without a draw.
        /// Instead of -1, the elements of `top_tokens` are the lowest tokens that the row does not have.
        pub is_complete: u32 = 184,
        /// Not used.
        pub padding: u32 = 188,
    }

    /// The argument of `encode_rows`.
    pub(crate) struct EncodeRows = 320 {
        pub(crate) columns: RowColumns = 0,
        pub(crate) rows: DeviceAddress<Row> = 240,
        pub(crate) filters: DeviceAddress<RowFilters> = 248,
        pub(crate) invalid: DeviceAddress<u32> = 256,
        pub(crate) lists: DeviceAddress<LogitBias> = 264,
        pub(crate) counts: DeviceAddress<u32> = 272,
        pub(crate) first_row: u32 = 280,
        pub(crate) max_adjusted: u32 = 284,
        pub(crate) first_token: u32 = 288,
        pub(crate) tokens: u32 = 292,
        pub(crate) vocab_size: u32 = 296,
        /// Rows with a larger top-k need all logits.
        pub(crate) largest_top_k: u32 = 300,
        pub(crate) contents: DeviceAddress<u32> = 304,
        pub(crate) passes: DeviceAddress<u32> = 312,
    }

    /// The argument of `write_tokens`.
    pub(crate) struct WriteTokens = 224 {
        pub(crate) columns: TokenColumns = 0,
        pub(crate) draws: DeviceAddress<Draw> = 192,
        pub(crate) invalid: DeviceAddress<u32> = 200,
        pub(crate) first_row: u32 = 208,
        pub(crate) row_count: u32 = 212,
        pub(crate) passes: DeviceAddress<u32> = 216,
    }
}

/// The parameters in the order of `Parameter` of row_columns.cu, which counts from 1.
const PARAMETERS: [Knob; 9] = [
    Knob::Position,
    Knob::Temperature,
    Knob::TopK,
    Knob::TopP,
    Knob::MinP,
    Knob::RepetitionPenalty,
    Knob::FrequencyPenalty,
    Knob::PresencePenalty,
    Knob::LogitBias,
];

/// Returns the invalid parameter of a row, from its element of [`TokenColumns::statuses`].
///
/// `None`: no parameter is invalid, or the row has more adjusted tokens than
/// [`DeviceSampler::prepare_enqueue`](crate::DeviceSampler::prepare_enqueue) planned.
pub fn invalid_parameter(status: u32) -> Option<Knob> {
    let number = (status >> 8) as usize;
    number.checked_sub(1).and_then(|at| PARAMETERS.get(at)).copied()
}

/// Returns the late or mismatched rank of a row, from its element of [`TokenColumns::statuses`].
///
/// `None`: the status is neither [`LATE_RANK`](status::LATE_RANK) nor [`OTHER_CALL`](status::OTHER_CALL), or the
/// exchange does not know the rank (NCCL).
pub fn failed_rank(status: u32) -> Option<usize> {
    let is_of_a_rank = matches!(status & 0xff, status::LATE_RANK | status::OTHER_CALL);
    let rank = (status >> 8) as usize;
    (is_of_a_rank && rank < MAX_PEERS).then_some(rank)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_failed_rank_is_read_from_the_status_of_an_exchange_alone() {
        for (status, rank) in [
            (status::LATE_RANK | 3 << 8, Some(3)),
            (status::OTHER_CALL, Some(0)),
            (status::OTHER_CALL | u32::MAX << 8, None),
            (status::PARAMETERS | 3 << 8, None),
            (status::DRAWN, None),
        ] {
            assert_eq!(failed_rank(status), rank, "{status:#x}");
        }
    }
}
