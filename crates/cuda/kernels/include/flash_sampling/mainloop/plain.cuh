// The products without tensor cores: any pair of types, any layout. One float32 accumulator, ascending over hidden, by fused
// multiply-adds. Quantised weights are decoded to float32 on the way to shared memory, with the same products.
#pragma once

#include "dot_tile.cuh"
#include "matrices.cuh"

namespace flash_sampling {

// Handles COLUMNS rows of the batch at a time, and reads the weight again for each further COLUMNS rows. With this number of
// rows, multiplications take longer than reads.
template <int COLUMNS, bool IS_QUANTISED>
struct PlainMainloop {
    static constexpr int MAX_ROWS = 256;
    static constexpr int THREADS = EPILOGUE_THREADS;
    static constexpr int BLOCKS = 2;  // per multiprocessor: one reads while the other multiplies
    static constexpr int DEPTH = 32;
    // Threads across the rows of the batch and down the tokens, and each thread's rows and tokens.
    static constexpr int WIDE = COLUMNS >= 64 ? 4 : 1;
    static constexpr int ACROSS = COLUMNS / WIDE;
    static constexpr int DOWN = THREADS / ACROSS;
    static constexpr int HIGH = TILE_TOKENS / DOWN;
    static_assert(ACROSS * WIDE == COLUMNS && DOWN * HIGH == TILE_TOKENS && ACROSS <= 32, "threads cover a tile");
    static_assert(COLUMNS <= TILE_COLUMNS, "an epilogue takes no more rows at a time");

    static constexpr int WEIGHT_STRIDE = TILE_TOKENS + 1;
    static constexpr int HIDDEN_STRIDE = COLUMNS + 1;
    static constexpr int DOTS_STRIDE = TILE_TOKENS + 4;
    static constexpr int DOTS_BYTES = COLUMNS * DOTS_STRIDE * 4;
    template <int KEPT>
    struct Memory {
        static constexpr int BYTES = DOTS_BYTES + DEPTH * (WEIGHT_STRIDE + HIDDEN_STRIDE) * 4;
    };

    // A thread's elements of a slab of ROWS rows: one column.
    template <int ROWS>
    struct Elements {
        static constexpr int COUNT = (ROWS * DEPTH + THREADS - 1) / THREADS;
        static constexpr int ROWS_AT_ONCE = THREADS / DEPTH;
        float x[COUNT];

        __device__ __forceinline__ void read(const u8* from, u64 stride, Element type, u32 rows, u32 k, u32 width) {
            const u32 column = k + threadIdx.x % DEPTH, row = threadIdx.x / DEPTH;
            const u8* at = from + row * stride + static_cast<u64>(column) * element_bytes(type);
#pragma unroll
            for (int i = 0; i < COUNT; ++i) {
                x[i] = column < width && row + i * ROWS_AT_ONCE < rows ? element(type, at, 0) : 0.0f;
                at += ROWS_AT_ONCE * stride;
            }
        }
        // Writes the transpose: to[k][row].
        __device__ __forceinline__ void write(float* to, u32 stride) const {
            const u32 column = threadIdx.x % DEPTH, row = threadIdx.x / DEPTH;
#pragma unroll
            for (int i = 0; i < COUNT; ++i) to[column * stride + row + i * ROWS_AT_ONCE] = x[i];
        }
    };

    // Decodes a thread's quantised weights of a slab. A warp reads 32 weights of one row.
    struct Decode {
        Elements<TILE_TOKENS>& to;
        const Matrices& matrices;
        u32 first, rows, k, width;

        template <Element TYPE>
        __device__ __forceinline__ void run() const {
            const u32 column = k + threadIdx.x % DEPTH, row = threadIdx.x / DEPTH;
#pragma unroll
            for (int i = 0; i < to.COUNT; ++i) {
                const u32 r = row + i * to.ROWS_AT_ONCE;
                to.x[i] = 0.0f;
                if (column >= width || r >= rows) continue;
                const float scale = has_scales(TYPE) ? matrices.scales.at(first + r, column) : 1.0f;
                to.x[i] = quantised<TYPE>(matrices.weight + (first + r) * matrices.weight_stride, column, scale).to_f32();
            }
        }
    };

    template <int KEPT, class Epilogue>
    static __device__ __forceinline__ void run(const Call& call, const Matrices& matrices, const Run& run, u8* memory,
                                               Epilogue& epilogue) {
        float* const dots = reinterpret_cast<float*>(memory);
        float* const weight = dots + COLUMNS * DOTS_STRIDE;
        float* const hidden = weight + DEPTH * WEIGHT_STRIDE;
        // Neighbouring threads have neighbouring tokens.
        const u32 down = threadIdx.x % DOWN, across = threadIdx.x / DOWN;
        epilogue.begin();
#pragma unroll 1
        for (u32 first = run.first; first < run.end; first += TILE_TOKENS) {
            const u32 tokens = min(run.end - first, TILE_TOKENS);
            const u8* const weight_from = matrices.weight + first * matrices.weight_stride;
#pragma unroll 1
            for (u32 column = 0; column < call.row_count; column += COLUMNS) {
                const u32 columns = min(call.row_count - column, static_cast<u32>(COLUMNS));
                const u8* const hidden_from = matrices.hidden + column * matrices.hidden_stride;
                Elements<TILE_TOKENS> w;
                Elements<COLUMNS> h;
                const auto read = [&](u32 k) {
                    if constexpr (IS_QUANTISED) {
                        const Decode decode{w, matrices, first, tokens, k, call.hidden};
                        with_quantised_type(matrices.weight_type, decode);
                    } else {
                        w.read(weight_from, matrices.weight_stride, matrices.weight_type, tokens, k, call.hidden);
                    }
                    h.read(hidden_from, matrices.hidden_stride, matrices.hidden_type, columns, k, call.hidden);
                };
                float d[HIGH][WIDE];
#pragma unroll
                for (int i = 0; i < HIGH * WIDE; ++i) d[i / WIDE][i % WIDE] = 0.0f;
                // Reads a slab, and multiplies the previous slab. One copy of the read, which is long for quantised weights.
#pragma unroll 1
                for (u32 k = 0; k < call.hidden + DEPTH; k += DEPTH) {
                    if (k > 0) {
                        __syncthreads();
                        w.write(weight, WEIGHT_STRIDE);
                        h.write(hidden, HIDDEN_STRIDE);
                        __syncthreads();
                    }
                    if (k < call.hidden) read(k);
                    if (k == 0) continue;
#pragma unroll 4
                    for (int e = 0; e < DEPTH; ++e) {
                        float x[HIGH];
#pragma unroll
                        for (int i = 0; i < HIGH; ++i) x[i] = weight[e * WEIGHT_STRIDE + down + i * DOWN];
#pragma unroll
                        for (int j = 0; j < WIDE; ++j) {
                            const float y = hidden[e * HIDDEN_STRIDE + across + j * ACROSS];
#pragma unroll
                            for (int i = 0; i < HIGH; ++i) d[i][j] = fma_rn(x[i], y, d[i][j]);
                        }
                    }
                }
#pragma unroll
                for (int j = 0; j < WIDE; ++j)
#pragma unroll
                    for (int i = 0; i < HIGH; ++i) dots[(across + j * ACROSS) * DOTS_STRIDE + down + i * DOWN] = d[i][j];
                __syncthreads();
                epilogue.tile({dots, DOTS_STRIDE, first, tokens, column, columns});
            }
        }
        __syncthreads();
        epilogue.end();
    }
};

}  // namespace flash_sampling
