// The dot products of a few tokens with one hidden state, with the bits of the full kernel: one accumulator of the tensor cores over
// hidden in ascending order.
#pragma once

#include "../mainloop/memory.cuh"
#include "../mainloop/swizzle.cuh"
#include "../ptx/cp_async.cuh"
#include "../ptx/mma.cuh"
#include "../ptx/wgmma.cuh"
#include "pass.cuh"

namespace flash_sampling {

static_assert(ptx::DESCRIPTOR_STEP * 16 == 32, "both products take 16 elements at a time");

// IS_PORTABLE: the products are those of the portable kernel, else of the Hopper kernel.
template <bool IS_PORTABLE>
struct ExactDots {
    static constexpr u32 THREADS = 128;  // a warpgroup
    static constexpr u32 SLOTS = 64;     // tokens at a time: the rows of a product
    static constexpr u32 STAGES = 4;
    static constexpr u32 STAGE_BYTES = (IS_ROOMY ? 48 : 18) << 10;
    static constexpr u32 SLAB_ROW_BYTES = 128;                // one swizzle row: 64 hidden elements
    static constexpr u32 GROUP_BYTES = 8 * SLAB_ROW_BYTES;    // rows of eight tokens
    static constexpr u32 ALIGNMENT = 1024;
    // A product reads the rows of all slots. Rows beyond the tokens are any bytes after them, also beyond the ring.
    static constexpr u32 SHARED_BYTES = ALIGNMENT + STAGES * STAGE_BYTES + SLOTS * SLAB_ROW_BYTES;

    // Multiplies a slab, with the Hopper kernel's products: `is_first` begins the sums.
    template <ptx::Operand OPERAND>
    static __device__ __forceinline__ void multiply_on_hopper(float (&d)[4], u32 slab, u32 hidden, bool is_first) {
        const u32 at = ptx::operand_address(slab);
        const u64 a = ptx::operand_descriptor(at), b = ptx::operand_descriptor(at + hidden - slab);
#pragma unroll
        for (u32 k = 0; k < 4; ++k) {
            const u64 offset = k * ptx::DESCRIPTOR_STEP;
            ptx::Wgmma<8, OPERAND>::multiply(d, a + offset, b + offset, k > 0 || !is_first);
        }
    }

    // Multiplies a slab, with the portable kernel's products. Each warp takes 16 tokens.
    template <ptx::Operand OPERAND>
    static __device__ __forceinline__ void multiply(float (&d)[4], u32 slab, u32 hidden) {
        using Slab = Swizzle<SLAB_ROW_BYTES / 2>;
        const u32 lane = threadIdx.x % 32, token = threadIdx.x / 32 * 16 + lane % 16;
        u32 a[4], b[4];  // b holds two steps
#pragma unroll
        for (u32 k = 0; k < 4; ++k) {
            ptx::load_matrices(a, slab + Slab::at(token, k * 2 + lane / 16));
            if (k % 2 == 0) ptx::load_matrices(b, hidden + Slab::at(lane % 8, k * 2 + lane / 8));
            ptx::multiply<OPERAND>(d, a, b[k % 2 * 2], b[k % 2 * 2 + 1]);
        }
    }

    // Writes the dot products of `count` tokens, from 1 to SLOTS. All threads of the block call this; a barrier must follow.
    // `memory` is SHARED_BYTES. Calls `meanwhile` while the first loads are in flight.
    //
    // A slab has the groups of eight tokens, and a group with the hidden state as its first row. Only these rows are loaded, so few
    // tokens have a stage of many slabs.
    template <ptx::Operand OPERAND, class Meanwhile>
    static __device__ __forceinline__ void compute(const Candidates& call, u32 row, u32 first_token, const u32* tokens, u32 count,
                                                   float* dots, u8* memory, const Meanwhile& meanwhile) {
        const u32 lane = threadIdx.x % 32, warp = threadIdx.x / 32;
        const u32 groups = (count + 7) / 8, slab_bytes = (groups + 1) * GROUP_BYTES, slabs = STAGE_BYTES / slab_bytes;
        const u32 row_bytes = call.width * 2, part_bytes = slabs * SLAB_ROW_BYTES;
        const u32 steps = ptx::uniform((row_bytes + part_bytes - 1) / part_bytes);
        const u32 start = ptx::shared_address(memory);
        const u32 ring = start + (ALIGNMENT - start % ALIGNMENT) % ALIGNMENT;
        const u64 once = ptx::policy_evict_unchanged(), keep = ptx::policy_evict_last();
        // Loads a part of every token's row and of the hidden state; zeros beyond the rows.
        const auto load = [&](u32 step) {
            constexpr u32 UNITS = SLAB_ROW_BYTES / 16;
            // A warp copies a row at a time.
            for (u32 slot = warp; step < steps && slot <= count; slot += THREADS / 32) {
                const bool is_hidden = slot == count;
                const u32 of_slab = is_hidden ? groups * 8 : slot;
                const u8* const source = is_hidden ? call.hidden + row * call.hidden_stride
                                                   : call.weight + (tokens[slot] - first_token) * call.weight_stride;
                const u32 to = ring + step % STAGES * STAGE_BYTES + of_slab * SLAB_ROW_BYTES;
                for (u32 at = lane; at < slabs * UNITS; at += 32) {
                    const u32 from = step * part_bytes + at * 16, left = from < row_bytes ? min(row_bytes - from, 16u) : 0;
                    ptx::copy_async(to + at / UNITS * slab_bytes + (at % UNITS ^ of_slab % 8) * 16, left ? source + from : source,
                                    left, true, is_hidden ? keep : once);
                }
            }
            ptx::copy_async_commit();
        };
        for (u32 step = 0; step < STAGES - 1; ++step) load(step);
        meanwhile();
        const u32 base = ptx::uniform(ring), stride = ptx::uniform(slab_bytes), last = ptx::uniform(slabs);
        float d[4] = {0.0f, 0.0f, 0.0f, 0.0f};
#pragma unroll 1
        for (u32 step = 0; step < steps; ++step) {
            ptx::copy_async_wait<STAGES - 2>();
            if constexpr (!IS_PORTABLE) ptx::shared_writes_fence();
            __syncthreads();
            load(step + STAGES - 1);
            const u32 stage = base + step % STAGES * STAGE_BYTES;
            if constexpr (!IS_PORTABLE) ptx::wgmma_fence();
#pragma unroll 1
            for (u32 slab = 0; slab < last; ++slab) {
                const u32 at = stage + slab * stride, hidden = at + stride - GROUP_BYTES;
                if constexpr (IS_PORTABLE)
                    multiply<OPERAND>(d, at, hidden);
                else
                    multiply_on_hopper<OPERAND>(d, at, hidden, slab == 0 && step == 0);
            }
            if constexpr (!IS_PORTABLE) {
                ptx::wgmma_commit();
                ptx::wgmma_wait<0>();
            }
        }
        ptx::copy_async_wait<0>();
        if (lane % 4 == 0) {
            dots[16 * warp + lane / 4] = d[0];
            dots[16 * warp + lane / 4 + 8] = d[2];
        }
    }
};

}  // namespace flash_sampling
