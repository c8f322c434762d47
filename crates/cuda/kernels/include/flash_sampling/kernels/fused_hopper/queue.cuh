// A warp's queue: what passed the filter, so that it is scored by full warps.
#pragma once

#include "multiply.cuh"

namespace flash_sampling::fused_hopper {

// A register picked by a run-time index through selects; LENGTH is a power of two.
template <int FIRST, int LENGTH, int ROWS, int COLS>
__device__ __forceinline__ float pick(const float (&d)[ROWS][COLS], u32 index) {
    if constexpr (LENGTH == 1) {
        return d[FIRST / COLS][FIRST % COLS];
    } else {
        const float low = pick<FIRST, LENGTH / 2>(d, index);
        const float high = pick<FIRST + LENGTH / 2, LENGTH / 2>(d, index);
        return index & (LENGTH / 2) ? high : low;
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
                    index = u * T::ACCUMULATORS + w * 32 + (__ffs(pending[u][w]) - 1);
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
