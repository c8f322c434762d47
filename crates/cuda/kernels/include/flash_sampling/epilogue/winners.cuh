// The best candidate of each row within a block, and the end of a launch: the last block to arrive concludes all rows and
// leaves the scratch as it found it.
#pragma once

#include "../dot_tile.cuh"
#include "../perturb.cuh"

namespace flash_sampling {

template <int COLUMNS>
struct Winners {
    u64 keys[COLUMNS];  // ordered bits; 0 = none
    float logits[COLUMNS];
    u32 is_last;

    __device__ __forceinline__ void begin() {
        for (u32 column = threadIdx.x; column < COLUMNS; column += EPILOGUE_THREADS) keys[column] = 0;
    }

    // The warp of the row offers a candidate a lane; 0 = none. No two lanes offer the same token.
    __device__ __forceinline__ void offer(u32 column, u64 key, float logit) {
        const bool is_better = key > keys[column];
        if (!__any_sync(0xffffffffu, is_better)) return;
        const u32 high = static_cast<u32>(key >> 32);
        const u32 highest = __reduce_max_sync(0xffffffffu, high);
        const u32 low = high == highest ? static_cast<u32>(key) : 0;
        const u32 lowest_token = __reduce_max_sync(0xffffffffu, low);
        __syncwarp();
        // The lane with the largest key is among the better ones.
        if (is_better && high == highest && low == lowest_token) {
            keys[column] = key;
            logits[column] = logit;
        }
        __syncwarp();
    }

    // All threads of the block, after a barrier.
    __device__ __forceinline__ void conclude_rows(const Call& call, const Run& run, u32 granule) {
        for (u32 column = threadIdx.x; column < call.row_count; column += EPILOGUE_THREADS) {
            if (keys[column]) atomicMax(&call.best[column], keys[column]);
            call.logits[static_cast<u64>(run.block) * call.row_count + column] = keys[column] ? logits[column] : 0.0f;
        }
        __threadfence();
        __syncthreads();
        if (threadIdx.x == 0) is_last = atomicAdd(call.arrived, 1u) == run.blocks - 1;
        __syncthreads();
        if (!is_last) return;
        __threadfence();
        for (u32 column = threadIdx.x; column < call.row_count; column += EPILOGUE_THREADS) {
            const u64 best = __ldcg(&call.best[column]), invalid = __ldcg(&call.invalid[column]);
            float logit = 0.0f;
            if (best) {
                const u32 token = from_ordered_bits(best).token - call.first_token;
                const u32 owner = Run::owner(run.blocks, call.tokens, granule, token);
                logit = __ldcg(&call.logits[static_cast<u64>(owner) * call.row_count + column]);
            }
            call.draws[column] = conclude(best, invalid, logit);
            call.best[column] = 0;
            call.invalid[column] = ~0ull;
        }
        if (threadIdx.x == 0) *call.arrived = 0;
    }
};

}  // namespace flash_sampling
