// The dot products of a few tokens with one hidden state, with the bits of the full kernel: one accumulator of the tensor cores over
// hidden in ascending order.
#pragma once

#include "../ptx/address.cuh"
#include "pass.cuh"

#ifndef FS_EMULATED  // else the test defines ExactDots

#include "../ptx/cp_async.cuh"
#include "../ptx/mma.cuh"

namespace flash_sampling {

struct ExactDots {
    static constexpr u32 WARPS = 4;
    static constexpr u32 THREADS = 32 * WARPS;
    static constexpr u32 SLOTS = 16 * WARPS;  // tokens at a time
    static constexpr u32 STAGES = 4;
    // The parts of all tokens' rows that a stage holds. Fewer tokens have longer parts.
    static constexpr u32 PARTS_BYTES = 32768;
    static constexpr u32 LONGEST = PARTS_BYTES / 16;
    // The rows of a part are 16 bytes apart modulo 128, so that the rows of a fragment use different banks.
    static constexpr u32 PAD = 16;
    static constexpr u32 STAGE_BYTES = PARTS_BYTES + SLOTS * PAD + LONGEST;
    static constexpr u32 SHARED_BYTES = STAGES * STAGE_BYTES;

    // Writes the dot products of `count` tokens, at most SLOTS. All threads of the block call this; a barrier must follow. `memory`
    // is SHARED_BYTES at a multiple of 16.
    template <ptx::Operand OPERAND>
    static __device__ __forceinline__ void compute(const Candidates& call, u32 row, u32 first_token, const u32* tokens, u32 count,
                                                   float* dots, u8* memory) {
        const u32 lane = threadIdx.x % 32, warp = threadIdx.x / 32;
        const u32 slots = count <= 16 ? 16 : count <= 32 ? 32 : SLOTS;
        const u32 bytes = PARTS_BYTES / slots, pitch = bytes + PAD, units = bytes / 16;
        const u32 row_bytes = call.width * 2, steps = (row_bytes + bytes - 1) / bytes;
        const u32 ring = ptx::shared_address(memory);
        const u64 once = ptx::policy_evict_unchanged(), keep = ptx::policy_evict_last();
        // Loads a part of every token's row, and of the hidden state after them.
        const auto load = [&](u32 step) {
            if (step < steps) {
                const u32 to = ring + step % STAGES * STAGE_BYTES;
                for (u32 i = threadIdx.x; i < (count + 1) * units; i += THREADS) {
                    const u32 slot = i / units, at = i % units * 16, from = step * bytes + at;
                    const u32 left = from < row_bytes ? min(row_bytes - from, 16u) : 0;
                    const bool is_hidden = slot == count;
                    const u8* const source = is_hidden ? call.hidden + row * call.hidden_stride
                                                       : call.weight + (tokens[slot] - first_token) * call.weight_stride;
                    ptx::copy_async(to + (is_hidden ? slots : slot) * pitch + at, left ? source + from : source, left, true,
                                    is_hidden ? keep : once);
                }
            }
            ptx::copy_async_commit();
        };
        float d[4] = {};
        for (u32 step = 0; step < STAGES - 1; ++step) load(step);
        for (u32 step = 0; step < steps; ++step) {
            ptx::copy_async_wait<STAGES - 2>();
            __syncthreads();
            load(step + STAGES - 1);
            if (16 * warp >= count) continue;
            const u32 stage = step % STAGES * STAGE_BYTES;
            const u32 a_at = ring + stage + (16 * warp + lane % 16) * pitch + lane / 16 * 16;
            // All columns of B are the hidden state.
            const u8* const b_at = memory + stage + slots * pitch + lane % 4 * 4;
#pragma unroll 8
            for (u32 k = 0; k < bytes; k += 32) {
                u32 a[4];
                ptx::load_matrices(a, a_at + k);
                ptx::multiply<OPERAND>(d, a, *reinterpret_cast<const u32*>(b_at + k),
                                       *reinterpret_cast<const u32*>(b_at + k + 16));
            }
        }
        ptx::copy_async_wait<0>();
        __syncthreads();
        if (lane % 4 == 0) {
            dots[16 * warp + lane / 4] = d[0];
            dots[16 * warp + lane / 4 + 8] = d[2];
        }
    }
};

}  // namespace flash_sampling

#endif
