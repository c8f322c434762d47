// The optional store of logits (paper App. K).
#pragma once

#include "winners.cuh"

namespace flash_sampling {

struct RowFilters;

// The output for logits: [rows, tokens].
struct LogitStore {
    float* logits;  // null = none
    u64 stride;     // floats between rows
    u16* block_maxima;      // for the variant that stores BlockMaxima; has room for whole octets of rows
    u32 is_raw;     // 1 = the portable kernels store raw logits, as the Hopper kernels always do; 0 = transformed logits
    u32 padding;
    // [row_count] The Hopper kernels store only octets of rows in which a row has a filter. Null: all rows.
    const RowFilters* filters;
};
FS_LAYOUT(LogitStore, 40,
          FS_AT(logits, 0) && FS_AT(stride, 8) && FS_AT(block_maxima, 16) && FS_AT(is_raw, 24) && FS_AT(padding, 28) &&
          FS_AT(filters, 32));

// Stores row `column + c` of a tile by one warp.
__device__ __forceinline__ void store_row(const Call& call, const LogitStore& stored, const DotTile& tile, u32 c) {
    const u32 column = tile.column + c;
    const float* const dots = tile.dots + c * tile.stride;
    const Row& row = call.rows[column];
    float* const to = stored.logits + column * stored.stride + tile.first;
#pragma unroll 1
    for (u32 t = threadIdx.x % 32; t < tile.tokens; t += 32) {
        float dot = dots[t];
        if (call.bias) dot = add_rn(dot, call.bias[tile.first + t]);
        const u32 token = call.first_token + tile.first + t;
        const float raw = call.head.apply(dot, 0.0f, false);
        const float logit = checked_logit(raw, row, token, &call.invalid[column]);
        to[t] = stored.is_raw ? raw : logit;
    }
}

}  // namespace flash_sampling
