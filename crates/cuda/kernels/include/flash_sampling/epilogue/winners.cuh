// The best candidate of each row within a block, and the end of a launch: the last block writes all draws, and clears the
// scratch.
#pragma once

#include "../mainloop/dot_tile.cuh"
#include "../perturb.cuh"

namespace flash_sampling {

template <int COLUMNS>
struct Winners {
    Candidate best[COLUMNS];
    u32 is_last;

    __device__ __forceinline__ void begin() {
        for (u32 column = threadIdx.x; column < COLUMNS; column += EPILOGUE_THREADS) best[column] = Candidate::none();
    }

    // Returns the ordered bits of a row's best candidate; 0 = none.
    __device__ __forceinline__ u64 key(u32 column) const {
        const Winner winner = best[column].winner;
        return winner.is_none() ? 0 : to_ordered_bits(winner);
    }

    // Merges the block's candidates, and writes the draws in the last block. All threads of the block call this after a barrier.
    __device__ __forceinline__ void conclude_rows(const Call& call, const Run& run, u32 granule) {
        for (u32 column = threadIdx.x; column < call.row_count; column += EPILOGUE_THREADS) {
            if (key(column)) atomicMax(&call.best[column], key(column));
            call.logits[static_cast<u64>(run.block) * call.row_count + column] = best[column].logit;
        }
        __threadfence();
        __syncthreads();
        if (threadIdx.x == 0) is_last = atomicAdd(call.arrived, 1u) == run.blocks - 1;
        __syncthreads();
        if (!is_last) return;
        __threadfence();
        for (u32 column = threadIdx.x; column < call.row_count; column += EPILOGUE_THREADS) {
            const u64 winner = __ldcg(&call.best[column]), invalid = __ldcg(&call.invalid[column]);
            float logit = 0.0f;
            if (winner) {
                const u32 token = from_ordered_bits(winner).token - call.first_token;
                const u32 owner = Run::owner(run.blocks, call.tokens, granule, token);
                logit = __ldcg(&call.logits[static_cast<u64>(owner) * call.row_count + column]);
            }
            call.draws[column] = conclude(winner, invalid, logit);
            call.best[column] = 0;
            call.invalid[column] = ~0ull;
        }
        if (threadIdx.x == 0) *call.arrived = 0;
    }
};

}  // namespace flash_sampling
