// The variant for rows with filters but no mask, biases or penalties, and for heads without a transform. It stores the raw logits
// of a tile, and the largest logit of each granule.
#pragma once

#include "../epilogue/store.cuh"
#include "../selection/block_maxima.cuh"
#include "../ptx/arithmetic.cuh"
#include "halve.cuh"
#include "multiply.cuh"

namespace flash_sampling::fused_hopper {

// Stores the logits of a warp's 16 tokens of a unit. Eight lanes hold adjacent tokens, so stores fill whole sectors. Above 8
// rows, whole octets of rows are stored, so no warp diverges, which saves 2 us at 64 rows.
template <class T, bool FULL>
__device__ __forceinline__ void store_slab(const float (&d)[T::ACCUMULATORS], u32 real, u32 octets, float* to, u64 stride,
                                           const Consumer<T>& self) {
#pragma unroll
    for (int j = 0; j < T::ACCUMULATORS / 4; ++j, to += 8 * stride) {
        if (!(octets >> j & 1)) continue;
#pragma unroll
        for (int e = 0; e < 4; ++e)
            if ((T::COLUMNS > BlockMaxima::ROWS || self.column(j) + e % 2 < self.call.row_count) && (FULL || (real >> e & 1)))
                to[(e & 1 ? stride : 0) + (e & 2 ? 8 : 0)] = d[4 * j + e];
    }
}

// Stores the largest logit of a warp's 16 tokens for each row, two rows per word. While a lane holds more than one octet, pairs
// of lanes halve their octets. All lanes call this.
template <class T, bool FULL>
__device__ __forceinline__ void store_block_maxima(const float (&d)[T::ACCUMULATORS], u32 real, u32 octets, u32* to, u64 octet_step,
                                           const Consumer<T>& self) {
    constexpr int OCTETS = T::ACCUMULATORS / 4;
    constexpr int AT_ONCE = OCTETS < 8 ? OCTETS : OCTETS % 8 ? 4 : 8;
#pragma unroll
    for (int first = 0; first < OCTETS; first += AT_ONCE) {
        u32 maxima[AT_ONCE];
#pragma unroll
        for (int i = 0; i < AT_ONCE; ++i) {
            const float* const at = d + 4 * (first + i);
            float even = FULL || (real & 1) ? at[0] : -f32_infinity(), odd = FULL || (real & 1) ? at[1] : -f32_infinity();
            if (FULL || (real & 4)) even = fmaxf(even, at[2]), odd = fmaxf(odd, at[3]);
            maxima[i] = ptx::pair_of_halves(even, odd);
        }
        u32 octet = first;
        const bool owns = reduce_by_halves<1, 1>(maxima, self.lane, octet, ptx::max_of_pairs);
        if (owns && octets >> octet & 1) to[octet * octet_step] = maxima[0];
    }
}

template <class T>
__device__ __forceinline__ void store_with_maxima(const float (&d)[T::ACCUMULATORS], u32 real, const LogitStore& stored,
                                                Consumer<T> self) {
    static_assert(T::GRANULE == BlockMaxima::TOKENS, "a warp has a granule of each unit");
    // NOTE: forces separate addresses. Addresses that the filter also uses would stay in registers.
    asm volatile("" : "+r"(self.lane), "+r"(self.warp));
    if (!__any_sync(0xffffffffu, real)) return;
    const u32 slab = self.first + self.slab(), octets = self.shared.stored_octets;
    float* const to = stored.logits + self.column(0) * stored.stride + slab + self.lane / 4;
    // A granule of an octet has four words, one per pair of rows. Each of four lanes stores one word.
    constexpr u32 WORDS = BlockMaxima::ROWS / 2;
    u32* const maxima = reinterpret_cast<u32*>(stored.block_maxima) + slab / T::GRANULE * WORDS + self.lane % 4;
    const u64 octet_step = static_cast<u64>(BlockMaxima::granules_of(self.call.tokens)) * WORDS;
    if (__all_sync(0xffffffffu, real == ~0u)) {
        store_slab<T, true>(d, real, octets, to, stored.stride, self);
        store_block_maxima<T, true>(d, real, octets, maxima, octet_step, self);
    } else {
        store_slab<T, false>(d, real, octets, to, stored.stride, self);
        store_block_maxima<T, false>(d, real, octets, maxima, octet_step, self);
    }
}

}  // namespace flash_sampling::fused_hopper
