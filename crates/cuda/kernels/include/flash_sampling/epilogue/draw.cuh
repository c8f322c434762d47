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

#include "../noise_bound.cuh"
#include "store.cuh"

namespace flash_sampling {

template <int COLUMNS>
struct DrawEpilogue {
    static constexpr u32 GRANULE = 16;
    static constexpr u32 AT_ONCE = 2;
    using Arguments = LogitStore;
    struct Shared {
        Winners<COLUMNS> winners;
        float near[COLUMNS];
        float far[COLUMNS];
    };
    const Call& call;
    const LogitStore& stored;
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
                far = losing_dot(winner.score, NOISE_CEILING, call.head, row);
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
        const u32 warp = threadIdx.x / 32;
        if (stored.logits)
            for (u32 c = warp; c < tile.columns; c += WARPS) store_row(call, stored, tile, c);
#pragma unroll 1
        for (u32 c = warp; c < tile.columns; c += AT_ONCE * WARPS) draw_rows(tile, c);
    }

    // A warp and AT_ONCE of its rows, which hide each other's latency: each lane takes the four tokens of a Philox block.
    __device__ __forceinline__ void draw_rows(const DotTile& tile, u32 c) {
        float near[AT_ONCE], far[AT_ONCE], logit[AT_ONCE];
        u64 key[AT_ONCE];
        const Row* row[AT_ONCE];
#pragma unroll
        for (u32 r = 0; r < AT_ONCE; ++r) {
            // Where there is no further row nothing is below -inf, and its dot products are -inf.
            const u32 column = tile.column + min(c + r * WARPS, tile.columns - 1);
            row[r] = &call.rows[column];
            near[r] = shared.near[column];
            far[r] = shared.far[column];
            key[r] = 0;
            logit[r] = 0.0f;
        }
        // Quads are of global token ids; a shard may begin within one.
        const u32 base = call.first_token + tile.first, shift = base & 3;
#pragma unroll 1
        for (u32 quad = threadIdx.x % 32; quad * 4 < shift + tile.tokens; quad += 32) {
            const u32 t = quad * 4 - shift;  // wraps before the tile
            float d[AT_ONCE][4];
            bool is_noisy = false;
#pragma unroll
            for (u32 r = 0; r < AT_ONCE; ++r) {
                read_quad(tile, c + r * WARPS, t, shift == 0, d[r]);
                bool is_near = false;
#pragma unroll
                for (u32 j = 0; j < 4; ++j) is_near = is_near || !(d[r][j] <= far[r]);
                is_noisy = is_noisy || is_near;
            }
            if (!is_noisy) continue;
            Words words[AT_ONCE];
            make_words(row, (base >> 2) + quad, words);
#pragma unroll
            for (u32 r = 0; r < AT_ONCE; ++r) {
                u32 left = 0;
#pragma unroll
                for (u32 j = 0; j < 4; ++j)
                    if (!(d[r][j] <= (words[r].w[j] < NEAR_WORD ? far[r] : near[r]))) left |= 1u << j;
                if (left) score(*row[r], tile.column + c + r * WARPS, base + t, left, d[r], words[r], key[r], logit[r]);
            }
        }
        __syncwarp();
#pragma unroll
        for (u32 r = 0; r < AT_ONCE; ++r)
            if (c + r * WARPS < tile.columns) shared.winners.offer(tile.column + c + r * WARPS, key[r], logit[r]);
    }

    // The words of a block for AT_ONCE rows. A greedy row's do not matter: its limits are the same.
    static __device__ __forceinline__ void make_words(const Row* const (&row)[AT_ONCE], u32 block, Words (&words)[AT_ONCE]) {
        u32 k0[AT_ONCE], k1[AT_ONCE];
#pragma unroll
        for (u32 r = 0; r < AT_ONCE; ++r) {
            words[r] = counter(block, row[r]->draw, row[r]->position, domain_code(Domain::Token));
            k0[r] = static_cast<u32>(row[r]->seed);
            k1[r] = static_cast<u32>(row[r]->seed >> 32);
        }
#pragma unroll
        for (int round = 0; round < 10; ++round) {
#pragma unroll
            for (u32 r = 0; r < AT_ONCE; ++r) {
                words[r] = philox4x32_round(words[r], k0[r], k1[r]);
                k0[r] += PHILOX_W32_0;
                k1[r] += PHILOX_W32_1;
            }
        }
    }

    // Scores the tokens `first + j` whose bits j are `left`, exactly.
    __device__ __forceinline__ void score(const Row& row, u32 column, u32 first, u32 left, const float (&d)[4],
                                          const Words& words, u64& key, float& logit) {
        const bool is_greedy = row.greedy;
        const Noise noise{row.seed, row.position};
#pragma unroll 1
        for (; left; left &= left - 1) {
            const u32 j = __ffs(left) - 1;
            const float dot = j & 2 ? (j & 1 ? d[3] : d[2]) : (j & 1 ? d[1] : d[0]);
            const float raw = call.head.apply(dot, 0.0f, false);
            const float l = checked_logit(raw, row, first + j, &call.invalid[column]);
            if (l == -f32_infinity()) continue;
            float s = l;
            if (!is_greedy) s = add_rn(l, noise.gumbel_of(Domain::Token, row.draw, first + j, Noise::pick(words, j)));
            const u64 candidate = to_ordered_bits(Winner::of(s, first + j));
            if (candidate > key) {
                key = candidate;
                logit = l;
            }
        }
    }

    // Four dot products of a row of the tile with the head's bias; what is no token or no row is -inf.
    __device__ __forceinline__ void read_quad(const DotTile& tile, u32 c, u32 t, bool is_aligned, float (&d)[4]) {
        const u32 tokens = c < tile.columns ? tile.tokens : 0;
        const float* const dots = tile.dots + c * tile.stride;
        if (is_aligned && tokens) {
            const float4 quad = *reinterpret_cast<const float4*>(dots + t);
            d[0] = quad.x;
            d[1] = quad.y;
            d[2] = quad.z;
            d[3] = quad.w;
        }
#pragma unroll
        for (u32 j = 0; j < 4; ++j) {
            const bool is_token = t + j < tokens;
            if (!is_aligned && is_token) d[j] = dots[t + j];
            if (is_token && call.bias) d[j] = add_rn(d[j], call.bias[tile.first + t + j]);
            if (!is_token) d[j] = -f32_infinity();
        }
    }

    __device__ __forceinline__ void end() { shared.winners.conclude_rows(call, run, GRANULE); }
};

}  // namespace flash_sampling
