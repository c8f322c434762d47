// The products of a weight in F8_E4M3, which threads convert to bf16 in registers. bf16 holds every e4m3 value exactly, so the sums
// have the bits of the same weight in bf16. The scale of a weight row then multiplies the row's sums.
#pragma once

#include "../quantised.cuh"
#include "multiply.cuh"

namespace flash_sampling::fused_hopper {

// Loads a thread's operands of a product of 16 columns: elements of two rows of the weight in shared memory, `row` and the eighth
// row after it.
__device__ __forceinline__ void load_fp8(u32 (&a)[4], const u8* row) {
    const auto two = [&](u32 at) { return widen_e4m3(*reinterpret_cast<const u16*>(row + at)); };
    a[0] = two(0);
    a[1] = two(1024);
    a[2] = two(8);
    a[3] = two(1024 + 8);
}

// Waits until the warpgroup before this one has queued its products.
__device__ __forceinline__ void await_turn(u32 group) { ptx::named_barrier(TURN_BARRIER + group, 256); }
__device__ __forceinline__ void give_turn(u32 to_group) { ptx::named_arrive(TURN_BARRIER + to_group, 256); }

// Multiplies as multiply() does. While the tensor cores multiply, threads decode the elements of the next products.
template <class T>
__device__ __forceinline__ void multiply_fp8(float (&d)[T::ACCUMULATORS], const u8* stages, Ring<T>& ring, u32 steps,
                                             const Consumer<T>& self, const WeightScales& scales) {
    static_assert(!T::SKIPS, "every warp releases every stage");
    constexpr u32 AT_ONCE = 4;  // products in a group; a group covers a part of 64 hidden elements
    const u32 base = ptx::uniform(ptx::shared_address(stages));
    const u32 hidden = ptx::operand_address(base + T::WEIGHT_BYTES);
    const u32 empty = ptx::cluster_address(&self.shared.empty[0], self.lane % T::CLUSTER);
    const auto release = [&](u32 stage) {
        if (self.lane < T::CLUSTER) ptx::mbarrier_arrive_cluster(empty + stage * sizeof(u64));
    };
    // The thread's row in the unit, and its columns in a swizzled chunk of 16 bytes.
    const u32 row = self.slab() + self.lane / 4;
    const u32 offset = row * T::SLAB_ROW_BYTES + self.lane / 4 * 16 + self.lane % 4 * 2;
    u32 a[2][AT_ONCE][4];
#pragma unroll 1
    for (u32 step = 0; step < steps; ++step) {
        const u32 stage = ring.stage;
        ptx::mbarrier_wait(&self.shared.full[stage], ring.phase);
        const u8* const weight = stages + stage * T::STAGE_BYTES;
        const u64 b = ptx::operand_descriptor(hidden + stage * T::STAGE_BYTES);
#pragma unroll
        for (u32 part = 0; part < T::SLABS * 2; ++part) {
            // Now at most one group of products is pending, and that group reads the other half of `a`.
            ptx::wgmma_wait<1>();
            if (T::AHEAD && part == 1 && step > 0) release(ring.before());
#pragma unroll
            for (u32 k = 0; k < AT_ONCE; ++k) {
                const u32 chunk = part % 2 * AT_ONCE + k;
                load_fp8(a[part % 2][k], weight + part / 2 * T::SLAB_BYTES + (offset ^ chunk * 16));
            }
            if (T::IN_TURN) await_turn(self.group);
            ptx::wgmma_fence();
#pragma unroll
            for (u32 k = 0; k < AT_ONCE; ++k) {
                const u64 place = (part / 2 * T::SLAB_BYTES + part % 2 * T::PART_BYTES) / 16 + k * ptx::DESCRIPTOR_STEP;
                ptx::WgmmaRegisters<T::COLUMNS>::multiply(d, a[part % 2][k], b + place, part + k > 0 || step > 0);
            }
            ptx::wgmma_commit();
            if (T::IN_TURN) give_turn((self.group + 1) % T::TILE_UNITS);
        }
        if (!T::AHEAD) {
            ptx::wgmma_wait<0>();
            release(stage);
        }
        ring.advance();
    }
    if (T::AHEAD) {
        ptx::wgmma_wait<0>();
        release(ring.before());
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
