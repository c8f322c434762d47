// Loads slabs from device memory of any layout.
#pragma once

#include "matrices.cuh"
#include "../ptx/cp_async.cuh"
#include "swizzle.cuh"

namespace flash_sampling {

// Loads the first `bytes` (an even number) of 16 bytes from an address that `unit` divides. The other bytes are zeros,
// and are not read.
__device__ __forceinline__ uint4 gather(const u8* from, u32 bytes, u32 unit) {
    if (bytes == 16 && unit >= 8) {
        const uint2* const at = reinterpret_cast<const uint2*>(from);
        const uint2 low = at[0], high = at[1];
        return {low.x, low.y, high.x, high.y};
    }
    if (bytes == 16 && unit == 4) {
        const u32* const at = reinterpret_cast<const u32*>(from);
        return {at[0], at[1], at[2], at[3]};
    }
    const u16* const at = reinterpret_cast<const u16*>(from);
    u32 w[4];
#pragma unroll
    for (u32 i = 0; i < 4; ++i) {
        const u32 low = 4 * i < bytes ? at[2 * i] : 0, high = 4 * i + 2 < bytes ? at[2 * i + 1] : 0;
        w[i] = high << 16 | low;
    }
    return {w[0], w[1], w[2], w[3]};
}

// A thread's share of the loads of a matrix of up to ROWS rows, slab by slab: one chunk of 16 bytes of each AT_ONCE-th
// row.
template <int ROWS, int DEPTH, int THREADS>
struct SlabLoader {
    using Place = Swizzle<DEPTH>;
    static constexpr int AT_ONCE = THREADS / Place::CHUNKS;
    static constexpr int COPIES = (ROWS + AT_ONCE - 1) / AT_ONCE;
    static_assert(AT_ONCE % 8 == 0, "the swizzle's key is the same for all rows of a thread");

    const u8* at;  // the thread's chunk of its first row
    u64 step;      // bytes to its next row
    u32 place;     // offset within a slab
    u32 rows;      // rows of the matrix, starting at the thread's first row
    u64 policy;

    // Begins with the first elements of rows `0..count` at `from`.
    __device__ __forceinline__ void begin(const u8* from, u64 stride, u32 count, u64 keep_policy) {
        const u32 chunk = threadIdx.x % Place::CHUNKS, row = threadIdx.x / Place::CHUNKS;
        at = from + row * stride + chunk * 16;
        step = AT_ONCE * stride;
        place = Place::at(row, chunk);
        rows = count > row ? count - row : 0;
        policy = keep_policy;
    }

    // Returns the number of bytes of the thread's chunk that are within the matrix, in the slab that begins at element
    // k.
    static __device__ __forceinline__ u32 bytes(u32 k, u32 width) {
        const u32 begin = k + threadIdx.x % Place::CHUNKS * 8;
        return begin < width ? min(16u, (width - begin) * 2) : 0;
    }

    static __device__ __noinline__ uint4 called_gather(const u8* from, u32 bytes, u32 unit) {
        return gather(from, bytes, unit);
    }

    // Makes one of COPIES copies. Elements beyond the width become zero. Rows beyond the matrix stay unchanged.
    // IS_CALL: a load of any alignment is a call, so that the compiler unrolls the loops around it.
    template <bool ALIGNED, bool IS_CALL = false>
    __device__ __forceinline__ void copy(int i, u32 slab, u32 bytes, u32 unit) const {
        const u32 to = slab + place + i * AT_ONCE * Place::ROW_BYTES;
        const u8* const from = at + i * step;
        const bool is_row = static_cast<u32>(i * AT_ONCE) < rows;
        if constexpr (ALIGNED) {
            ptx::copy_async(to, from, bytes, is_row, policy);
        } else if (is_row) {
            const uint4 w = IS_CALL ? called_gather(from, bytes, unit) : gather(from, bytes, unit);
            asm volatile("st.shared.v4.b32 [%0], {%1, %2, %3, %4};" ::"r"(to), "r"(w.x), "r"(w.y), "r"(w.z), "r"(w.w)
                         : "memory");
        }
    }

    __device__ __forceinline__ void next_slab() { at += DEPTH * 2; }
};

// SlabLoader for a weight of 8-bit elements, which become bf16 in shared memory. The bytes of a slab are in registers
// until the thread loads the next slab, so that reads from device memory run ahead of their use.
template <int ROWS, int DEPTH, int THREADS, Element WEIGHT>
struct ByteSlabLoader {
    using Loader = SlabLoader<ROWS, DEPTH, THREADS>;
    static constexpr int COPIES = Loader::COPIES;

    const u8* at;
    u64 step;
    u32 place;
    u32 rows;
    uint2 read[COPIES];

    // Begins without bytes in registers. The first copies write zeros to a slab that is loaded later.
    __device__ __forceinline__ void begin_ring() {
#pragma unroll
        for (int i = 0; i < COPIES; ++i) read[i] = {0, 0};
    }

    __device__ __forceinline__ void begin(const u8* from, u64 stride, u32 count) {
        using Place = typename Loader::Place;
        const u32 chunk = threadIdx.x % Place::CHUNKS, row = threadIdx.x / Place::CHUNKS;
        at = from + row * stride + chunk * 8;
        step = Loader::AT_ONCE * stride;
        place = Place::at(row, chunk);
        rows = count > row ? count - row : 0;
    }

    // Writes one of COPIES copies of the previous slab, and reads the same copy of this slab. `bytes` is its size in
    // bf16. Elements beyond the width and rows beyond the matrix become zero.
    __device__ __forceinline__ void copy(int i, u32 before, u32 bytes, u32 unit) {
        const u32 to = before + place + i * Loader::AT_ONCE * Loader::Place::ROW_BYTES;
        const auto low = [](u32 word) { return bytes_to_bf16<WEIGHT, false>(word); };
        const auto high = [](u32 word) { return bytes_to_bf16<WEIGHT, true>(word); };
        asm volatile("st.shared.v4.b32 [%0], {%1, %2, %3, %4};" ::"r"(to), "r"(low(read[i].x)), "r"(high(read[i].x)),
                     "r"(low(read[i].y)), "r"(high(read[i].y))
                     : "memory");
        const u8* const from = at + i * step;
        const u32 count = i * Loader::AT_ONCE < rows ? bytes / 2 : 0;
        read[i] = count == 8 && unit >= 8 ? *reinterpret_cast<const uint2*>(from) : bytes_at(from, count);
    }

    // Loads the first `count` of eight bytes at any address. The other bytes are zeros, and are not read. The function
    // is a call, so that the compiler unrolls the loops around it.
    static __device__ __noinline__ uint2 bytes_at(const u8* from, u32 count) {
        u64 word = 0;
#pragma unroll 1
        for (u32 e = 0; e < count; ++e) word |= static_cast<u64>(from[e]) << 8 * e;
        return {static_cast<u32>(word), static_cast<u32>(word >> 32)};
    }

    __device__ __forceinline__ void next_slab() { at += DEPTH; }
};

}  // namespace flash_sampling
