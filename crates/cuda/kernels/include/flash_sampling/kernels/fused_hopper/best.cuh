// The best candidate of each row within a block, in shared memory.
#pragma once

#include "../../perturb.cuh"
#include "../../ptx/atomic.cuh"
#include "../../ptx/mbarrier.cuh"

namespace flash_sampling::fused_hopper {

struct alignas(16) Best {
    u64 key;  // ordered bits of the winner; 0 = none
    float logit;
    u32 zero;
};

// Takes the candidate where it is better. A key never stands beside another's logit: the exchange is one access. The first
// exchange only reads, in all rows that have a best.
__device__ __forceinline__ void improve(Best* best, u64 key, float logit) {
    u64 old_key = 0, old_logit = 0;
    while (key > old_key) {
        const u64 expected = old_key;
        ptx::exchange_if(best, old_key, old_logit, key, f32_to_bits(logit));
        if (old_key == expected) return;
    }
}

}  // namespace flash_sampling::fused_hopper
