// The products of a tile, and where a consumer thread holds them.
#pragma once

#include "schedule.cuh"
#include "tile.cuh"

namespace flash_sampling::fused_hopper {

// The place of a consumer thread: its warpgroup holds every other unit of the tile, its warp a slab of 16 tokens of each.
struct Consumer {
    u32 thread, lane, warp, group;

    __device__ __forceinline__ explicit Consumer(u32 thread)
        : thread(thread), lane(thread % 32), warp(thread / 32), group(thread / 32 / 4) {}
    // The first token of a unit's slab within the tile.
    __device__ __forceinline__ u32 slab(u32 u) const { return (2 * u + group) * 64 + warp % 4 * 16; }
    // The columns of four accumulators from 4 j on: e % 2 after this.
    __device__ __forceinline__ u32 column(u32 j) const { return j * 8 + lane % 4 * 2; }
};

// Multiplies a tile: one accumulator over hidden, ascending.
template <class T, ptx::Operand OPERAND>
__device__ __forceinline__ void multiply(float (&d)[T::UNITS][T::ACCUMULATORS], const u8* stages, Shared<T>& shared,
                                         Ring<T>& ring, u32 steps, const Consumer& self) {
    const auto release = [&] {
        if (self.lane < T::CLUSTER) ptx::mbarrier_arrive_cluster(&shared.empty[ring.before()], self.lane);
    };
    for (u32 step = 0; step < steps; ++step) {
        ptx::mbarrier_wait(&shared.full[ring.stage], ring.phase);
        const u8* const at = stages + ring.stage * T::STAGE_BYTES;
        const u64 b = ptx::operand_descriptor(at + T::WEIGHT_BYTES);
        const u64 a = ptx::operand_descriptor(at + self.group * T::UNIT_BYTES);
        ptx::wgmma_fence();
#pragma unroll
        for (int k = 0; k < T::SLABS * T::DEPTH / 16; ++k) {
            const u64 offset = k / 4 * (T::SLAB_BYTES >> 4) + k % 4 * ptx::DESCRIPTOR_STEP;
#pragma unroll
            for (int u = 0; u < T::UNITS; ++u)
                ptx::Wgmma<T::COLUMNS, OPERAND>::multiply(d[u], a + u * (2 * T::UNIT_BYTES >> 4) + offset, b + offset,
                                                          step + k > 0);
        }
        ptx::wgmma_commit();
        // The stage before this one has been read.
        ptx::wgmma_wait<1>();
        if (step > 0) release();
        ring.advance();
    }
    ptx::wgmma_wait<0>();
    if (!T::SKIPS || steps) release();
}

// The same for a warpgroup without tokens in the tile: it passes the stages on, and its accumulators are worth nothing.
// Measured: the last 32 tokens of a block of 37984 x 4096, 256 rows, take 43k clocks instead of 70k, the call 0.91. Where the
// reads are the limit there is nothing to gain. NOTE: it follows `multiply`, one of the two with no steps; were the products
// in a branch, the compiler would serialise them.
template <class T>
__device__ __forceinline__ void pass_by(Shared<T>& shared, Ring<T>& ring, u32 steps, const Consumer& self) {
    for (u32 step = 0; step < steps; ++step) {
        ptx::mbarrier_wait(&shared.full[ring.stage], ring.phase);
        __syncwarp();
        if (self.lane < T::CLUSTER) ptx::mbarrier_arrive_cluster(&shared.empty[ring.stage], self.lane);
        ring.advance();
    }
}

// Adds the head's bias. Returns, in `real`, which of the thread's two rows of each unit are tokens, as bits of a word of
// accumulators.
template <class T>
__device__ __forceinline__ void add_bias(float (&d)[T::UNITS][T::ACCUMULATORS], u32 (&real)[T::UNITS], const Call& call,
                                         u32 first, u32 size, const Consumer& self) {
#pragma unroll
    for (int u = 0; u < T::UNITS; ++u) {
        const u32 m = self.slab(u) + self.lane / 4;
        real[u] = (m < size ? 0x33333333u : 0u) | (m + 8 < size ? 0xccccccccu : 0u);
        if (call.bias) {
            const float low = m < size ? call.bias[first + m] : 0.0f;
            const float high = m + 8 < size ? call.bias[first + m + 8] : 0.0f;
#pragma unroll
            for (int i = 0; i < T::ACCUMULATORS; ++i) d[u][i] = add_rn(d[u][i], i & 2 ? high : low);
        }
    }
}

}  // namespace flash_sampling::fused_hopper
