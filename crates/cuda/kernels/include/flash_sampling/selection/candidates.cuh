// The candidates of a row: the tokens whose logits are at least a cutoff. One block gathers candidates in shared memory, in one
// pass over the row. The cutoff rises during the pass. A key is the ordered bits of a Winner whose score is the token's logit.
#pragma once

#include "../abi.cuh"
#include "digit.cuh"
#include "../summary/winner.cuh"

#ifdef __CUDACC__

namespace flash_sampling {

template <u32 THREADS, u32 CAPACITY>
struct Candidates {
    // Up to this number of keys, a sort is faster than the search for the n-th largest key.
    static constexpr u32 FEW = 128;

    u64 keys[CAPACITY];
    u32 histogram[1 << DIGIT_BITS];
    u32 count;      // the number of pushed keys; if more than CAPACITY, some keys were dropped
    u32 cut;        // the cutoff, as monotone bits
    u32 largest;    // monotone bits of the largest logit so far
    u32 settled;    // `count` after the last compaction
    u32 digit, above, within;  // see find_digit

    // Clears the candidates. All threads call this; a barrier must follow.
    __device__ __forceinline__ void begin() {
        if (threadIdx.x == 0) {
            count = settled = 0;
            cut = largest = to_monotone_bits(-f32_infinity()) + 1;
        }
    }

    __device__ __forceinline__ void push(u64 key) {
        const u32 at = atomicAdd(&count, 1u);
        if (at < CAPACITY) keys[at] = key;
    }

    // Keeps only the keys that are at least `least`. All threads call this; it contains all necessary barriers.
    __device__ __noinline__ void compact(u64 least) {
        const u32 length = count;
        __syncthreads();
        if (threadIdx.x == 0) count = 0;
        // Overwrites only positions that have been read.
#pragma unroll 1
        for (u32 base = 0; base < length; base += THREADS) {
            const u32 at = base + threadIdx.x;
            const u64 key = at < length ? keys[at] : 0;
            __syncthreads();
            if (key >= least && key) push(key);
            __syncthreads();
        }
        if (threadIdx.x == 0) settled = count;
        __syncthreads();
    }

    // Returns the `need`-th largest key; there must be more than `need` keys. All threads call this; it contains all necessary
    // barriers.
    __device__ __noinline__ u64 find(u32 need) {
        const u32 length = count;
        u64 found = 0;
        // `found` has the bits from bit `known` up. The next digit is below bit `known`.
        for (u32 known = 64; known > 0;) {
            const u32 low = known > DIGIT_BITS ? known - DIGIT_BITS : 0, mask = (1u << (known - low)) - 1;
            for (u32 b = threadIdx.x; b < 1u << DIGIT_BITS; b += THREADS) histogram[b] = 0;
            __syncthreads();
            for (u32 i = threadIdx.x; i < length; i += THREADS) {
                const u64 key = keys[i];
                if (known == 64 || key >> known == found >> known)
                    atomicAdd(&histogram[static_cast<u32>(key >> low) & mask], 1u);
            }
            __syncthreads();
            if (threadIdx.x < 32) find_digit(*this, need);
            __syncthreads();
            found |= static_cast<u64>(digit) << low;
            need -= above;
            const bool whole = within == need;
            __syncthreads();
            if (whole) break;
            known = low;
        }
        return found;
    }

    // Sorts the keys in descending order. `count` must be at most the largest power of two up to CAPACITY. All threads call this;
    // it contains all necessary barriers.
    __device__ __noinline__ void sort() {
        if (count <= FEW) return sort_few();
        u32 size = 2 * FEW;
        while (size < count) size *= 2;
#pragma unroll 1
        for (u32 i = count + threadIdx.x; i < size; i += THREADS) keys[i] = 0;
        __syncthreads();
        for (u32 run = 2; run <= size; run *= 2) {
            for (u32 apart = run / 2; apart > 0; apart /= 2) {
                for (u32 pair = threadIdx.x; pair < size / 2; pair += THREADS) {
                    const u32 i = pair / apart * 2 * apart + pair % apart, j = i + apart;
                    const u64 a = keys[i], b = keys[j];
                    if ((a < b) == ((i & run) == 0)) {
                        keys[i] = b;
                        keys[j] = a;
                    }
                }
                __syncthreads();
            }
        }
    }

  private:
    // Sorts up to FEW keys: the index of a key is the number of larger keys. For each key, LANES lanes count the larger keys.
    __device__ __forceinline__ void sort_few() {
        constexpr u32 LANES = THREADS / FEW;
        static_assert(LANES > 0 && 32 % LANES == 0, "the lanes of a key are in one warp");
        const u32 i = threadIdx.x / LANES;
        const u64 key = i < count ? keys[i] : 0;
        u32 place = 0;
#pragma unroll 4
        for (u32 j = threadIdx.x % LANES; j < count; j += LANES) place += keys[j] > key;
#pragma unroll
        for (u32 distance = 1; distance < LANES; distance *= 2) place += __shfl_xor_sync(0xffffffffu, place, distance);
        __syncthreads();
        if (i < count && threadIdx.x % LANES == 0) keys[place] = key;
        __syncthreads();
    }
};

}  // namespace flash_sampling

#endif
