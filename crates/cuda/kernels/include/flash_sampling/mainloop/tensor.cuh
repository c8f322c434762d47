// The products on tensor cores of compute capability 8.0 and up: bf16 or f16, the same type on both sides.
//
// The plain version:
//
//   for each tile of tokens of the block's run
//       D[tokens, rows] = weight[tokens, hidden] x hidden[rows, hidden]^T
//       epilogue.tile(D)
//
// What differs, and why the answer stays the same:
//
// 1. Slabs of DEPTH elements of both factors run through a ring of STAGES; loads are STAGES - 1 slabs ahead, also over the
//    border of tiles, so that memory is busy while an epilogue runs.
// 2. Each product is one accumulator over hidden, 16 elements at a time, ascending, whatever the number of rows. On the
//    same inputs wgmma sums in the same way: the bits are the Hopper kernel's.
// 3. A factor whose rows are not multiples of 16 bytes apart is read by ordinary loads into the same slabs: the bits do
//    not depend on the layout.
// 4. The accumulators go to the epilogue in parts of PART rows of the batch. Warps along the rows take 8 each in turn, so
//    that all warps hold a share of each part.
#pragma once

#include "../dot_tile.cuh"
#include "../ptx/mma.cuh"
#include "load_slab.cuh"
#include "memory.cuh"

namespace flash_sampling {

// COLUMNS: rows of the batch, 8, 16, 32, 64, 128 or 256.
template <int COLUMNS, ptx::Operand OPERAND>
struct TensorMainloop {
    static constexpr int MOST_ROWS = COLUMNS;
    // Longer slabs read the weight in longer runs; shorter ones leave room for a ring.
    static constexpr int DEPTH = IS_ROOMY ? (COLUMNS <= 32 ? 128 : 64) : (COLUMNS <= 64 ? 64 : 32);
    static constexpr int PART = COLUMNS < 32 ? COLUMNS : 32;
    static constexpr int THREADS = EPILOGUE_THREADS;
    static constexpr int BLOCKS = 1;  // on a multiprocessor: the ring wants all of the shared memory
    // Warps across the rows of the batch and down the tokens; what a warp holds in fragments of 16 tokens x 8 rows.
    static constexpr int ACROSS = COLUMNS >= 256 ? 4 : COLUMNS >= 64 ? 2 : 1;
    static constexpr int DOWN = WARPS / ACROSS;
    static constexpr int HIGH = TILE_TOKENS / 16 / DOWN;
    static constexpr int WIDE = COLUMNS / 8 / ACROSS;
    static constexpr int PART_WIDE = PART / 8 / ACROSS;  // fragments of a part, of a warp
    static constexpr int PARTS = COLUMNS / PART;
    static_assert(PART_WIDE > 0 && PARTS * PART == COLUMNS, "every warp has a share of each part");

    static constexpr int WEIGHT_BYTES = TILE_TOKENS * DEPTH * 2;
    static constexpr int STAGE_BYTES = WEIGHT_BYTES + COLUMNS * DEPTH * 2;
    static constexpr int DOTS_STRIDE = TILE_TOKENS + 4;  // no two lanes of a fragment meet in a bank
    static constexpr int DOTS_BYTES = PART * DOTS_STRIDE * 4;

    // The ring takes what the epilogue's KEPT bytes leave.
    template <int KEPT>
    struct Memory {
        static constexpr int FIT = (SHARED_LIMIT - KEPT - DOTS_BYTES) / STAGE_BYTES;
        static constexpr int STAGES = FIT < 8 ? FIT : 8;
        static constexpr int BYTES = DOTS_BYTES + STAGES * STAGE_BYTES;
        static_assert(STAGES >= 3, "loads must run ahead of the products");
    };

    // The products of one slab.
    static __device__ __forceinline__ void multiply(float (&d)[HIGH][WIDE][4], u32 slab, u32 warp_down, u32 warp_across,
                                                    u32 lane) {
        using Place = Swizzle<DEPTH>;
        const u32 weight = slab, hidden = slab + WEIGHT_BYTES;
        u32 b[WIDE == 1 ? 1 : WIDE / 2][4];
#pragma unroll
        for (u32 k = 0; k < DEPTH / 16; ++k) {
            if constexpr (WIDE == 1) {
                // One fragment of two steps.
                if (k % 2 == 0) ptx::load_matrices(b[0], hidden + Place::at(lane % 8, k * 2 + lane / 8));
            } else {
#pragma unroll
                for (u32 j = 0; j < WIDE; j += 2) {
                    const u32 row = ((j + lane / 16) * ACROSS + warp_across) * 8 + lane % 8;
                    ptx::load_matrices(b[j / 2], hidden + Place::at(row, k * 2 + lane / 8 % 2));
                }
            }
#pragma unroll
            for (u32 i = 0; i < HIGH; ++i) {
                u32 a[4];
                ptx::load_matrices(a, weight + Place::at((warp_down * HIGH + i) * 16 + lane % 16, k * 2 + lane / 16));
#pragma unroll
                for (u32 j = 0; j < WIDE; ++j) {
                    const u32 at = WIDE == 1 ? k % 2 * 2 : j % 2 * 2;
                    ptx::multiply<OPERAND>(d[i][j], a, b[j / 2][at], b[j / 2][at + 1]);
                }
            }
        }
    }

