// The types that cross from the host to all kernels. The host's module abi holds the same ones, and those of single
// kernels, which stand beside them here. Both state their layouts; a test of the host's compares what they state.
#pragma once

#include "head.cuh"
#include "transform.cuh"

namespace flash_sampling {

// All that differs from row to row.
struct Row {
    u64 seed;
    u64 position;
    const u32* mask;        // null = every token is allowed
    const LogitBias* bias;  // tokens strictly ascending; penalties may follow
    u32 mask_words;
    u32 biases;             // with PENALISED
    float inv_temperature;
    float largest_bias;  // the largest of the biases and 0
    u32 draw;
    u32 greedy;

    FS_FUNCTION RowTransform transform() const { return {mask, mask_words, biases, bias, inv_temperature}; }
    FS_FUNCTION float apply(float raw, u32 token) const { return transform().apply(raw, token); }
};
FS_LAYOUT(Row, 56,
          FS_AT(seed, 0) && FS_AT(position, 8) && FS_AT(mask, 16) && FS_AT(bias, 24) && FS_AT(mask_words, 32) &&
          FS_AT(biases, 36) && FS_AT(inv_temperature, 40) && FS_AT(largest_bias, 44) && FS_AT(draw, 48) &&
          FS_AT(greedy, 52));

#ifdef __CUDACC__
// The first threads of a block copy a row, word by word; a barrier must follow.
__device__ __forceinline__ void copy_row(Row* to, const Row* from) {
    const u32 i = threadIdx.x;
    if (i < sizeof(Row) / 4) reinterpret_cast<u32*>(to)[i] = reinterpret_cast<const u32*>(from)[i];
}
#endif

// For LateRank and OtherCall, which exchanges between ranks report, `token` is the rank.
enum class Status : u32 {
    Drawn = 0,
    NoFiniteLogit = 1,
    NaN = 2,
    PositiveInfinity = 3,
    LateRank = 4,
    OtherCall = 5,
    Undecided = 6,  // the host applies the row's filters
};

// The result of a row; for an invalid row `token` is the offending one, and `score` is 1 where its raw logit was valid and a
// transform made it what it is, else 0.
struct Draw {
    u32 token;
    float score;
    float logit;
    Status status;
};
FS_LAYOUT(Draw, 16, FS_AT(token, 0) && FS_AT(score, 4) && FS_AT(logit, 8) && FS_AT(status, 12));

// The head and the batch of one launch.
struct Call {
    const Row* rows;        // [row_count]
    const float* bias;      // [tokens], or null
    u64* best;              // [row_count] ordered bits of the best winner so far; 0 between launches
    u64* invalid;           // [row_count] first invalid logit; all ones between launches
    float* logits;          // [blocks, row_count] the logit of each block's own winner
    u32* arrived;           // blocks that are done; 0 between launches
    Draw* draws;            // [row_count]
    HeadTransform head;
    u32 row_count;
    u32 hidden;
    u32 first_token;        // global id of the weight's first row
    u32 tokens;             // rows of the weight that can be drawn
};
FS_LAYOUT(Call, 80,
          FS_AT(rows, 0) && FS_AT(bias, 8) && FS_AT(best, 16) && FS_AT(invalid, 24) && FS_AT(logits, 32) &&
          FS_AT(arrived, 40) && FS_AT(draws, 48) && FS_AT(head, 56) && FS_AT(row_count, 64) && FS_AT(hidden, 68) &&
          FS_AT(first_token, 72) && FS_AT(tokens, 76));

}  // namespace flash_sampling
