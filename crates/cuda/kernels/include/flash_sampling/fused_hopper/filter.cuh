// The filter: finds the elements of a tile that can still win, as bits of a thread's accumulators. Moves these elements to the
// warp's queue, so that full warps score them.
#pragma once

#include "multiply.cuh"
#include "threshold.cuh"

namespace flash_sampling::fused_hopper {

// Calls take(i, is_above) for each accumulator of a word. NaN also counts as above.
template <class T, class Take>
__device__ __forceinline__ void compare(const float (&d)[T::ACCUMULATORS], int w, const Consumer<T>& self, const Take& take) {
#pragma unroll
    for (int i = 0; i < T::WORD_BITS; i += 4) {
        const float2 threshold = self.pair(self.shared.thresholds[self.warp], (w * T::WORD_BITS + i) / 4);
#pragma unroll
        for (int e = 0; e < 4; ++e) take(i + e, !(d[w * T::WORD_BITS + i + e] <= (e & 1 ? threshold.y : threshold.x)));
    }
}

// Sets the bits in `pending` of the `counted` elements above their thresholds. Returns whether any lane has such an element.
template <class T>
__device__ __forceinline__ bool filter(u32 (&pending)[T::WORDS], const float (&d)[T::ACCUMULATORS],
                                       const u32 (&counted)[T::WORDS], const Consumer<T>& self) {
    u32 any = 0;
#pragma unroll
    for (int w = 0; w < T::WORDS; ++w) {
        bool above = false;
        compare(d, w, self, [&](int, bool is_above) { above |= is_above; });
        u32 bits = 0;
        if (above) {
            // NOTE: loads the thresholds a second time. Otherwise the compiler computes the bits before the branch.
            Consumer<T> other = self;
            asm volatile("" : "+r"(other.lane));
            compare(d, w, other, [&](int i, bool is_above) { bits |= is_above ? 1u << i : 0; });
        }
        any |= pending[w] = bits & counted[w];
    }
    return __any_sync(0xffffffffu, any);
}

// Returns the largest power of two below `length`, or 1 for a length up to 2.
FS_FUNCTION constexpr int power_below(int length) { return length <= 2 ? 1 : 2 * power_below((length + 1) / 2); }

// Returns one of LENGTH registers, starting at FIRST, by a run-time index and through selects.
template <int FIRST, int LENGTH, int ALL>
__device__ __forceinline__ float pick(const float (&d)[ALL], u32 index) {
    if constexpr (LENGTH == 1) {
        return d[FIRST];
    } else {
        constexpr int POWER = power_below(LENGTH);
        const float low = pick<FIRST, POWER>(d, index);
        const float high = pick<FIRST + POWER, LENGTH - POWER>(d, index);
        return index & POWER ? high : low;
    }
}

// Returns one of the registers of word `at` of a thread's accumulators. All lanes have the same word.
template <class T, int W = 0>
__device__ __forceinline__ float pick_of_word(const float (&d)[T::ACCUMULATORS], u32 at, u32 index) {
    if constexpr (W + 1 < T::WORDS) {
        if (at > W) return pick_of_word<T, W + 1>(d, at, index);
    }
    return pick<W * T::WORD_BITS, T::WORD_BITS>(d, index);
}

// Scores the queue, and clears it.
template <class T>
__device__ __forceinline__ void flush(u32& queued, const Consumer<T>& self) {
    __syncwarp();
    score(self.call, self.shared, self.warp, queued, self.first, self.lane, 32);
    __syncwarp();
    queued = 0;
}

// Moves the pending elements to the queue, word by word. Selecting an element of one word takes a quarter of the selects of all
// accumulators. If all rows share a mask, few lanes hold many elements.
template <class T>
__device__ __forceinline__ void enqueue(u32 (&pending)[T::WORDS], u32& queued, const float (&d)[T::ACCUMULATORS],
                                        const Consumer<T>& self) {
    for (;;) {
        // The first word in which any lane has an element, and the bits of this lane in it.
        u32 at = T::WORDS, bits = 0;
#pragma unroll
        for (int w = 0; w < T::WORDS; ++w) {
            if (at == T::WORDS && __any_sync(0xffffffffu, pending[w])) {
                at = w;
                bits = pending[w];
                pending[w] &= pending[w] - 1;
            }
        }
        if (at == T::WORDS) return;
        const u32 ballot = __ballot_sync(0xffffffffu, bits), index = __ffs(bits) - 1;
        if (queued + __popc(ballot) > QUEUE) flush(queued, self);
        const float dot = pick_of_word<T>(d, at, index);
        if (bits) {
            const u32 column = at * 2 * T::WORD_BITS + self.column(index / 4) + index % 2;
            const u32 m = self.slab() + self.lane / 4 + index % 4 / 2 * 8;
            self.shared.queue[self.warp][queued + __popc(ballot & ((1u << self.lane) - 1))] = {dot, m << 16 | column};
        }
        queued += __popc(ballot);
    }
}

}  // namespace flash_sampling::fused_hopper
