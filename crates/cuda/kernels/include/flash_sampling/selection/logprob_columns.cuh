// Log-probabilities and kept tokens of rows in device memory: one array per result. A null array is not written.
#pragma once

#include "../platform.cuh"

namespace flash_sampling {

// The results of rows in one law. A row without a draw has rank 0, token -1, and -inf elsewhere.
struct LogprobColumns {
    double* log_z;
    float* log_probs;            // of the drawn token
    i32* ranks;                  // of the drawn token; the most probable token has rank 1
    i32* top_tokens;             // [rows, top_n] the most probable tokens, in descending order; then -1
    float* top_log_probs;        // [rows, top_n]
    const long long* token_ids;  // [rows, token_count] tokens with requested log-probabilities
    float* token_log_probs;      // [rows, token_count]
    u32 top_n;                   // at most TOP_N_MAX
    u32 token_count;

    static constexpr u32 TOP_N_MAX = 128;
};
FS_LAYOUT(LogprobColumns, 64,
          FS_AT(log_z, 0) && FS_AT(log_probs, 8) && FS_AT(ranks, 16) && FS_AT(top_tokens, 24) && FS_AT(top_log_probs, 32) &&
          FS_AT(token_ids, 40) && FS_AT(token_log_probs, 48) && FS_AT(top_n, 56) && FS_AT(token_count, 60));

// The tokens that filters keep, ascending: row r has tokens[begin[r]] to tokens[begin[r + 1] - 1].
struct KeptColumns {
    long long* begin;  // [rows + 1]
    i32* tokens;       // [capacity] tokens beyond it are not written
    u64 capacity;
};
FS_LAYOUT(KeptColumns, 24, FS_AT(begin, 0) && FS_AT(tokens, 8) && FS_AT(capacity, 16));

}  // namespace flash_sampling
