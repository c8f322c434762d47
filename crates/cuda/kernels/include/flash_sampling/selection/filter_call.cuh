// The argument of filter_row.cu, top_p.cu and top_p_ranks.cu. Each kernel handles the draws whose filters it supports.
#pragma once

#include "block_maxima.cuh"
#include "row_filters.cuh"
#include "../scan/scan.cuh"

namespace flash_sampling {

struct FilterCall {
    const float* logits;        // [rows, tokens] raw
    u64 row_stride;             // elements
    const u32* sources;         // [draws] the row of each draw; null = draw i takes row i
    const Row* rows;            // [draws]
    const RowFilters* filters;  // [draws]; all off: the draw does not change
    Draw* draws;                // [draws] in: without filters; out: with filters
    u32 first_token;
    u32 tokens;
    u32 is_transformed;         // 1 = the logits are transformed, not raw
    u32 count;                  // number of draws
    const u16* block_maxima;    // the BlockMaxima of the draws; null = none
    SkipIf skip_if;

#ifdef __CUDACC__
    __device__ __forceinline__ ExistingRow row(u32 i) const {
        const u32 source = sources ? sources[i] : i;
        return {logits + source * row_stride, first_token, tokens};
    }

    // Returns the largest logits of the granules of draw i, or null. Every `BlockMaxima::ROWS`-th element belongs to draw i.
    __device__ __forceinline__ const u16* maxima(u32 i) const {
        if (!block_maxima) return nullptr;
        return block_maxima + BlockMaxima::octet(i / BlockMaxima::ROWS, BlockMaxima::granules_of(tokens)) + i % BlockMaxima::ROWS;
    }

    // Copies the row of draw i to `row` in shared memory, without transforms if the logits are transformed. All threads call this.
    __device__ __forceinline__ void begin(u32 i, Row& row) const {
        copy_row(&row, rows + i);
        __syncthreads();
        if (is_transformed && threadIdx.x == 0) {
            row.mask = nullptr;
            row.biases = 0;
            row.inv_temperature = 1.0f;
        }
        __syncthreads();
    }
#endif
};
FS_LAYOUT(FilterCall, 88,
          FS_AT(logits, 0) && FS_AT(row_stride, 8) && FS_AT(sources, 16) && FS_AT(rows, 24) && FS_AT(filters, 32) &&
          FS_AT(draws, 40) && FS_AT(first_token, 48) && FS_AT(tokens, 52) && FS_AT(is_transformed, 56) && FS_AT(count, 60) &&
          FS_AT(block_maxima, 64) && FS_AT(skip_if, 72));

#ifdef __CUDACC__

// Keeps the best of the tokens before a place, for scan(): tokens with a logit above `limit`, or equal to `limit` and a number below
// `token_limit`. Scores of other tokens do not raise the cutoff.
struct KeepBefore {
    static constexpr bool RAISES = false;
    u32* shared_cut;
    float limit;
    u32 token_limit;
    u64 best;

    __device__ __forceinline__ float cut() const { return from_monotone_bits(*static_cast<volatile u32*>(shared_cut)); }
    __device__ __forceinline__ void offer(float score, u32 token, float logit) {
        if (!(logit > limit || (logit == limit && token < token_limit))) return;
        const u64 key = to_ordered_bits(Winner::of(score, token));
        if (key <= best) return;
        best = key;
        atomicMax(shared_cut, static_cast<u32>(key >> 32));
    }
};

#endif

}  // namespace flash_sampling
