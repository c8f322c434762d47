// The filter: which elements of a tile can still win, as bits of a thread's accumulators.
#pragma once

#include "multiply.cuh"
#include "threshold.cuh"

namespace flash_sampling::fused_hopper {

// With lists a block's first tile has three passes, of its largest dot products, of the tokens with hints, of all. Every other
// tile has the last one only.
enum Pass : u32 { LARGEST = 0, HINTED = 1, ALL = 2, PASSES = 3 };

// The thresholds of the four accumulators from 4 j on of word w.
template <class T>
__device__ __forceinline__ float2 pair_of(const float (&thresholds)[T::COLUMNS], const Consumer& self, u32 w, u32 j) {
    return *reinterpret_cast<const float2*>(&thresholds[w * 2 * T::WORD_BITS + self.column(j)]);
}

// The bits of a word of accumulators that are not below their thresholds.
template <class T>
__device__ __forceinline__ u32 above_of(const float (&d)[T::ACCUMULATORS], const float (&thresholds)[T::COLUMNS],
                                        const Consumer& self, u32 w) {
    u32 above = 0;
#pragma unroll
    for (int j = 0; j < T::WORD_BITS / 4; ++j) {
        const float2 losing = pair_of<T>(thresholds, self, w, j);
#pragma unroll
        for (int e = 0; e < 4; ++e)
            if (!(d[w * T::WORD_BITS + j * 4 + e] <= (e & 1 ? losing.y : losing.x))) above |= 1u << (j * 4 + e);
    }
    return above;
}

// Sets, in `pending`, the bits of what has a mark, or a dot product above what surely loses.
template <class T>
__device__ __forceinline__ void filter(u32 (&pending)[T::UNITS][T::WORDS],
                                       const float (&d)[T::UNITS][T::ACCUMULATORS], const u32 (&real)[T::UNITS],
                                       Shared<T>& shared, u32 t, u32 pass, const Consumer& self) {
#pragma unroll
    for (int u = 0; u < T::UNITS; ++u) {
#pragma unroll
        for (int w = 0; w < T::WORDS; ++w) {
            // Is any dot product above what surely loses?
            bool above = false;
#pragma unroll
            for (int j = 0; j < T::WORD_BITS / 4; ++j) {
                const float2 limit = pair_of<T>(shared.losing, self, w, j);
#pragma unroll
                for (int e = 0; e < 4; ++e) above |= !(d[u][w * T::WORD_BITS + j * 4 + e] <= (e & 1 ? limit.y : limit.x));
            }
            // The marks are taken, and left as they are found at the start.
            const auto take = [&](u32 half) {
                u32& marks = shared.marks[half][2 * u + self.group][self.warp % 4][w][self.lane];
                const u32 taken = marks;
                if (taken) marks = 0;
                return taken;
            };
            const bool guessed = T::GUESSES && t == 0;
            const u32 hints = guessed || pass == HINTED ? take(1) : 0;
            u32 bits = pass == (t == 0 && T::LISTS ? HINTED : ALL) ? take(t & 1) : 0;
            if (above) {
                const u32 mask = above_of<T>(d[u], shared.losing, self, w);
                bits |= pass == HINTED ? mask & hints : mask;
            }
            if (guessed && hints) bits |= above_of<T>(d[u], shared.hinted, self, w) & hints;
            pending[u][w] = bits & real[u];
        }
    }
}

}  // namespace flash_sampling::fused_hopper
