// The variant for rows with masks, biases and penalties. It stores the raw logits of a tile on request. It applies masks before
// it scores, so that forbidden tokens cost nothing.
#pragma once

#include "../epilogue/store.cuh"
#include "../ptx/arithmetic.cuh"
#include "../selection/row_filters.cuh"
#include "filter.cuh"

namespace flash_sampling::fused_hopper {

// Returns a bit for each octet of rows whose logits are stored. All lanes of a warp call this.
template <int COLUMNS>
__device__ __forceinline__ u32 octets_to_store(const Call& call, const LogitStore& stored, u32 lane) {
    u32 octets = 0;
#pragma unroll
    for (u32 first = 0; first < COLUMNS; first += 32) {
        const u32 row = first + lane;
        const u32 rows = __ballot_sync(0xffffffffu, row < call.row_count && (!stored.filters || stored.filters[row].is_any()));
#pragma unroll
        for (u32 k = 0; k < 4; ++k) octets |= rows >> 8 * k & 0xff ? 1u << (first / 8 + k) : 0;
    }
    return octets;
}

// Stores the raw logits of a thread's elements. Eight lanes hold adjacent tokens, so stores fill whole sectors.
template <class T, bool PLAIN>
__device__ __forceinline__ void store_raw_of(const float (&d)[T::ACCUMULATORS], u32 real, const LogitStore& stored,
                                             const Consumer<T>& self) {
    float* to = stored.logits + self.column(0) * stored.stride + self.first + self.slab() + self.lane / 4;
    const u32 octets = self.shared.stored_octets;
#pragma unroll
    for (int j = 0; j < T::ACCUMULATORS / 4; ++j, to += 8 * stored.stride) {
        if (!(octets >> j & 1)) continue;
#pragma unroll
        for (int e = 0; e < 4; ++e) {
            if (self.column(j) + e % 2 >= self.call.row_count || !(real >> e & 1)) continue;
            const float dot = d[4 * j + e];
            to[(e & 1 ? stored.stride : 0) + (e & 2 ? 8 : 0)] = PLAIN ? dot : self.call.head.apply(dot, 0.0f, false);
        }
    }
}

// Stores the raw logits. Two loops, because one loop with the head's transform exceeds the instruction cache.
template <class T>
__device__ __forceinline__ void store_raw(const float (&d)[T::ACCUMULATORS], u32 real, const LogitStore& stored,
                                          const Consumer<T>& self) {
    if (self.call.head.scale == 1.0f && self.call.head.soft_cap == 0.0f)
        store_raw_of<T, true>(d, real, stored, self);
    else
        store_raw_of<T, false>(d, real, stored, self);
}

// Whether any row has a mask. Reads the rows at each call, so the result needs no register.
template <class T>
__device__ __forceinline__ bool has_masks(const Consumer<T>& self) {
    bool any = false;
    for (u32 r = self.lane; r < self.call.row_count; r += 32) any |= self.shared.rows[r].mask != nullptr;
    return __any_sync(0xffffffffu, any);
}

// Returns the mask of sixteen tokens, starting at token `at`, in the low bits; all ones without a mask.
__device__ __forceinline__ u32 mask_of_slab(const Row& row, u32 at) {
    if (!row.mask) return ~0u;
    const u32 word = at >> 5, shift = at & 31;
    const u32 low = word < row.mask_words ? row.mask[word] : 0;
    const u32 high = shift > 16 && word + 1 < row.mask_words ? row.mask[word + 1] : 0;
    return __funnelshift_r(low, high, shift);
}

// Clears the bits in `counted` of the elements that a mask forbids. Each lane loads the masks of its warp's sixteen tokens for
// every 32nd column, and shuffles distribute them: one load per 16 elements. All lanes call this.
template <class T>
__device__ __forceinline__ void apply_masks(u32 (&counted)[T::WORDS], const Consumer<T>& self) {
    constexpr int AT_ONCE = T::WORD_BITS < 16 ? T::WORD_BITS : 16;  // accumulators of 32 columns
    constexpr int HALVES = T::WORD_BITS / AT_ONCE;
    // Starts all loads before the first result is used.
    u32 slabs[T::WORDS];
#pragma unroll
    for (int w = 0; w < T::WORDS; ++w) {
        slabs[w] = 0;
#pragma unroll
        for (int half = 0; half < HALVES; ++half) {
            const u32 column = w * 2 * T::WORD_BITS + half * 32 + self.lane, at = self.call.first_token + self.first + self.slab();
            const u32 slab = column < self.call.row_count ? mask_of_slab(self.shared.rows[column], at) : ~0u;
            slabs[w] |= (slab & 0xffff) << half * 16;
        }
    }
#pragma unroll
    for (int w = 0; w < T::WORDS; ++w) {
        u32 bits = 0;
        // NOTE: an unrolled loop spills.
#pragma unroll 1
        for (int half = 0; half < HALVES; ++half) {
            const u32 slab = slabs[w] >> half * 16 & 0xffff;
            // Under strict masks most slabs have no allowed token.
            if (!__any_sync(0xffffffffu, slab)) continue;
#pragma unroll
            for (int i = 0; i < AT_ONCE / 2; ++i) {
                const u32 own = __shfl_sync(0xffffffffu, slab, self.column(i / 2) + i % 2) >> self.lane / 4;
                bits |= ((own & 1) | (own >> 6 & 4)) << (half * 16 + i / 2 * 4 + i % 2);
            }
        }
        counted[w] &= bits;
    }
}

// A dot product below SURELY_VALID is finite, also after a scale of at most LARGEST_SCALE.
constexpr float SURELY_VALID = 1e18f, LARGEST_SCALE = 1e20f;

// Whether a warp's elements may have an invalid logit. An invalid logit is an error of the row even if its token is masked. Then
// scoring applies the masks. All lanes call this.
template <class T>
__device__ __forceinline__ bool may_be_invalid(const float (&d)[T::ACCUMULATORS], const Consumer<T>& self) {
    float largest = d[0];
#pragma unroll
    for (int i = 0; i < T::ACCUMULATORS; ++i) largest = max_or_nan(largest, d[i]);
    return __any_sync(0xffffffffu, !(largest < SURELY_VALID && self.call.head.scale <= LARGEST_SCALE));
}

}  // namespace flash_sampling::fused_hopper