    // Gives the accumulators of a tile to the epilogue.
    template <class Epilogue>
    static __device__ __forceinline__ void hand_over(const float (&d)[HIGH][WIDE][4], float* dots, Epilogue& epilogue,
                                                     u32 row_count, u32 first, u32 tokens, u32 warp_down, u32 warp_across,
                                                     u32 lane) {
#pragma unroll 1
        for (u32 part = 0; part < PARTS && part * PART < row_count; ++part) {
            if (part > 0) __syncthreads();
#pragma unroll
            for (u32 p = 0; p < PARTS; ++p) {
                if (p != part) continue;
#pragma unroll
                for (u32 j = 0; j < PART_WIDE; ++j) {
                    float* const column = dots + ((j * ACROSS + warp_across) * 8 + lane % 4 * 2) * DOTS_STRIDE;
#pragma unroll
                    for (u32 i = 0; i < HIGH; ++i) {
                        float* const to = column + (warp_down * HIGH + i) * 16 + lane / 4;
                        const float* const from = d[i][p * PART_WIDE + j];
                        to[0] = from[0];
                        to[DOTS_STRIDE] = from[1];
                        to[8] = from[2];
                        to[DOTS_STRIDE + 8] = from[3];
                    }
                }
            }
            __syncthreads();
            epilogue.tile({dots, DOTS_STRIDE, first, tokens, part * PART, min(static_cast<u32>(PART), row_count - part * PART)});
        }
    }

    template <int KEPT, class Epilogue>
    static __device__ __forceinline__ void run(const Call& call, const Matrices& matrices, const Run& run, u8* memory,
                                               Epilogue& epilogue) {
        constexpr int STAGES = Memory<KEPT>::STAGES;
        const u32 lane = threadIdx.x % 32, warp = threadIdx.x / 32;
        const u32 warp_down = warp / ACROSS, warp_across = warp % ACROSS;
        float* const dots = reinterpret_cast<float*>(memory + STAGES * STAGE_BYTES);
        // NOTE: through memory that is not used yet, so that the ring's addresses lie in vector registers. Of uniform ones the
        // compiler (ptxas 13, sm_90a) makes copies "LDGSTS [R + UR14], desc[UR15]", and the cache policy stays in UR14: an
        // illegal instruction.
        static_assert(DOTS_BYTES >= THREADS * 4, "a word for each thread");
        volatile u32* const own = reinterpret_cast<volatile u32*>(dots) + threadIdx.x;
        *own = ptx::shared_address(memory);
        const u32 ring = *own;
        const u64 stream = ptx::policy_evict_first(), keep = ptx::policy_evict_last();

        // The slab that is loaded next.
        u32 ahead_first = run.first, ahead_k = 0, ahead_slab = ring;
        const auto load = [&] {
            if (ahead_first < run.end) {
                load_slab<TILE_TOKENS, DEPTH, THREADS>(ahead_slab, matrices.weight + ahead_first * matrices.weight_stride,
                                                       matrices.weight_stride, min(run.end - ahead_first, TILE_TOKENS),
                                                       matrices.weight_unit, ahead_k, call.hidden, stream);
                load_slab<COLUMNS, DEPTH, THREADS>(ahead_slab + WEIGHT_BYTES, matrices.hidden, matrices.hidden_stride,
                                                   call.row_count, matrices.hidden_unit, ahead_k, call.hidden, keep);
                ahead_k += DEPTH;
                if (ahead_k >= call.hidden) {
                    ahead_k = 0;
                    ahead_first += TILE_TOKENS;
                }
                ahead_slab = ahead_slab == ring + (STAGES - 1) * STAGE_BYTES ? ring : ahead_slab + STAGE_BYTES;
            }
            ptx::copy_async_commit();
        };
#pragma unroll 1
        for (int s = 0; s < STAGES - 1; ++s) load();
        epilogue.begin();

        u32 slab = ring;
#pragma unroll 1
        for (u32 first = run.first; first < run.end; first += TILE_TOKENS) {
            const u32 tokens = min(run.end - first, TILE_TOKENS);
            const bool busy = warp_down * HIGH * 16 < tokens;
            float d[HIGH][WIDE][4];
#pragma unroll
            for (int i = 0; i < HIGH * WIDE * 4; ++i) d[i / (WIDE * 4)][i / 4 % WIDE][i % 4] = 0.0f;
#pragma unroll 1
            for (u32 k = 0; k < call.hidden; k += DEPTH) {
                ptx::copy_async_wait<STAGES - 2>();
                // The slab is there for all, and all have read the one before, which is loaded over.
                __syncthreads();
                load();
                if (busy) multiply(d, slab, warp_down, warp_across, lane);
                slab = slab == ring + (STAGES - 1) * STAGE_BYTES ? ring : slab + STAGE_BYTES;
            }
            hand_over(d, dots, epilogue, call.row_count, first, tokens, warp_down, warp_across, lane);
        }
        ptx::copy_async_wait<0>();
        __syncthreads();
        epilogue.end();
    }
};

}  // namespace flash_sampling
