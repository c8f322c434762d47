// The products of a tile, and their positions in a consumer thread's accumulators.
#pragma once

#include "tile.cuh"

namespace flash_sampling::fused_hopper {

// A consumer thread in a tile. Its warpgroup holds a unit of the tile, and its warp holds a granule.
template <class T>
struct Consumer {
    const Call& call;
    Shared<T>& shared;
    u32 thread, lane, warp, group;
    u32 first, size;  // the tile's first token, and its number of tokens

    __device__ __forceinline__ Consumer(const Call& call, Shared<T>& shared, u32 thread)
        : call(call), shared(shared), thread(thread), lane(thread % 32), warp(thread / 32), group(thread / 128) {}
    // The first token of the warp's granule within the tile.
    __device__ __forceinline__ u32 slab() const { return warp * T::GRANULE; }
    // Returns the column of accumulators 4 j to 4 j + 3; accumulator 4 j + e has column(j) + e % 2.
    __device__ __forceinline__ u32 column(u32 j) const { return j * 8 + lane % 4 * 2; }
    // Returns the values of these two columns.
    __device__ __forceinline__ float2 pair(const float (&of_columns)[T::COLUMNS], u32 j) const {
        return *reinterpret_cast<const float2*>(&of_columns[column(j)]);
    }
    __device__ __forceinline__ void barrier() const { ptx::named_barrier(CONSUMERS_BARRIER, T::CONSUMERS); }
};

// Multiplies a tile, with one accumulator over hidden in ascending order. A warpgroup without tokens has no steps, and undefined
// accumulators.
//
// Few products are queued, so the tensor cores wait for every instruction between the last product of a step and the first
// product of the next step. NOTE: stage and descriptors are in uniform registers, because all of them come from `uniform`. From
// ordinary registers each product takes four moves.
template <class T, ptx::Operand OPERAND, class Sum, int SUMS>
__device__ __forceinline__ void multiply(Sum (&d)[SUMS], const u8* stages, Ring<T>& ring, u32 steps,
                                         const Consumer<T>& self) {
    const u32 place = ptx::uniform(ptx::shared_address(stages) + self.group);
    const u32 group = place % Ring<T>::ALIGNMENT, base = place - group;
    const u32 weight = ptx::operand_address(base + group * T::UNIT_BYTES);
    const u32 hidden = ptx::operand_address(base + T::WEIGHT_BYTES);
    const u32 full = base + static_cast<u32>(reinterpret_cast<const u8*>(&self.shared.full[0]) - stages);
    const u32 empty = ptx::cluster_address(&self.shared.empty[0], self.lane % T::CLUSTER);
    const auto release = [&](u32 stage) {
        if (self.lane < T::CLUSTER) ptx::mbarrier_arrive_cluster(empty + stage * sizeof(u64));
    };
#pragma unroll 1
    for (u32 step = 0; step < steps; ++step) {
        const u32 stage = ring.stage;
        ptx::mbarrier_wait(full + stage * sizeof(u64), ring.phase);
        const u64 a = ptx::operand_descriptor(weight + stage * T::STAGE_BYTES);
        const u64 b = ptx::operand_descriptor(hidden + stage * T::STAGE_BYTES);
        ptx::wgmma_fence();
#pragma unroll
        for (int k = 0; k < T::SLABS * 4; ++k) {
            const u64 offset = k / 4 * (T::SLAB_BYTES >> 4) + k % 4 * ptx::DESCRIPTOR_STEP;
            ptx::Wgmma<2 * SUMS, OPERAND>::multiply(d, a + offset, b + offset, k > 0 || step > 0);
        }
        ptx::wgmma_commit();
        ptx::wgmma_wait<T::AHEAD>();
        // Releases the stage whose products are complete: this one, or the previous one if AHEAD.
        if (T::AHEAD == 0 || step > 0) release(T::AHEAD ? ring.before() : stage);
        ring.advance();
    }
    if (T::AHEAD) {
        ptx::wgmma_wait<0>();
        if (steps) release(ring.before());
    }
}

// Adds the head's bias. Returns which of the thread's two tokens exist, as bits of a word of accumulators.
template <class T>
__device__ __forceinline__ u32 add_bias(float (&d)[T::ACCUMULATORS], const Consumer<T>& self) {
    const u32 m = self.slab() + self.lane / 4;
    const float* const bias = self.call.bias;
    if (bias) {
        const float low = m < self.size ? bias[self.first + m] : 0.0f;
        const float high = m + 8 < self.size ? bias[self.first + m + 8] : 0.0f;
#pragma unroll
        for (int i = 0; i < T::ACCUMULATORS; ++i) d[i] = add_rn(d[i], i & 2 ? high : low);
    }
    return (m < self.size ? 0x33333333u : 0u) | (m + 8 < self.size ? 0xccccccccu : 0u);
}

}  // namespace flash_sampling::fused_hopper
