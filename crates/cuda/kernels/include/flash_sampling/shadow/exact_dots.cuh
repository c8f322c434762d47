// The dot products of a few tokens with one hidden state, with the bits of the full kernel: one accumulator of the tensor cores over
// hidden in ascending order. `mma.sync` has the bits of `wgmma`, and a chain of its products takes less time.
#pragma once

#include "../mainloop/memory.cuh"
#include "../ptx/cp_async.cuh"
#include "../ptx/mma.cuh"
#include "../ptx/operand.cuh"
#include "pass.cuh"

namespace flash_sampling {

// Each warp computes the dot products of its own tokens, and shares nothing with other warps.
struct ExactDots {
    static constexpr u32 WARPS = 4, THREADS = 32 * WARPS;
    static constexpr u32 TOKENS = 16;                // of a warp at a time: the rows of a product
    static constexpr u32 PART_BYTES = 512;           // of a row in a stage
    static constexpr u32 STRIDE = PART_BYTES + 16;   // the rows of a stage begin at different banks
    static constexpr u32 STAGES = IS_ROOMY ? 6 : 2;  // each with the rows of the tokens, then the hidden state
    static constexpr u32 STAGE_BYTES = (TOKENS + 1) * STRIDE, WARP_BYTES = STAGES * STAGE_BYTES;
    static constexpr u32 SHARED_BYTES = WARPS * WARP_BYTES;
    static constexpr u32 STEP_BYTES = 64;  // two products

    // Returns the dot product of a lane's token, in the first `count` lanes of a warp, from 1 to TOKENS. `token` is its row of the
    // weight. `memory` has SHARED_BYTES bytes. Calls `meanwhile` while the first loads are in flight.
    template <ptx::Operand OPERAND, class Meanwhile>
    static __device__ __forceinline__ float compute(const Candidates& call, u32 row, u32 token, u32 count, u8* memory,
                                                    const Meanwhile& meanwhile) {
        const u32 lane = threadIdx.x % 32, ring = ptx::shared_address(memory) + threadIdx.x / 32 * WARP_BYTES;
        const u32 row_bytes = call.width * 2, steps = (row_bytes + PART_BYTES - 1) / PART_BYTES;
        const u64 once = ptx::policy_evict_unchanged(), keep = ptx::policy_evict_last();
        // Four lanes copy 64 bytes of a token's row at a time, and the whole warp copies the hidden state.
        const u32 of_row = lane % 4 * 16;
        const u8 *rows[2], *const hidden = call.hidden + row * call.hidden_stride + lane * 16;
#pragma unroll
        for (u32 half = 0; half < 2; ++half)
            rows[half] = call.weight + __shfl_sync(0xffffffffu, token, lane / 4 + 8 * half) * call.weight_stride + of_row;
        // The bytes of a copy from `at` on; the rest of 16 is zeros.
        const auto left = [&](u32 at) { return at < row_bytes ? min(row_bytes - at, 16u) : 0; };
        const auto load = [&](u32 step) {
            const u32 stage = ring + step % STAGES * STAGE_BYTES, first = step * PART_BYTES;
            if (step < steps) {
#pragma unroll
                for (u32 at = 0; at < PART_BYTES; at += 64) {
                    const u32 bytes = left(first + at + of_row);
#pragma unroll
                    for (u32 half = 0; half < 2; ++half)
                        ptx::copy_async(stage + (lane / 4 + 8 * half) * STRIDE + of_row + at, rows[half] + (first + at), bytes,
                                        lane / 4 + 8 * half < count, once);
                }
                ptx::copy_async(stage + TOKENS * STRIDE + lane * 16, hidden + first, left(first + lane * 16), true, keep);
            }
            ptx::copy_async_commit();
        };
        for (u32 step = 0; step < STAGES - 1; ++step) load(step);
        meanwhile();
        float d[4] = {0.0f, 0.0f, 0.0f, 0.0f};
#pragma unroll 1
        for (u32 step = 0; step < steps; ++step) {
            ptx::copy_async_wait<STAGES - 2>();
            __syncwarp();
            load(step + STAGES - 1);
            const u32 stage = ring + step % STAGES * STAGE_BYTES;
            const u32 of_tokens = stage + lane % TOKENS * STRIDE + lane / TOKENS * 16;
            const u32 of_hidden = stage + TOKENS * STRIDE + lane / 8 * 16;
            // The factors of two products. All columns of a product are the hidden state.
            u32 a[2][2][4], b[2][4];
            const auto fetch = [&](u32 at) {
                const u32 buffer = at / STEP_BYTES % 2;
                ptx::load_matrices(b[buffer], of_hidden + at);
                ptx::load_matrices(a[buffer][0], of_tokens + at);
                ptx::load_matrices(a[buffer][1], of_tokens + at + STEP_BYTES / 2);
            };
            fetch(0);
#pragma unroll
            for (u32 at = 0; at < PART_BYTES; at += STEP_BYTES) {
                const u32 buffer = at / STEP_BYTES % 2;
                if (at + STEP_BYTES < PART_BYTES) fetch(at + STEP_BYTES);
                ptx::multiply<OPERAND>(d, a[buffer][0], b[buffer][0], b[buffer][1]);
                ptx::multiply<OPERAND>(d, a[buffer][1], b[buffer][2], b[buffer][3]);
            }
        }
        ptx::copy_async_wait<0>();
        __syncwarp();
        const float low = __shfl_sync(0xffffffffu, d[0], lane % 8 * 4), high = __shfl_sync(0xffffffffu, d[2], lane % 8 * 4);
        return lane < 8 ? low : high;
    }
};

}  // namespace flash_sampling
