//! Parameters and results of rows in device memory: one array per parameter, one array per result.

use crate::abi::{
    DeviceAddress, Draw, KeptColumns, LogitBias, LogprobColumns, MAX_PEERS, Row, RowFilters, layout, status,
};
use flash_sampling_core::Knob;

/// Lists of tokens: list `e` is `tokens[begin[e]..end[e]]`. If `tokens` is null, every list is empty.
///
/// For lists in CSR form, `begin` is the address of the first offset, and `end` is the address of the second offset.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default)]
pub struct TokenLists {
    /// The index of each list's first token.
    pub begin: DeviceAddress<i64>,
    /// The index after each list's last token.
    pub end: DeviceAddress<i64>,
    /// Token ids in any order. Ids outside of the vocabulary are ignored.
    pub tokens: DeviceAddress<i32>,
}
layout!(TokenLists 24: begin 0, end 8, tokens 16);

/// Parameters of rows in device memory, one array per parameter, for
/// [`DeviceSampler::enqueue`](crate::DeviceSampler::enqueue).
///
/// The parameters have the meaning and the order of [`RowParams`](flash_sampling_core::RowParams). A null array gives
/// all rows the default value, and every array is null by default.
///
/// `position` and `mask` have one element per row. Of every other parameter, row `r` has element or list `index[r]`, or
/// element or list `r` if `index` is null. So several rows can share parameters. No kernel checks that `index` is
/// within the arrays.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default)]
pub struct RowColumns {
    /// For each row, the element or list of every parameter except `position` and `mask`.
    pub index: DeviceAddress<i32>,
    /// Seeds; default 0.
    pub seed: DeviceAddress<u64>,
    /// The position of each row's next token in its sequence, below 2^56; default 0. With `has_short_positions`, the
    /// elements are `i32`.
    pub position: DeviceAddress<u64>,
    /// Temperatures; 0 = greedy; default 1.
    pub temperature: DeviceAddress<f32>,
    /// At most [`TOP_K_MAX`](crate::abi::TOP_K_MAX), except in greedy rows. A number below 1 or at least the size of
    /// the vocabulary = off.
    pub top_k: DeviceAddress<i32>,
    /// Above 0 and at most 1; 1 = off.
    pub top_p: DeviceAddress<f32>,
    /// From 0 to 1; 0 = off.
    pub min_p: DeviceAddress<f32>,
    /// Divides the positive logits of tokens in prompt or output, and multiplies their other logits; 1 = off.
    pub repetition_penalty: DeviceAddress<f32>,
    /// Subtracted for each occurrence of a token in the output; 0 = off.
    pub frequency_penalty: DeviceAddress<f32>,
    /// Subtracted if a token is in the output; 0 = off.
    pub presence_penalty: DeviceAddress<f32>,
    /// Bans the stop tokens while the output has fewer tokens; 0 = off.
    pub min_tokens: DeviceAddress<i32>,
    /// Bit sets of allowed tokens: 1 = allowed, least significant bit first, as in xgrammar and llguidance.
    pub mask: DeviceAddress<u32>,
    /// Words from the start of one row's mask to the start of the next.
    pub mask_stride: u64,
    /// Words of a mask. Tokens beyond them are forbidden.
    pub mask_words: u32,
    /// 1: `position` has elements of `i32`.
    pub has_short_positions: u32,
    /// The tokens with a bias, each at most once in a row.
    pub logit_bias: TokenLists,
    /// The bias of each token in `logit_bias`; not NaN, not +inf.
    pub logit_bias_values: DeviceAddress<f32>,
    /// Tokens that are never drawn.
    pub banned: TokenLists,
    /// The stop tokens, which `min_tokens` bans.
    pub stop_tokens: TokenLists,
    /// The tokens of each prompt.
    pub prompt: TokenLists,
    /// The tokens generated so far.
    pub output: TokenLists,
}
layout!(RowColumns 240:
    index 0, seed 8, position 16, temperature 24, top_k 32, top_p 40, min_p 48, repetition_penalty 56,
    frequency_penalty 64, presence_penalty 72, min_tokens 80, mask 88, mask_stride 96, mask_words 104,
    has_short_positions 108,
    logit_bias 112, logit_bias_values 136, banned 144, stop_tokens 168, prompt 192, output 216
);

