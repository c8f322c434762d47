// The products on tensor cores of compute capability 8.0 and up. There are three kinds of operands:
//
// * the weight and the hidden states, both in bf16 or both in f16;
// * a weight of 8-bit elements, and hidden states in bf16;
// * the 8-bit codes of a shadow, and the digits of hidden states.
//
// The plain version:
//
//   for each tile of tokens of the block's run
//       D[tokens, rows] = weight[tokens, hidden] x hidden[rows, hidden]^T
//       epilogue.tile(D)
//
// The deviations, and why each keeps the result:
//
// 1. Slabs of DEPTH elements of both operands pass through a ring of STAGES. Loads are STAGES - 1 slabs ahead, even
//    across tiles, so that memory is busy while an epilogue runs.
// 2. A dot product has one accumulator over hidden, 16 elements at a time in ascending order, whatever the number of
//    rows. On Hopper, wgmma was measured to sum in the same order, so the bits equal the Hopper kernel's. Other GPUs
//    may differ.
// 3. If the rows of an operand are not multiples of 16 bytes apart, ordinary loads fill the same slabs. The bits stay
//    the same.
// 4. The epilogue gets the accumulators in parts of PART rows of the batch. Warps across the rows take 8 rows each in
//    turn, so that every warp has a share of each part.
// 5. A weight of 8-bit elements becomes bf16 in shared memory, which is exact. The scale of a weight row multiplies the
//    sums of the row.
// 6. With a shadow, a load takes two adjacent 8-bit codes as one 16-bit element. A row of the batch has two rows of
//    digits, whose sums are exact integers. The two sums give an upper bound of the dot product. The epilogue gets this
//    bound instead of the dot product.
#pragma once

#include "dot_tile.cuh"
#include "../ptx/mma.cuh"
#include "../shadow/bounds.cuh"
#include "load_slab.cuh"
#include "memory.cuh"

namespace flash_sampling {

// The loader of a weight: ByteSlabLoader for 8-bit elements, and SlabLoader otherwise.
template <int ROWS, int DEPTH, int THREADS, Element WEIGHT>
struct WeightLoaders {
    using Type = ByteSlabLoader<ROWS, DEPTH, THREADS, WEIGHT>;
};
template <int ROWS, int DEPTH, int THREADS>
struct WeightLoaders<ROWS, DEPTH, THREADS, Element::BF16> {
    using Type = SlabLoader<ROWS, DEPTH, THREADS>;
};

// The type of the accumulators.
template <ptx::Operand OPERAND>
struct Sums {
    using Type = float;
};
template <>
struct Sums<ptx::Operand::S8> {
    using Type = i32;
};

// COLUMNS: rows of the batch, 8, 16, 32, 64, 128 or 256. WEIGHT: I8 or F8_E4M3 for such a weight; BF16 for all other
// weights. ALIGNED: asynchronous copies can read both operands; with 8-bit weights, the hidden states.
template <int COLUMNS, ptx::Operand OPERAND, bool ALIGNED, Element WEIGHT>
struct TensorMainloop {
    static constexpr bool EIGHT_BITS = has_scales(WEIGHT);
    static constexpr int MAX_ROWS = COLUMNS;
    using Sum = typename Sums<OPERAND>::Type;
    static constexpr bool IS_SHADOW = OPERAND == ptx::Operand::S8;
    static constexpr int DIGITS = IS_SHADOW ? 2 : 1;
    static constexpr int LOADED = COLUMNS * DIGITS;  // rows of hidden states or digits
    // Longer slabs read the weight in longer runs; shorter slabs leave room for a ring.
    static constexpr int DEPTH = IS_ROOMY ? (LOADED <= 32 ? 128 : 64) : (LOADED <= 64 ? 64 : 32);
    static constexpr int PART = COLUMNS < 32 ? COLUMNS : 32;
    static constexpr int THREADS = EPILOGUE_THREADS;
    static constexpr int BLOCKS = 1;  // per multiprocessor: the ring uses all of the shared memory
    // Warps across the rows of the batch and down the tokens, and each warp's fragments of 16 tokens x 8 loaded rows.
    static constexpr int ACROSS = LOADED >= 256 ? 4 : LOADED >= 64 ? 2 : 1;
    static constexpr int DOWN = WARPS / ACROSS;
    static constexpr int HIGH = TILE_TOKENS / 16 / DOWN;
    static constexpr int WIDE = LOADED / 8 / ACROSS;
    static constexpr int ROWS_WIDE = WIDE / DIGITS;      // a warp's fragments of 16 tokens x 8 rows of the batch
    static constexpr int PART_WIDE = PART / 8 / ACROSS;  // a warp's fragments of a part
    static constexpr int PARTS = COLUMNS / PART;
    static_assert(PART_WIDE > 0 && PARTS * PART == COLUMNS, "every warp has a share of each part");
    static_assert(PART <= TILE_COLUMNS, "an epilogue takes no more rows at a time");

