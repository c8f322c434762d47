// The products of a weight in F8_E4M3, which threads convert to bf16 in registers. bf16 holds every e4m3 value exactly, so the sums
// have the bits of the same weight in bf16. The scale of a weight row then multiplies the row's sums.
#pragma once

#include "../quantised.cuh"
#include "multiply.cuh"

namespace flash_sampling::fused_hopper {

// Loads a thread's operands of a product of 16 columns, and converts them to bf16: elements of two weight rows in shared memory,
// `row` and the eighth row after `row`.
__device__ __forceinline__ void load_fp8(u32 (&a)[4], const u8* row) {
    const auto two = [&](u32 at) { return widen_e4m3(*reinterpret_cast<const u16*>(row + at)); };
    a[0] = two(0);
    a[1] = two(1024);
    a[2] = two(8);
    a[3] = two(1024 + 8);
}

// Warpgroups queue their products in turn. `await_turn` waits for the turn of a warpgroup, and `give_turn` starts the turn of the
// next.
__device__ __forceinline__ void await_turn(u32 group) { ptx::named_barrier(TURN_BARRIER + group, TURN_THREADS); }
__device__ __forceinline__ void give_turn(u32 to_group) { ptx::named_arrive(TURN_BARRIER + to_group, TURN_THREADS); }

// Multiplies as multiply() does, with weights that threads convert to bf16. While the tensor cores multiply for one warpgroup, the
// threads of other warpgroups convert their next elements.
template <class T>
__device__ __forceinline__ void multiply_fp8(float (&d)[T::ACCUMULATORS], const u8* stages, Ring<T>& ring, u32 steps,
                                             const Consumer<T>& self, const WeightScales& scales) {
    static_assert(!T::SKIPS, "every warp releases every stage");
    constexpr u32 CHUNKS = T::SLAB_ROW_BYTES / 16;  // chunks of 16 bytes in a slab's row; each product takes one
    const u32 base = ptx::uniform(ptx::shared_address(stages));
    const u32 hidden = ptx::operand_address(base + T::WEIGHT_BYTES);
    const u32 empty = ptx::cluster_address(&self.shared.empty[0], self.lane % T::CLUSTER);
    // The thread's first row in the tile, and the offset of its first elements. Swizzling permutes the chunks of a row, so chunk k
    // is at `offset ^ k * 16`.
    const u32 row = self.slab() + self.lane / 4;
    const u32 offset = row * T::SLAB_ROW_BYTES + self.lane / 4 * 16 + self.lane % 4 * 2;
    u32 a[CHUNKS][4];
#pragma unroll 1
    for (u32 step = 0; step < steps; ++step) {
        const u32 stage = ring.stage;
        ptx::mbarrier_wait(&self.shared.full[stage], ring.phase);
        const u8* const weight = stages + stage * T::STAGE_BYTES;
        const u64 b = ptx::operand_descriptor(hidden + stage * T::STAGE_BYTES);
#pragma unroll
        for (u32 slab = 0; slab < T::SLABS; ++slab) {
#pragma unroll
            for (u32 k = 0; k < CHUNKS; ++k) load_fp8(a[k], weight + slab * T::SLAB_BYTES + (offset ^ k * 16));
            if (T::IN_TURN) await_turn(self.group);
            ptx::wgmma_fence();
#pragma unroll
            for (u32 k = 0; k < CHUNKS; ++k) {
                const u64 place = (slab * T::SLAB_BYTES + k / 4 * T::PART_BYTES) / 16 + k % 4 * ptx::DESCRIPTOR_STEP;
                ptx::WgmmaRegisters<T::COLUMNS>::multiply(d, a[k], b + place, slab + k > 0 || step > 0);
            }
            ptx::wgmma_commit();
            if (T::IN_TURN) give_turn((self.group + 1) % T::TILE_UNITS);
            ptx::wgmma_wait<0>();
        }
        if (self.lane < T::CLUSTER) ptx::mbarrier_arrive_cluster(empty + stage * sizeof(u64));
        ring.advance();
    }
#pragma unroll
    for (u32 half = 0; half < 2; ++half) {
        const u32 m = row + 8 * half;
        const float scale = m < self.size ? scales.of_sums(self.first + m) : 1.0f;
#pragma unroll
        for (u32 i = 2 * half; i < T::ACCUMULATORS; i += i % 2 ? 3 : 1) d[i] = mul_rn(d[i], scale);
    }
}

}  // namespace flash_sampling::fused_hopper
