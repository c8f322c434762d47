// The dot products of the weight rows of a few tokens with one hidden state, with the bits of the full kernel. One accumulator of
// the tensor cores adds the products in ascending order of the columns. `mma.sync` gives the same bits as `wgmma`, and a chain of
// `mma.sync` takes less time.
#pragma once

#include "../mainloop/memory.cuh"
#include "../ptx/cp_async.cuh"
#include "../ptx/mma.cuh"
#include "../ptx/operand.cuh"
#include "../ptx/tma.cuh"
#include "pass.cuh"

namespace flash_sampling {

#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
constexpr bool HAS_BULK_COPIES = true;
#else
constexpr bool HAS_BULK_COPIES = false;
#endif

// The dot products that one warp computes. Warps share no data. BULK: the bulk copy engine copies the rows.
template <bool BULK>
struct ExactDots {
    static constexpr u32 WARPS = 4, THREADS = 32 * WARPS;
    static constexpr u32 TOKENS = 16;                        // of a warp at a time: the rows of a matrix product
    static constexpr u32 LEAST_PART = IS_ROOMY ? 1024 : 512; // bytes of a row in a stage, if the warp has TOKENS tokens
    static constexpr u32 PADDING = 16;                       // bytes after each row: the rows of a stage begin at different banks
    static constexpr u32 STAGES = IS_ROOMY ? 3 : 2;          // each has parts of the tokens' rows and of the hidden state
    static constexpr u32 STAGE_BYTES = (TOKENS + 1) * (LEAST_PART + PADDING), WARP_BYTES = STAGES * STAGE_BYTES;
    static constexpr u32 SHARED_BYTES = WARPS * WARP_BYTES;
    static constexpr u32 STEP_BYTES = 64;   // bytes of a row in two matrix products
    static constexpr u32 TURN_BYTES = 512;  // bytes of a row in one turn of the outer loop; the inner loop is unrolled

    // Returns the number of bytes of a row in a stage, if the warp has `count` tokens. Fewer tokens have longer parts, so that
    // enough bytes are in flight.
    static FS_FUNCTION constexpr u32 part_of(u32 count) {
        return LEAST_PART * (count < 2 ? 8 : count < 4 ? 4 : count < 8 ? 2 : 1);
    }
    static FS_FUNCTION constexpr bool fits(u32 count) { return (count + 1) * (part_of(count) + PADDING) <= STAGE_BYTES; }
    static_assert(fits(1) && fits(3) && fits(7) && fits(TOKENS) && LEAST_PART % TURN_BYTES == 0, "the longest parts fit a stage");

    const Candidates& call;
    u64* const full;  // [STAGES] barriers of the warp's bulk copies
    const u32 ring;   // in shared memory: WARP_BYTES bytes
    const u32 lane = threadIdx.x % 32;
    const u64 once = ptx::policy_evict_unchanged(), keep = ptx::policy_evict_last();
    const u32 row_bytes = call.width * 2;
    u32 part = 0, steps = 0;  // bytes of a row in a stage, and number of parts of a row
    u32 used = 0;             // number of steps in earlier calls of compute

    // `memory` has SHARED_BYTES bytes. `barriers` has one barrier for each stage of each warp.
    __device__ __forceinline__ ExactDots(const Candidates& call, u8* memory, u64 (&barriers)[WARPS][STAGES])
        : call(call),
          full(barriers[threadIdx.x / 32]),
          ring(ptx::shared_address(memory) + threadIdx.x / 32 * WARP_BYTES) {
        if constexpr (BULK) {
            if (lane < STAGES) ptx::mbarrier_init(&full[lane], 1);
            ptx::mbarrier_init_fence();
            __syncwarp();
        }
    }

    __device__ __forceinline__ bool is_whole(u32 step) const { return (step + 1) * part <= row_bytes; }

    // Returns the number of bytes of each row in a step, a multiple of TURN_BYTES. Zeros follow the end of a row.
    __device__ __forceinline__ u32 size_of(u32 step) const {
        return min(part, (row_bytes - step * part + TURN_BYTES - 1) / TURN_BYTES * TURN_BYTES);
    }

    // Returns how many bytes of a copy of 16 bytes, which begins at byte `at`, are in the row. The other bytes are zeros.
    __device__ __forceinline__ u32 left(u32 at) const { return at < row_bytes ? min(row_bytes - at, 16u) : 0; }

    __device__ __forceinline__ u32 stage_of(u32 step) const { return ring + (used + step) % STAGES * STAGE_BYTES; }

