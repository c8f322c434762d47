// A warp's queue: what passed the filter, so that it is scored by full warps.
#pragma once

#include "multiply.cuh"

namespace flash_sampling::fused_hopper {

// The largest power of two below a length, which is above 1.
FS_FUNCTION constexpr int power_below(int length) { return length <= 2 ? 1 : 2 * power_below((length + 1) / 2); }

// A register picked by a run-time index below LENGTH through selects.
template <int FIRST, int LENGTH, int ROWS, int COLS>
__device__ __forceinline__ float pick(const float (&d)[ROWS][COLS], u32 index) {
    if constexpr (LENGTH == 1) {
        return d[FIRST / COLS][FIRST % COLS];
    } else {
        constexpr int POWER = power_below(LENGTH);
        const float low = pick<FIRST, POWER>(d, index);
        const float high = pick<FIRST + POWER, LENGTH - POWER>(d, index);
        return index & POWER ? high : low;
    }
}

// The same within word `at` of a thread's accumulators, the same in all lanes.
template <class T, int K>
__device__ __forceinline__ void pick_of(float& dot, const float (&d)[T::UNITS][T::ACCUMULATORS], u32 at, u32 index) {
    if constexpr (K < T::UNITS * T::WORDS) {
        if (at == K)
            dot = pick<K / T::WORDS * T::ACCUMULATORS + K % T::WORDS * T::WORD_BITS, T::WORD_BITS>(d, index);
        else
            pick_of<T, K + 1>(dot, d, at, index);
    }
}

// Scores the queue exactly, and empties it.
template <class T>
__device__ __forceinline__ void flush(u32& queued, const Contender* queue, const Call& call, Shared<T>& shared, u32 first,
                                      const Consumer& self) {
    __syncwarp();
    for (u32 e = self.lane; e < queued; e += 32) {
        const Contender contender = queue[e];
        const u32 token = call.first_token + first + (contender.place >> 16);
        offer_to(call, shared, contender.place & 0xffff, token, contender.dot);
    }
    __syncwarp();
    queued = 0;
}

// Moves what is pending to the queue, word after word: an element costs a fourth of what it does below, and a column of
// a mask that all rows share comes as many elements of few lanes.
template <class T>
__device__ __forceinline__ void enqueue_by_words(u32 (&pending)[T::UNITS][T::WORDS], u32& queued, Contender* queue,
                                                 const float (&d)[T::UNITS][T::ACCUMULATORS], const Call& call,
                                                 Shared<T>& shared, u32 first, const Consumer& self) {
    for (;;) {
        // The first word that any lane has something in, and what it is.
        u32 at = T::UNITS * T::WORDS, index = 0;
        bool found = false;
#pragma unroll
        for (int k = 0; k < T::UNITS * T::WORDS; ++k) {
            u32& word = pending[k / T::WORDS][k % T::WORDS];
            if (at > k && __any_sync(0xffffffffu, word)) {
                at = k;
                found = word != 0;
                index = __ffs(word) - 1;
                word &= word - 1;
            }
        }
        if (at == T::UNITS * T::WORDS) break;
        const u32 ballot = __ballot_sync(0xffffffffu, found);
        if (queued + __popc(ballot) > QUEUE) flush(queued, queue, call, shared, first, self);
        float dot = 0.0f;
        pick_of<T, 0>(dot, d, at, index);
        if (found) {
            const u32 column = at % T::WORDS * 2 * T::WORD_BITS + self.column(index / 4) + index % 2;
            const u32 m = self.slab(at / T::WORDS) + self.lane / 4 + index % 4 / 2 * 8;
            queue[queued + __popc(ballot & ((1u << self.lane) - 1))] = {dot, m << 16 | column};
        }
        queued += __popc(ballot);
    }
}

// Moves what is pending to the queue.
template <class T>
__device__ __forceinline__ void enqueue(u32 (&pending)[T::UNITS][T::WORDS], u32& queued, Contender* queue,
                                        const float (&d)[T::UNITS][T::ACCUMULATORS], const Call& call, Shared<T>& shared,
                                        u32 first, const Consumer& self) {
    for (;;) {
        // The next element of each lane.
        u32 index = 0;
        bool found = false;
#pragma unroll
        for (int u = 0; u < T::UNITS; ++u) {
#pragma unroll
            for (int w = 0; w < T::WORDS; ++w) {
                if (!found && pending[u][w]) {
                    found = true;
                    index = u * T::ACCUMULATORS + w * T::WORD_BITS + (__ffs(pending[u][w]) - 1);
                    pending[u][w] &= pending[u][w] - 1;
                }
            }
        }
        const u32 ballot = __ballot_sync(0xffffffffu, found);
        if (ballot == 0) break;
        if (queued + __popc(ballot) > QUEUE) flush(queued, queue, call, shared, first, self);
        const float dot = pick<0, T::UNITS * T::ACCUMULATORS>(d, index);
        if (found) {
            const u32 i = index % T::ACCUMULATORS;
            const u32 column = self.column(i / 4) + i % 2;
            const u32 m = self.slab(index / T::ACCUMULATORS) + self.lane / 4 + i % 4 / 2 * 8;
            queue[queued + __popc(ballot & ((1u << self.lane) - 1))] = {dot, m << 16 | column};
        }
        queued += __popc(ballot);
    }
}

}  // namespace flash_sampling::fused_hopper
