// The types that the host passes to all kernels. The host's module abi has the twins of these types, and of the types of single
// kernels. Both sides declare the layouts, and a test of the host compares the declarations.
#pragma once

#include "head.cuh"
#include "transform.cuh"

namespace flash_sampling {

// The parameters of a row.
struct Row {
    u64 seed;
    u64 position;
    const u32* mask;        // null = every token is allowed
    const LogitBias* bias;  // tokens strictly ascending; penalties may follow
    u32 mask_words;
    u32 biases;             // the number of biases, plus PENALISED if penalties follow
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
// Copies a row, word by word, with the first threads of a block. A barrier must follow.
__device__ __forceinline__ void copy_row(Row* to, const Row* from) {
    const u32 i = threadIdx.x;
    if (i < sizeof(Row) / 4) reinterpret_cast<u32*>(to)[i] = reinterpret_cast<const u32*>(from)[i];
}
#endif

// The result of a row. With LateRank and OtherCall, which exchanges between ranks return, `token` is the rank.
enum class Status : u32 {
    Drawn = 0,
    NoFiniteLogit = 1,
    NaN = 2,
    PositiveInfinity = 3,
    LateRank = 4,
    OtherCall = 5,
    Undecided = 6,  // the host applies the row's filters
    Parameters = 7,  // of a call with parameters in device memory
};

// The draw of a row. For an invalid row, `token` is the invalid token, and `score` is 1 if its raw logit was valid and a
// transform made it invalid, else 0.
struct Draw {
    u32 token;
    float score;
    float logit;
    Status status;
};
FS_LAYOUT(Draw, 16, FS_AT(token, 0) && FS_AT(score, 4) && FS_AT(logit, 8) && FS_AT(status, 12));

// A word in device memory that decides whether a launch ends at once: if it has this value. Null: never.
struct SkipIf {
    const u32* word;
    u32 value;
    u32 zero;

    FS_FUNCTION bool holds() const { return word && *word == value; }
};
FS_LAYOUT(SkipIf, 16, FS_AT(word, 0) && FS_AT(value, 8) && FS_AT(zero, 12));

// The head and the batch of one launch.
struct Call {
    const Row* rows;        // [row_count]
    const float* bias;      // [tokens], or null
    u64* best;              // [row_count] ordered bits of the best winner so far; 0 between launches
    u64* invalid;           // [row_count] first invalid logit; all ones between launches
    float* logits;          // [blocks, row_count] the logit of each block's winner
    u32* arrived;           // finished blocks; 0 between launches
    Draw* draws;            // [row_count]
    HeadTransform head;
    u32 row_count;
    u32 hidden;
    u32 first_token;        // global id of the weight's first row
    u32 tokens;             // rows of the weight that can be drawn
    SkipIf skip_if;         // the fused kernels read it
};
FS_LAYOUT(Call, 96,
          FS_AT(rows, 0) && FS_AT(bias, 8) && FS_AT(best, 16) && FS_AT(invalid, 24) && FS_AT(logits, 32) &&
          FS_AT(arrived, 40) && FS_AT(draws, 48) && FS_AT(head, 56) && FS_AT(row_count, 64) && FS_AT(hidden, 68) &&
          FS_AT(first_token, 72) && FS_AT(tokens, 76) && FS_AT(skip_if, 80));

}  // namespace flash_sampling