    // Begins to load a part of every row, with zeros beyond the end of a row. `mine` is the row of the lane's token. In a stage,
    // the hidden state follows the rows of the tokens.
    __device__ __forceinline__ void load(u32 step, const u8* mine, const u8* hidden, u32 count) const {
        const u32 stage = stage_of(step), stride = part + PADDING, first = step * part;
        if constexpr (BULK) {
            u64* const barrier = &full[(used + step) % STAGES];
            if (step < steps && is_whole(step)) {
                if (lane == 0) ptx::mbarrier_arrive_expect(barrier, (count + 1) * part);
                if (lane <= count)
                    ptx::copy_bytes(stage + lane * stride, (lane < count ? mine : hidden) + first, part, barrier,
                                    lane < count ? once : keep);
                return;
            }
            if (step < steps && lane == 0) ptx::mbarrier_arrive(barrier);
        }
        if (step < steps) {
            const u32 end = size_of(step);
            // Four lanes copy 64 bytes of a token's row at a time, and the whole warp copies the hidden state.
            const u32 of_row = lane % 4 * 16;
            for (u32 half = 0; half < count; half += TOKENS / 2) {
                const u32 slot = lane / 4 + half;
                const u8* const row = reinterpret_cast<const u8*>(__shfl_sync(0xffffffffu, reinterpret_cast<u64>(mine), slot));
#pragma unroll 8
                for (u32 at = of_row; at < end + of_row; at += 64)
                    ptx::copy_async(stage + slot * stride + at, row + (first + at), left(first + at), slot < count, once);
            }
            for (u32 at = lane * 16; at < end + lane * 16; at += 512)
                ptx::copy_async(stage + count * stride + at, hidden + (first + at), left(first + at), true, keep);
        }
        ptx::copy_async_commit();
    }

    // Waits until the loads of a step are complete.
    __device__ __forceinline__ void wait(u32 step) const {
        if constexpr (BULK) {
            ptx::mbarrier_wait(&full[(used + step) % STAGES], (used + step) / STAGES % 2);
            if (!is_whole(step)) {
                ptx::copy_async_wait<0>();
                // The copy engine may write to this stage later.
                ptx::shared_writes_fence();
            }
        } else {
            ptx::copy_async_wait<STAGES - 2>();
        }
        __syncwarp();
    }

    // Returns the dot product of the lane's token. The first `count` lanes have a token (`count` is 1 to TOKENS). `token` is the
    // index of the token's row in the weight. Calls `meanwhile` while the first loads are in flight.
    template <ptx::Operand OPERAND, class Meanwhile>
    __device__ __forceinline__ float compute(u32 row, u32 token, u32 count, const Meanwhile& meanwhile) {
        const u8* const mine = call.weight + token * call.weight_stride;
        const u8* const hidden = call.hidden + row * call.hidden_stride;
        part = part_of(count);
        // The bulk copy engine copies whole parts only.
        while (part > LEAST_PART && row_bytes % part) part /= 2;
        steps = (row_bytes + part - 1) / part;
        const u32 stride = part + PADDING;
        for (u32 step = 0; step < STAGES - 1; ++step) load(step, mine, hidden, count);
        meanwhile();
        float d[4] = {0.0f, 0.0f, 0.0f, 0.0f};
#pragma unroll 1
        for (u32 step = 0; step < steps; ++step) {
            wait(step);
            load(step + STAGES - 1, mine, hidden, count);
            // The rows of the matrix product that have no token read the hidden state instead.
            const u32 of_tokens = stage_of(step) + min(lane % TOKENS, count) * stride + lane / TOKENS * 16;
            const u32 of_hidden = stage_of(step) + count * stride + lane / 8 * 16, end = size_of(step);
            // The operands of two matrix products. All columns of `b` are the hidden state.
            u32 a[2][2][4], b[2][4];
            const auto fetch = [&](u32 buffer, u32 at) {
                ptx::load_matrices(b[buffer], of_hidden + at);
                ptx::load_matrices(a[buffer][0], of_tokens + at);
                ptx::load_matrices(a[buffer][1], of_tokens + at + STEP_BYTES / 2);
            };
            fetch(0, 0);
#pragma unroll 1
            for (u32 turn = 0; turn < end; turn += TURN_BYTES) {
#pragma unroll
                for (u32 at = 0; at < TURN_BYTES; at += STEP_BYTES) {
                    const u32 buffer = at / STEP_BYTES % 2;
                    const u32 next = turn + at + STEP_BYTES;
                    if (next < end) fetch(1 - buffer, next);
                    ptx::multiply<OPERAND>(d, a[buffer][0], b[buffer][0], b[buffer][1]);
                    ptx::multiply<OPERAND>(d, a[buffer][1], b[buffer][2], b[buffer][3]);
                }
            }
            __syncwarp();
        }
        used += steps;
        const float low = __shfl_sync(0xffffffffu, d[0], lane % 8 * 4), high = __shfl_sync(0xffffffffu, d[2], lane % 8 * 4);
        return lane < 8 ? low : high;
    }
};

}  // namespace flash_sampling