/// Results of rows in device memory, one array per field, each with one element per row. A null array is not written.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default)]
pub struct TokenColumns {
    /// The token ids; -1 for a row without a draw, or 0 with `is_complete`.
    pub tokens: DeviceAddress<i64>,
    /// Transformed logit plus noise, in nats; -inf for a row without a draw.
    pub scores: DeviceAddress<f32>,
    /// Transformed logits, in nats; -inf for a row without a draw.
    pub logits: DeviceAddress<f32>,
    /// A constant of [`status`](crate::abi::status) in the low byte. With
    /// [`PARAMETERS`](crate::abi::status::PARAMETERS), [`invalid_parameter`] reads the other bits. After a failed
    /// exchange of ranks, [`failed_rank`] reads them.
    pub statuses: DeviceAddress<u32>,
    /// Log-probabilities in the law of the draws:
    /// [`LogprobsMode::Processed`](flash_sampling_core::LogprobsMode::Processed).
    pub processed: LogprobColumns,
    /// Log-probabilities in the law of the model: [`LogprobsMode::Raw`](flash_sampling_core::LogprobsMode::Raw).
    pub raw: LogprobColumns,
    /// The tokens that the filters keep.
    pub kept: KeptColumns,
    /// 1: each element of `tokens` and of [`LogprobColumns::top_tokens`] is a token, also for a row without a draw.
    /// Instead of -1, the elements of `top_tokens` are the lowest tokens that the row does not have.
    pub is_complete: u32,
    /// Not used.
    pub padding: u32,
}
layout!(TokenColumns 192:
    tokens 0, scores 8, logits 16, statuses 24, processed 32, raw 96, kept 160, is_complete 184, padding 188
);

/// The argument of `encode_rows`.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub(crate) struct EncodeRows {
    pub(crate) columns: RowColumns,
    pub(crate) rows: DeviceAddress<Row>,
    pub(crate) filters: DeviceAddress<RowFilters>,
    pub(crate) invalid: DeviceAddress<u32>,
    pub(crate) lists: DeviceAddress<LogitBias>,
    pub(crate) counts: DeviceAddress<u32>,
    pub(crate) first_row: u32,
    pub(crate) max_adjusted: u32,
    pub(crate) first_token: u32,
    pub(crate) tokens: u32,
    pub(crate) vocab_size: u32,
    /// Rows with a larger top-k need all logits.
    pub(crate) largest_top_k: u32,
    pub(crate) contents: DeviceAddress<u32>,
    pub(crate) passes: DeviceAddress<u32>,
}
layout!(EncodeRows 320:
    columns 0, rows 240, filters 248, invalid 256, lists 264, counts 272, first_row 280, max_adjusted 284, first_token 288,
    tokens 292, vocab_size 296, largest_top_k 300, contents 304,
    passes 312
);

/// The argument of `write_tokens`.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub(crate) struct WriteTokens {
    pub(crate) columns: TokenColumns,
    pub(crate) draws: DeviceAddress<Draw>,
    pub(crate) invalid: DeviceAddress<u32>,
    pub(crate) first_row: u32,
    pub(crate) row_count: u32,
    pub(crate) passes: DeviceAddress<u32>,
}
layout!(WriteTokens 224: columns 0, draws 192, invalid 200, first_row 208, row_count 212, passes 216);

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
/// `None`: the status is neither [`LATE_RANK`](status::LATE_RANK) nor [`OTHER_CALL`](status::OTHER_CALL), or the exchange
/// does not know the rank (NCCL).
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