    static constexpr int WEIGHT_BYTES = TILE_TOKENS * DEPTH * 2;
    static constexpr int STAGE_BYTES = WEIGHT_BYTES + LOADED * DEPTH * 2;
    static constexpr int DOTS_STRIDE = TILE_TOKENS + 4;  // the lanes of a fragment use different banks
    static constexpr int DOTS_BYTES = PART * DOTS_STRIDE * 4;

    // The ring uses the memory that the epilogue's KEPT bytes leave free.
    template <int KEPT>
    struct Memory {
        static constexpr int FIT = (SHARED_LIMIT - KEPT - DOTS_BYTES) / STAGE_BYTES;
        static constexpr int STAGES = FIT < 8 ? FIT : 8;
        static constexpr int BYTES = DOTS_BYTES + STAGES * STAGE_BYTES;
        static_assert(STAGES >= 3, "loads must run ahead of the products");
    };

    static constexpr int STEPS = DEPTH / 16;

    // The operands of a step of 16 elements. With WIDE == 1, `b` holds the operands of two steps.
    struct Fragments {
        u32 a[HIGH][4];
        u32 b[WIDE == 1 ? 1 : WIDE / 2][4];
    };

    // The position of a warp's fragments.
    struct Place {
        u32 down, across, lane;

        // Returns the octet of loaded rows of fragment j. An octet of rows of the batch has two adjacent octets of
        // digits.
        __device__ __forceinline__ u32 octet(u32 j) const {
            return (j / DIGITS * ACROSS + across) * DIGITS + j % DIGITS;
        }

        __device__ __forceinline__ void load(Fragments& f, u32 slab, u32 k) const {
            using Slab = Swizzle<DEPTH>;
#pragma unroll
            for (u32 i = 0; i < HIGH; ++i)
                ptx::load_matrices(f.a[i], slab + Slab::at((down * HIGH + i) * 16 + lane % 16, k * 2 + lane / 16));
            const u32 hidden = slab + WEIGHT_BYTES;
            if constexpr (WIDE == 1) {
                ptx::load_matrices(f.b[0], hidden + Slab::at(lane % 8, k / 2 * 4 + lane / 8));
            } else {
#pragma unroll
                for (u32 j = 0; j < WIDE; j += 2)
                    ptx::load_matrices(f.b[j / 2],
                                       hidden + Slab::at(octet(j + lane / 16) * 8 + lane % 8, k * 2 + lane / 8 % 2));
            }
        }
    };

    static __device__ __forceinline__ void multiply(Sum (&d)[HIGH][WIDE][4], const Fragments& f, u32 k) {
#pragma unroll
        for (u32 i = 0; i < HIGH; ++i) {
#pragma unroll
            for (u32 j = 0; j < WIDE; ++j) {
                const u32 at = (WIDE == 1 ? k : j) % 2 * 2;
                ptx::multiply<OPERAND>(d[i][j], f.a[i], f.b[j / 2][at], f.b[j / 2][at + 1]);
            }
        }
    }

    // Multiplies the sums of a tile by the scales of weight rows.
    static __device__ __forceinline__ void scale(float (&d)[HIGH][WIDE][4], const WeightScales& scales, u32 first,
                                                 u32 tokens, const Place& place) {
#pragma unroll
        for (u32 i = 0; i < HIGH; ++i) {
#pragma unroll
            for (u32 half = 0; half < 2; ++half) {
                const u32 t = (place.down * HIGH + i) * 16 + place.lane / 4 + 8 * half;
                const float factor = t < tokens ? scales.row_scale(first + t) : 1.0f;
#pragma unroll
                for (u32 j = 0; j < WIDE; ++j) {
                    d[i][j][2 * half] = mul_rn(d[i][j][2 * half], factor);
                    d[i][j][2 * half + 1] = mul_rn(d[i][j][2 * half + 1], factor);
                }
            }
        }
    }

