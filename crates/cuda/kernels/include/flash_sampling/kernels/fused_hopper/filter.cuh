// The filter: which elements of a tile can still win, as bits of a thread's accumulators.
#pragma once

#include "multiply.cuh"
#include "threshold.cuh"

namespace flash_sampling::fused_hopper {

// A block's first tile has three passes, of its largest dot products, of the tokens with hints, of all; the first two may be one
// (T::TOGETHER). Every other tile has the last one only.
enum Pass : u32 { LARGEST = 0, HINTED = 1, ALL = 2, PASSES = 3 };

// The thresholds of the four accumulators from 4 j on of word w.
template <class T>
__device__ __forceinline__ float2 losing_pair(const Shared<T>& shared, const Consumer& self, u32 w, u32 j) {
    return *reinterpret_cast<const float2*>(&shared.losing[w * 2 * T::WORD_BITS + self.column(j)]);
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
                const float2 limit = losing_pair(shared, self, w, j);
#pragma unroll
                for (int e = 0; e < 4; ++e) above |= !(d[u][w * T::WORD_BITS + j * 4 + e] <= (e & 1 ? limit.y : limit.x));
            }
            // The marks are taken, and left as they are found at the start.
            u32 bits = 0, allowed = ~0u;
            if (pass == HINTED) {
                u32& hints = shared.marks[1][2 * u + self.group][self.warp % 4][w][self.lane];
                (T::TOGETHER ? bits : allowed) = hints;
                hints = 0;
            }
            if (pass == (t == 0 ? HINTED : ALL)) {
                u32& marks = shared.marks[t & 1][2 * u + self.group][self.warp % 4][w][self.lane];
                bits |= marks;
                if (marks) marks = 0;
            }
            if (above && allowed) {
                u32 mask = 0;
#pragma unroll
                for (int j = 0; j < T::WORD_BITS / 4; ++j) {
                    const float2 losing = losing_pair(shared, self, w, j);
#pragma unroll
                    for (int e = 0; e < 4; ++e)
                        if (!(d[u][w * T::WORD_BITS + j * 4 + e] <= (e & 1 ? losing.y : losing.x))) mask |= 1u << (j * 4 + e);
                }
                bits |= mask & allowed;
            }
            pending[u][w] = bits & real[u];
        }
    }
}

}  // namespace flash_sampling::fused_hopper
