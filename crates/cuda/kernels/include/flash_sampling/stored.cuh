// Transformed logits that were stored, and what is asked of them: the types of top_list.cu, near_ties.cu, canonical.cu
// and mass_histogram.cu. crates/cuda/src/abi.rs holds the same ones; both assert the sizes.
#pragma once

#include "abi.cuh"
#include "winner.cuh"

namespace flash_sampling {

// Transformed logits, float32; -inf where a token is forbidden.
struct StoredLogits {
    const float* logits;  // [rows, tokens]
    u64 row_stride;       // elements
    u32 first_token;
    u32 tokens;

    FS_FUNCTION const float* row(u32 r) const { return logits + r * row_stride; }
};
static_assert(sizeof(StoredLogits) == 24, "the host writes this layout");

// Something asked of a stored row: the `limit` best by score under the noise of a Row (greedy: by logit), and all within
// `slack` of the last of those.
struct Item {
    u32 source;  // row of the stored logits
    u32 limit;
    float slack;  // 0 = none, infinite = every token
    u32 padding;
};
static_assert(sizeof(Item) == 16, "the host writes this layout");

// A token that an item keeps; in no order.
struct Entry {
    u64 key;  // ordered bits of score and token
    float logit;
    u32 item;
};
static_assert(sizeof(Entry) == 16, "the host reads this layout");

// What items keep.
struct Entries {
    Entry* entries;  // [capacity]
    u64* count;      // how many there are; more than `capacity` = the rest was dropped
    u64 capacity;

#ifdef __CUDACC__
    // Any set of lanes may call it.
    __device__ __forceinline__ void push(const Entry& entry) const {
        const u32 active = __activemask();
        const u32 lane = threadIdx.x % 32, leader = __ffs(static_cast<int>(active)) - 1;
        u64 at = 0;
        if (lane == leader) at = atomicAdd(count, static_cast<u64>(__popc(active)));
        at = __shfl_sync(active, at, leader) + __popc(active & ((1u << lane) - 1));
        if (at < capacity) entries[at] = entry;
    }
#endif
};
static_assert(sizeof(Entries) == 24, "the host writes this layout");

}  // namespace flash_sampling