    // Returns upper bounds of the dot products of a tile, from the sums of digits.
    static __device__ __forceinline__ void bound(float (&d)[HIGH][ROWS_WIDE][4], const i32 (&sums)[HIGH][WIDE][4],
                                                 const Candidates& from, u32 row_count, u32 first, u32 tokens,
                                                 const Place& place) {
        TokenBound of_tokens[HIGH][2];
#pragma unroll
        for (u32 i = 0; i < 2 * HIGH; ++i) {
            const u32 t = (place.down * HIGH + i / 2) * 16 + place.lane / 4 + i % 2 * 8;
            if (t < tokens) of_tokens[i / 2][i % 2] = TokenBound::of(from, first + t);
        }
#pragma unroll
        for (u32 j = 0; j < ROWS_WIDE; ++j) {
#pragma unroll
            for (u32 e = 0; e < 2; ++e) {
                const u32 row = (j * ACROSS + place.across) * 8 + place.lane % 4 * 2 + e;
                const HiddenBound of_row = row < row_count ? from.bounds[row] : HiddenBound{};
#pragma unroll
                for (u32 i = 0; i < 2 * HIGH; ++i) {
                    const u32 at = i % 2 * 2 + e;
                    const i32(&fragments)[WIDE][4] = sums[i / 2];
                    d[i / 2][j][at] =
                        upper_dot(fragments[2 * j][at], fragments[2 * j + 1][at], of_tokens[i / 2][i % 2], of_row);
                }
            }
        }
    }

    // Passes the accumulators of a tile to the epilogue.
    template <class Epilogue>
    static __device__ __forceinline__ void hand_over(const float (&d)[HIGH][ROWS_WIDE][4], float* dots,
                                                     Epilogue& epilogue, u32 row_count, u32 first, u32 tokens,
                                                     const Place& place) {
#pragma unroll 1
        for (u32 part = 0; part < PARTS && part * PART < row_count; ++part) {
            if (part > 0) __syncthreads();
#pragma unroll
            for (u32 p = 0; p < PARTS; ++p) {
                if (p != part) continue;
#pragma unroll
                for (u32 j = 0; j < PART_WIDE; ++j) {
                    float* const column = dots + ((j * ACROSS + place.across) * 8 + place.lane % 4 * 2) * DOTS_STRIDE;
#pragma unroll
                    for (u32 i = 0; i < HIGH; ++i) {
                        float* const to = column + (place.down * HIGH + i) * 16 + place.lane / 4;
                        const float* const from = d[i][p * PART_WIDE + j];
                        to[0] = from[0];
                        to[DOTS_STRIDE] = from[1];
                        to[8] = from[2];
                        to[DOTS_STRIDE + 8] = from[3];
                    }
                }
            }
            __syncthreads();
            const u32 columns = min(static_cast<u32>(PART), row_count - part * PART);
            epilogue.tile({dots, DOTS_STRIDE, first, tokens, part * PART, columns});
        }
    }

