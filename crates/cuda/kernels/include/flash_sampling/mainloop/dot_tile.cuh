// The interface between a mainloop and an epilogue: a finished tile of dot products in shared memory.
//
// A mainloop multiplies; an epilogue reduces the products to a variant's results. All 256 threads of a block call the epilogue's
// functions, in this order:
//
//   begin()                                  once
//   for each tile of the block's run, ascending in `first`
//       for each part of the batch's rows, ascending in `column`
//           tile(DotTile)                    the products may be read until it returns
//   end()                                    once
//
// The mainloop has a barrier before and after each call. An epilogue has this form:
//
//   template <int COLUMNS>                   // most rows of the batch
//   struct SomeEpilogue {
//       static constexpr u32 GRANULE = 16;   // runs begin and end at multiples of it: 16, 32, 64 or 128
//       struct Arguments { ... };            // the kernel's last parameter, by value
//       struct Shared { ... };               // the block's shared memory, aligned to 16 bytes
//       const Call& call; const Arguments& arguments; const Run& run; Shared& shared;
//       __device__ void begin();
//       __device__ void tile(const DotTile& tile);
//       __device__ void end();
//   };
//
// In `tile` a warp handles one row of the batch at a time, and a lane handles four tokens of one granule. `Shared` holds a row's
// results. They need no lock, because warp `row % WARPS` always handles the row.
#pragma once

#include "../abi.cuh"

namespace flash_sampling {

constexpr u32 EPILOGUE_THREADS = 256;
[[maybe_unused]] constexpr u32 WARPS = EPILOGUE_THREADS / 32;
[[maybe_unused]] constexpr u32 TILE_TOKENS = 128;
[[maybe_unused]] constexpr u32 TILE_COLUMNS = 64;

// The tokens of a block: contiguous rows of the weight. The runs of all blocks cover all tokens in ascending order.
struct Run {
    u32 block, blocks;
    u32 first, end;

    // Divides the granules evenly.
    FS_FUNCTION static Run of(u32 block, u32 blocks, u32 tokens, u32 granule) {
        const u64 granules = (tokens + granule - 1) / granule;
        const u32 first = static_cast<u32>(granules * block / blocks) * granule;
        const u32 end = static_cast<u32>(granules * (block + 1) / blocks) * granule;
        return {block, blocks, first < tokens ? first : tokens, end < tokens ? end : tokens};
    }
    // Returns the block of a token.
    FS_FUNCTION static u32 owner(u32 blocks, u32 tokens, u32 granule, u32 token) {
        const u64 granules = (tokens + granule - 1) / granule;
        return static_cast<u32>(((token / granule + 1ull) * blocks - 1) / granules);
    }
};

// A tile of dot products without bias: dots[c * stride + t] is row `column + c` of the batch by row `first + t` of the weight. From
// a shadow, it is a tile of upper bounds of dot products.
struct DotTile {
    const float* dots;  // 16-byte aligned
    u32 stride;         // floats; a multiple of 4
    u32 first;          // a multiple of 16
    u32 tokens;         // 1 to TILE_TOKENS
    u32 column;         // a multiple of 8
    u32 columns;        // rows of the batch, 1 to TILE_COLUMNS: none at or beyond call.row_count
};

}  // namespace flash_sampling
