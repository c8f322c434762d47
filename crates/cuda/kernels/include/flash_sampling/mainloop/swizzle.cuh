// A slab of a matrix in shared memory: rows of DEPTH 16-bit elements in chunks of 16 bytes. The row number permutes the chunks,
// so that eight rows of one column of chunks are in eight different banks of 16 bytes.
#pragma once

#include "../platform.cuh"

namespace flash_sampling {

template <int DEPTH>
struct Swizzle {
    static_assert(DEPTH == 32 || DEPTH == 64 || DEPTH == 128, "a row is half a line of 128 bytes, one, or two");
    static constexpr int CHUNKS = DEPTH / 8;
    static constexpr int ROW_BYTES = DEPTH * 2;

    // Returns the offset of a chunk in bytes, from the start of the slab.
    static FS_FUNCTION u32 at(u32 row, u32 chunk) {
        const u32 key = DEPTH == 32 ? row >> 1 & 3 : row & 7;
        return row * ROW_BYTES + ((chunk ^ key) << 4);
    }
};

}  // namespace flash_sampling