    template <int KEPT, class Epilogue>
    static __device__ __forceinline__ void run(const Call& call, const Matrices& matrices, const Run& run, u8* memory,
                                               Epilogue& epilogue) {
        constexpr int STAGES = Memory<KEPT>::STAGES;
        const u32 lane = threadIdx.x % 32, warp = threadIdx.x / 32;
        const Place place{warp / ACROSS, warp % ACROSS, lane};
        float* const dots = reinterpret_cast<float*>(memory + STAGES * STAGE_BYTES);
        // NOTE: the ring's address passes through unused memory, so that the compiler keeps addresses in vector
        // registers. For addresses in uniform registers, the compiler (ptxas 13, sm_90a) generates copies "LDGSTS [R +
        // UR14], desc[UR15]", while the cache policy is in UR14: an illegal instruction. A shuffle does not prevent
        // this.
        static_assert(DOTS_BYTES >= THREADS * 4, "a word for each thread");
        volatile u32* const own = reinterpret_cast<volatile u32*>(dots) + threadIdx.x;
        *own = ptx::shared_address(memory);
        const u32 ring = *own, last = ring + (STAGES - 1) * STAGE_BYTES;
        const u64 once = ptx::policy_evict_unchanged(), keep = ptx::policy_evict_last();
        using WeightLoader = typename WeightLoaders<TILE_TOKENS, DEPTH, THREADS, WEIGHT>::Type;
        using HiddenLoader = SlabLoader<LOADED, DEPTH, THREADS>;
        // The elements of a row, as the loaders count them, and the loaded rows of hidden states or digits.
        const u32 width = IS_SHADOW ? (call.hidden + 1) / 2 : call.hidden;
        const u32 loaded = IS_SHADOW ? (call.row_count + 7) / 8 * 16 : call.row_count;

        // The slab to load next.
        u32 ahead_first = run.first, ahead_k = 0, ahead_slab = ring;
        WeightLoader weight;
        HiddenLoader hidden;
        if constexpr (EIGHT_BITS) weight.begin_ring();
        const auto begin_tile = [&] {
            const u32 tokens = min(run.end - ahead_first, TILE_TOKENS);
            const u8* const from = matrices.weight + ahead_first * matrices.weight_stride;
            if constexpr (EIGHT_BITS) {
                weight.begin(from, matrices.weight_stride, tokens);
            } else {
                weight.begin(from, matrices.weight_stride, tokens, once);
            }
            hidden.begin(matrices.hidden, matrices.hidden_stride, tokens ? loaded : 0, keep);
        };
        // Loads step k's share of a slab.
        const auto load = [&](int k) {
            const u32 bytes = HiddenLoader::bytes(ahead_k, width);
#pragma unroll
            for (int i = k; i < WeightLoader::COPIES; i += STEPS) {
                if constexpr (EIGHT_BITS) {
                    const u32 before = ahead_slab == ring ? last : ahead_slab - STAGE_BYTES;
                    weight.copy(i, before, bytes, matrices.weight_unit);
                } else {
                    weight.template copy<ALIGNED>(i, ahead_slab, bytes, matrices.weight_unit);
                }
            }
#pragma unroll
            for (int i = k; i < HiddenLoader::COPIES; i += STEPS)
                hidden.template copy<ALIGNED, EIGHT_BITS>(i, ahead_slab + WEIGHT_BYTES, bytes, matrices.hidden_unit);
        };
        const auto end_load = [&] {
            ptx::copy_async_commit();
            weight.next_slab();
            hidden.next_slab();
            ahead_k += DEPTH;
            if (ahead_k >= width) {
                ahead_k = 0;
                ahead_first = min(ahead_first + TILE_TOKENS, run.end);
                begin_tile();
            }
            ahead_slab = ahead_slab == last ? ring : ahead_slab + STAGE_BYTES;
        };
        begin_tile();
#pragma unroll 1
        for (int s = 0; s < STAGES - 1; ++s) {
#pragma unroll
            for (int k = 0; k < STEPS; ++k) load(k);
            end_load();
        }
        epilogue.begin();

        u32 slab = ring;
        Fragments f[2];
        const auto await = [&] {
            ptx::copy_async_wait<STAGES - 2>();
            // After the barrier, all threads see the slab. All have read the previous slab, which the next load
            // overwrites.
            __syncthreads();
        };
        await();
        place.load(f[0], slab, 0);
#pragma unroll 1
        for (u32 first = run.first; first < run.end; first += TILE_TOKENS) {
            Sum d[HIGH][WIDE][4];
#pragma unroll
            for (int i = 0; i < HIGH * WIDE * 4; ++i) d[i / (WIDE * 4)][i / 4 % WIDE][i % 4] = 0;
#pragma unroll 1
            for (u32 k = 0; k < width; k += DEPTH) {
                const u32 next = slab == last ? ring : slab + STAGE_BYTES;
#pragma unroll
                for (int step = 0; step < STEPS; ++step) {
                    // Loads the fragments of the next step while the fragments of this step are multiplied.
                    load(step);
                    if (step + 1 < STEPS) {
                        place.load(f[(step + 1) % 2], slab, step + 1);
                    } else {
                        end_load();
                        await();
                        place.load(f[0], next, 0);
                    }
                    multiply(d, f[step % 2], step);
                }
                slab = next;
            }
            const u32 tokens = min(run.end - first, TILE_TOKENS);
            if constexpr (EIGHT_BITS) scale(d, matrices.scales, first, tokens, place);
            if constexpr (IS_SHADOW) {
                float bounds[HIGH][ROWS_WIDE][4];
                bound(bounds, d, epilogue.arguments, call.row_count, first, tokens, place);
                hand_over(bounds, dots, epilogue, call.row_count, first, tokens, place);
            } else {
                hand_over(d, dots, epilogue, call.row_count, first, tokens, place);
            }
            // Loads the fragments again, so that the epilogue can use their registers.
            place.load(f[0], slab, 0);
        }
        ptx::copy_async_wait<0>();
        __syncthreads();
        epilogue.end();
    }
};

}  // namespace flash_sampling
