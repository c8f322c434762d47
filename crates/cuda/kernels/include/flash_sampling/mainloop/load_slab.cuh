// From device memory into a slab, whatever the layout.
#pragma once

#include "../matrices.cuh"
#include "../ptx/cp_async.cuh"
#include "swizzle.cuh"

namespace flash_sampling {

// Fills a slab of up to ROWS rows, all threads of a block: rows `0..rows` at `from`, elements `k..k + DEPTH` of `width`.
// What lies beyond the width becomes zero; rows beyond `rows` keep what they had.
template <int ROWS, int DEPTH, int THREADS>
__device__ __forceinline__ void load_slab(u32 to, const u8* from, u64 stride, u32 rows, u32 unit, u32 k, u32 width, u64 policy) {
    using Place = Swizzle<DEPTH>;
    constexpr int AT_ONCE = THREADS / Place::CHUNKS;
    const u32 chunk = threadIdx.x % Place::CHUNKS, first = threadIdx.x / Place::CHUNKS;
    const u32 begin = k + chunk * 8;
    const u32 bytes = begin < width ? min(16u, (width - begin) * 2) : 0;
    // Where nothing is read the address is still one of the row.
    const u8* at = from + first * stride + (bytes ? begin * 2ull : 0ull);
#pragma unroll
    for (int i = 0; i < (ROWS + AT_ONCE - 1) / AT_ONCE; ++i) {
        const u32 row = first + i * AT_ONCE;
        // The key does not change over the rows of a thread: they are multiples of 8 apart.
        static_assert(AT_ONCE % 8 == 0, "the key would change");
        if (row < rows) {
            if (unit == 16) {
                ptx::copy_async(to + Place::at(row, chunk), at, bytes, policy);
            } else {
                const uint4 w = gather(at, bytes, unit);
                asm volatile("st.shared.v4.b32 [%0], {%1, %2, %3, %4};" ::"r"(to + Place::at(row, chunk)), "r"(w.x), "r"(w.y),
                             "r"(w.z), "r"(w.w)
                             : "memory");
            }
        }
        at += AT_ONCE * stride;
    }
}

}  // namespace flash_sampling
