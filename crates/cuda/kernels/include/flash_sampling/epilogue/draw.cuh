// Draws (paper Alg. 1): of each row the token whose perturbed score is largest. On request it keeps the logits as well.
//
// The plain version: score every token of the tile, keep the best. What differs, and why the answer stays the same:
//
// 1. A token whose dot product is at most `far` cannot win with any noise at all: four such tokens need no words.
// 2. A token whose word is at least NEAR_WORD has noise of at most NEAR_NOISE: it cannot win at or below `near`.
//    Both limits come from the best winner that any block has found (see `losing_dot`); an old one only scores more
//    tokens.
// 3. What is left is scored exactly, with the words that are already there.
#pragma once

#include "store.cuh"

namespace flash_sampling {

// About one word in 1024 lies below this one, and -ln(word 2^-32), rounded up.
constexpr u32 NEAR_WORD = 1u << 22;
constexpr float NEAR_NOISE = 6.931473f;
// Above the largest noise, that of the smallest refined word.
constexpr float LARGEST_NOISE = 45.0546f;

template <int COLUMNS>
struct DrawEpilogue {
    static constexpr u32 GRANULE = 16;
    using Arguments = Stored;
    struct Shared {
        Winners<COLUMNS> winners;
        float near[COLUMNS];
        float far[COLUMNS];
    };
    const Call& call;
    const Stored& stored;
    const Run& run;
    Shared& shared;

    __device__ __forceinline__ void begin() { shared.winners.begin(); }

    // Tells the other blocks what this one has found for a row; the limits come from what all have found.
    __device__ __forceinline__ void refresh_limits(u32 column, u32 next_token) {
        const u64 mine = shared.winners.keys[column], theirs = __ldcg(&call.best[column]);
        if (mine > theirs) atomicMax(&call.best[column], mine);
        const u64 best = mine > theirs ? mine : theirs;
        float near = -f32_infinity(), far = near;
        if (best) {
            const Winner winner = from_ordered_bits(best);
            const Row& row = call.rows[column];
            if (row.greedy) {
                const bool is_plain =
                    row.inv_temperature == 1.0f && row.biases == 0 && call.head.scale == 1.0f && call.head.soft_cap == 0.0f;
                // An equal logit of a later token loses.
                near = is_plain && winner.token < next_token ? winner.score : losing_dot(winner.score, 0.0f, call.head, row);
                far = near;
            } else {
                near = losing_dot(winner.score, NEAR_NOISE, call.head, row);
                far = losing_dot(winner.score, LARGEST_NOISE, call.head, row);
            }
        }
        shared.near[column] = near;
        shared.far[column] = far;
    }

    __device__ __forceinline__ void tile(const DotTile& tile) {
        // Once for all parts of a tile: the latency of one read.
        if (tile.column == 0) {
            for (u32 column = threadIdx.x; column < call.row_count; column += EPILOGUE_THREADS)
                refresh_limits(column, call.first_token + tile.first);
            __syncthreads();
        }
        for (u32 c = threadIdx.x / 32; c < tile.columns; c += WARPS) {
            const float* const dots = tile.dots + c * tile.stride;
            if (stored.logits) store_row(call, stored, tile, tile.column + c, dots);
            draw_row(tile, tile.column + c, dots);
        }
    }

    // A warp and a row: each lane takes the four tokens of a Philox block.
    __device__ __forceinline__ void draw_row(const DotTile& tile, u32 column, const float* dots) {
        const Row& row = call.rows[column];
        const float near = shared.near[column], far = shared.far[column];
        // Quads are of global token ids; a shard may begin within one.
        const u32 base = call.first_token + tile.first, shift = base & 3;
        u64 key = 0;
        float logit = 0.0f;
        for (u32 quad = threadIdx.x % 32; quad * 4 < shift + tile.tokens; quad += 32) {
            const u32 t = quad * 4 - shift;  // wraps before the tile
            float d[4];
            read_quad(tile, dots, t, shift == 0, d);
            bool is_far = true;
#pragma unroll
            for (int j = 0; j < 4; ++j) is_far = is_far && d[j] <= far;
            if (is_far) continue;
            const bool is_greedy = row.greedy;
            const Noise noise{row.seed, row.position};
            const u32 draw = row.draw;
            Words words{{~0u, ~0u, ~0u, ~0u}};
            if (!is_greedy) words = noise.words(Domain::Token, draw, (base >> 2) + quad);
            u32 left = 0;
#pragma unroll
            for (int j = 0; j < 4; ++j)
                if (!(d[j] <= (words.w[j] < NEAR_WORD ? far : near))) left |= 1u << j;
#pragma unroll 1
            for (; left; left &= left - 1) {
                const u32 j = __ffs(left) - 1;
                const float dot = j & 2 ? (j & 1 ? d[3] : d[2]) : (j & 1 ? d[1] : d[0]);
                const u32 token = base + t + j;
                const float l = checked_logit(call, row, column, token, dot);
                if (l == -f32_infinity()) continue;
                float score = l;
                if (!is_greedy) score = add_rn(l, noise.gumbel_of(Domain::Token, draw, token, Noise::pick(words, j)));
                const u64 candidate = to_ordered_bits(Winner::of(score, token));
                if (candidate > key) {
                    key = candidate;
                    logit = l;
                }
            }
        }
        __syncwarp();
        shared.winners.offer(column, key, logit);
    }

    // Four dot products with the head's bias; what is no token is -inf.
    __device__ __forceinline__ void read_quad(const DotTile& tile, const float* dots, u32 t, bool is_aligned, float (&d)[4]) {
        if (is_aligned) {
            const float4 quad = *reinterpret_cast<const float4*>(dots + t);
            d[0] = quad.x;
            d[1] = quad.y;
            d[2] = quad.z;
            d[3] = quad.w;
        }
#pragma unroll
        for (u32 j = 0; j < 4; ++j) {
            const bool is_token = t + j < tile.tokens;
            if (!is_aligned && is_token) d[j] = dots[t + j];
            if (is_token && call.bias) d[j] = add_rn(d[j], call.bias[tile.first + t + j]);
            if (!is_token) d[j] = -f32_infinity();
        }
    }

    __device__ __forceinline__ void end() { shared.winners.conclude_rows(call, run, GRANULE); }
};

}  // namespace flash_sampling
