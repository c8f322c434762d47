//! Log-probabilities and kept tokens of rows in device memory, and the arguments of their kernels.

use crate::abi::{DeviceAddress, FilterCall, KeptToken, SummaryResult, layout};

/// The largest [`LogprobColumns::top_n`].
pub const TOP_N_MAX: u32 = 128;

layout! {
    /// Arrays of log-probabilities in one law, for [`DeviceSampler::enqueue`](crate::DeviceSampler::enqueue). A null
    /// array is not written.
    ///
    /// The values are equal to those of [`RowSample`](flash_sampling_core::RowSample), with two exceptions: the last
    /// bit of log Z may differ, because it is computed with the GPU's logarithm, and log-probabilities are rounded to
    /// float32.
    #[derive(Default)]
    pub struct LogprobColumns = 64 {
        /// `ln sum e^l` over the logits of the law, in nats; -inf for a row without a draw.
        pub log_z: DeviceAddress<f64> = 0,
        /// The log-probabilities of the drawn tokens, in nats; -inf for a row without a draw.
        pub log_probs: DeviceAddress<f32> = 8,
        /// The ranks of the drawn tokens, 1 for the most probable token; 0 for a row without a draw.
        pub ranks: DeviceAddress<i32> = 16,
        /// The most probable tokens `[rows, top_n]`, in descending order. If a row has fewer tokens, or no draw, the
        /// remaining elements are -1, or other tokens with
        /// [`TokenColumns::is_complete`](crate::abi::TokenColumns::is_complete).
        pub top_tokens: DeviceAddress<i32> = 24,
        /// The log-probabilities of `top_tokens`, `[rows, top_n]`, in nats; -inf for the remaining elements.
        pub top_log_probs: DeviceAddress<f32> = 32,
        /// The tokens whose log-probabilities are requested, `[rows, token_count]`. The call reads this array.
        pub token_ids: DeviceAddress<i64> = 40,
        /// The log-probabilities of `token_ids`, `[rows, token_count]`, in nats; -inf for a token outside of the
        /// vocabulary or the law, and for a row without a draw.
        pub token_log_probs: DeviceAddress<f32> = 48,
        /// The number of most probable tokens, at most [`TOP_N_MAX`].
        pub top_n: u32 = 56,
        /// The number of tokens per row whose log-probabilities are requested.
        pub token_count: u32 = 60,
    }

    /// The tokens that the filters of rows keep, in CSR form.
    ///
    /// A row without filters, without a draw, or with temperature 0 has an empty list. A drawn row with filters keeps
    /// at least one token.
    #[derive(Default)]
    pub struct KeptColumns = 24 {
        /// `[rows + 1]`: the index of each row's first token, then the number of all tokens. Null: nothing is written.
        pub begin: DeviceAddress<i64> = 0,
        /// `[capacity]`: the tokens of each row, ascending.
        pub tokens: DeviceAddress<i32> = 8,
        /// Tokens from this index on are not written. So the lists are complete if the last element of `begin` is at
        /// most `capacity`.
        pub capacity: u64 = 16,
    }

    /// The argument of the kernel `row_logprobs`; `row_logprobs.cuh` describes the fields.
    pub(crate) struct LogprobCall = 216 {
        pub(crate) filtered: FilterCall = 0,
        pub(crate) invalid: DeviceAddress<u32> = 88,
        pub(crate) weights: DeviceAddress<f64> = 96,
        pub(crate) summaries: DeviceAddress<SummaryResult> = 104,
        pub(crate) top: DeviceAddress<KeptToken> = 112,
        pub(crate) before: DeviceAddress<u32> = 120,
        pub(crate) least: DeviceAddress<u64> = 128,
        pub(crate) kept: DeviceAddress<u32> = 136,
        pub(crate) columns: LogprobColumns = 144,
        pub(crate) first_row: u32 = 208,
        pub(crate) is_complete: u32 = 212,
    }

    /// The argument of the kernel `write_kept`; `row_logprobs.cuh` describes the fields.
    pub(crate) struct KeptCall = 136 {
        pub(crate) filtered: FilterCall = 0,
        pub(crate) least: DeviceAddress<u64> = 88,
        pub(crate) kept: DeviceAddress<u32> = 96,
        pub(crate) columns: KeptColumns = 104,
        pub(crate) first_row: u32 = 128,
        pub(crate) padding: u32 = 132,
    }
}
