// The filter: which elements of a tile can still win, as bits of a thread's accumulators.
#pragma once

#include "multiply.cuh"
#include "threshold.cuh"

namespace flash_sampling::fused_hopper {

// The values of the two columns of four accumulators from 4 j on.
template <class T>
__device__ __forceinline__ float2 pair_of(const float (&of_columns)[T::COLUMNS], const Consumer& self, u32 j) {
    return *reinterpret_cast<const float2*>(&of_columns[self.column(j)]);
}

// Calls `take(i, is_above)` for each accumulator of a word: whether it is not at or below its threshold.
template <class T, class Take>
__device__ __forceinline__ void compare(const float (&d)[T::ACCUMULATORS], const float (&losing)[T::COLUMNS],
                                        const Consumer& self, int w, const Take& take) {
#pragma unroll
    for (int i = 0; i < T::WORD_BITS; i += 4) {
        const float2 limit = pair_of<T>(losing, self, (w * T::WORD_BITS + i) / 4);
#pragma unroll
        for (int e = 0; e < 4; ++e) take(i + e, !(d[w * T::WORD_BITS + i + e] <= (e & 1 ? limit.y : limit.x)));
    }
}

// Sets, in `pending`, the bits of the elements above their thresholds that are among `counted`. Returns whether a lane has any.
template <class T>
__device__ __forceinline__ bool filter(u32 (&pending)[T::WORDS], const float (&d)[T::ACCUMULATORS],
                                       const u32 (&counted)[T::WORDS], const Shared<T>& shared, const Consumer& self) {
    u32 any = 0;
#pragma unroll
    for (int w = 0; w < T::WORDS; ++w) {
        bool above = false;
        compare<T>(d, shared.losing[self.warp], self, w, [&](int, bool is_above) { above |= is_above; });
        u32 bits = 0;
        if (above)
            compare<T>(d, shared.losing[self.warp], self, w, [&](int i, bool is_above) { bits |= is_above ? 1u << i : 0; });
        any |= pending[w] = bits & counted[w];
    }
    return __any_sync(0xffffffffu, any);
}

}  // namespace flash_sampling::fused_hopper
