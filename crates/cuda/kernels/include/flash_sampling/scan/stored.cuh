// Stored, transformed logits, and requests about them: the types of top_list.cu, near_ties.cu, canonical.cu, row_summary.cu and
// stored_scan.cu. The host's module abi declares the same types.
#pragma once

#include "../abi.cuh"
#include "../summary/winner.cuh"

namespace flash_sampling {

// Transformed logits in float32; -inf for a forbidden token.
struct StoredLogits {
    const float* logits;  // [rows, tokens]
    u64 row_stride;       // elements
    u32 first_token;
    u32 tokens;

    FS_FUNCTION const float* row(u32 r) const { return logits + r * row_stride; }
};
FS_LAYOUT(StoredLogits, 24, FS_AT(logits, 0) && FS_AT(row_stride, 8) && FS_AT(first_token, 16) && FS_AT(tokens, 20));

// A request about a stored row: the `limit` best tokens by score with the noise of a Row (by logit if greedy), and all tokens
// within `slack` of the last of these.
struct Item {
    u32 source;  // row of the stored logits
    u32 limit;
    float slack;  // 0 = none, infinite = every token
    u32 padding;
};
FS_LAYOUT(Item, 16, FS_AT(source, 0) && FS_AT(limit, 4) && FS_AT(slack, 8) && FS_AT(padding, 12));

// A token that an item keeps. The order is unspecified.
struct KeptToken {
    u64 key;  // ordered bits of score and token
    float logit;
    u32 item;
};
FS_LAYOUT(KeptToken, 16, FS_AT(key, 0) && FS_AT(logit, 8) && FS_AT(item, 12));

// A request about a row, for row_summary.cu.
struct SummaryRequest {
    u32 limit;   // largest logits
    u32 stores;  // whether transformed logits are stored
    u32 masses;  // whether the masses are written besides their sum
    u32 token;   // the number of the drawn token among the row's, to count the tokens before it
    float logit; // of the drawn token; inf = nothing is drawn
};
FS_LAYOUT(SummaryRequest, 20,
          FS_AT(limit, 0) && FS_AT(stores, 4) && FS_AT(masses, 8) && FS_AT(token, 12) && FS_AT(logit, 16));

// The summary of a row by row_summary.cu: its mass is `sum * e^max`.
struct SummaryResult {
    u64 invalid;  // the first invalid logit; all ones before the launch, and if there is none
    double sum;
    float max;   // edge of the bin of the largest logit; -inf = no finite logit
    u32 listed;  // the number of largest logits, at most `limit`; or LOST

    static constexpr u32 LOST = ~0u;  // too many tokens may belong to the list
};
FS_LAYOUT(SummaryResult, 24, FS_AT(invalid, 0) && FS_AT(sum, 8) && FS_AT(max, 16) && FS_AT(listed, 20));

// The kept tokens of all items.
struct KeptTokens {
    KeptToken* tokens;  // [capacity]
    u64* count;         // if it exceeds `capacity`, the others were dropped
    u64 capacity;

#ifdef __CUDACC__
    // Appends a token. Any set of lanes may call this.
    __device__ __forceinline__ void push(const KeptToken& token) const {
        const u32 active = __activemask();
        const u32 lane = threadIdx.x % 32, leader = __ffs(static_cast<int>(active)) - 1;
        u64 at = 0;
        if (lane == leader) at = atomicAdd(count, static_cast<u64>(__popc(active)));
        at = __shfl_sync(active, at, leader) + __popc(active & ((1u << lane) - 1));
        if (at < capacity) tokens[at] = token;
    }
#endif
};
FS_LAYOUT(KeptTokens, 24, FS_AT(tokens, 0) && FS_AT(count, 8) && FS_AT(capacity, 16));

}  // namespace flash_sampling
