// A slab of a matrix in shared memory: rows of DEPTH 16-bit elements in chunks of 16 bytes, whose places are exchanged by
// the row's number, so that eight rows of one column of chunks lie in eight different banks of 16 bytes.
#pragma once

#include "../matrices.cuh"
#include "../ptx/cp_async.cuh"

namespace flash_sampling {

template <int DEPTH>
struct Swizzle {
    static_assert(DEPTH == 32 || DEPTH == 64 || DEPTH == 128, "a row is half a line of 128 bytes, one, or two");
    static constexpr int CHUNKS = DEPTH / 8;
    static constexpr int ROW_BYTES = DEPTH * 2;

    // Bytes from the slab's beginning.
    static FS_FUNCTION u32 at(u32 row, u32 chunk) {
        const u32 key = DEPTH == 32 ? row >> 1 & 3 : row & 7;
        return row * ROW_BYTES + ((chunk ^ key) << 4);
    }
};

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
