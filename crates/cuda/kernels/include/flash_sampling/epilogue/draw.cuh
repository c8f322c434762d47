// Draws (paper Alg. 1): of each row the token whose perturbed score is largest. On request it keeps the logits as well.
//
// The plain version: score every token of the tile, keep the best. What differs, and why the answer stays the same:
//
// 1. A granule's word bounds the noise of its tokens, and so gives a limit: no token of the granule wins with a dot product at
//    or below it (see `losing_dot`). All threads make the limits of a tile first.
// 2. The limits come from the best winner that any block has found; an old one only scores more tokens.
// 3. What is left is scored exactly (see sample.cuh).
#pragma once

#include "sample.cuh"
#include "store.cuh"

namespace flash_sampling {

template <int COLUMNS>
struct DrawEpilogue {
    static constexpr u32 GRANULE = 16;
    using Arguments = LogitStore;
    struct Shared {
        Winners<COLUMNS> winners;
        float best[COLUMNS];  // the best score of any block; of a greedy row the limit of all granules
        float limits[PART_COLUMNS<COLUMNS>][TILE_GRANULES];
    };
    const Call& call;
    const LogitStore& stored;
    const Run& run;
    Shared& shared;

    __device__ __forceinline__ void begin() { shared.winners.begin(); }

    // Publishes the best of this block for a row, and takes the best of all blocks.
    __device__ __forceinline__ void refresh_best(u32 column, u32 next_token) {
        const u64 mine = shared.winners.key(column), theirs = __ldcg(&call.best[column]);
        if (mine > theirs) atomicMax(&call.best[column], mine);
        const u64 key = mine > theirs ? mine : theirs;
        const Winner winner = key ? from_ordered_bits(key) : Winner::none();
        const Row& row = call.rows[column];
        float best = winner.score;
        if (row.greedy) {
            const bool is_plain =
                row.inv_temperature == 1.0f && row.biases == 0 && call.head.scale == 1.0f && call.head.soft_cap == 0.0f;
            // An equal logit of a later token loses.
            if (!is_plain || winner.token >= next_token) best = losing_dot(best, 0.0f, call.head, row);
        }
        shared.best[column] = best;
    }

    __device__ __forceinline__ void tile(const DotTile& tile) {
        // Once for all parts of a tile: the latency of one read.
        if (tile.column == 0) {
            for (u32 column = threadIdx.x; column < call.row_count; column += EPILOGUE_THREADS)
                refresh_best(column, call.first_token + tile.first);
            __syncthreads();
        }
        each_granule(call, tile, [&](u32 c, u32 place, u32 word) {
            const Row& row = call.rows[tile.column + c];
            const float best = shared.best[tile.column + c], bound = noise_bound(Granule::minimum_bits(word));
            shared.limits[c][place] = row.greedy ? best : losing_dot(best, bound, call.head, row);
        });
        __syncthreads();
        for (u32 c = threadIdx.x / 32; c < tile.columns; c += WARPS) {
            if (stored.logits) store_row(call, stored, tile, c);
            draw_row(tile, c);
        }
    }

    // A warp and its row: each lane takes four tokens of a granule.
    __device__ __forceinline__ void draw_row(const DotTile& tile, u32 c) {
        const u32 column = tile.column + c, first = call.first_token + tile.first;
        const Row& row = call.rows[column];
        // Quads are of global token ids; a shard may begin within one.
        const u32 shift = first & 3;
#pragma unroll 1
        for (u32 begin = 0; begin < shift + tile.tokens; begin += TILE_TOKENS) {
            const u32 t = begin + 4 * (threadIdx.x % 32) - shift;  // wraps before the tile
            float d[4];
            read_quad(tile, c, t, shift == 0, d);
            const float limit = shared.limits[c][granule_of_tile(first, first + t)];
            bool is_left = false;
#pragma unroll
            for (u32 j = 0; j < 4; ++j) is_left = is_left || !(d[j] <= limit);
            if (!__any_sync(0xffffffffu, is_left)) continue;
#pragma unroll
            for (u32 j = 0; j < 4; ++j) {
                const bool is_lost = d[j] <= limit;
                const float raw = call.head.apply(d[j], 0.0f, false);
                d[j] = is_lost ? -f32_infinity() : checked_logit(raw, row, first + t + j, &call.invalid[column]);
            }
            const u32 word = Noise{row.seed, row.position}.word(Domain::Granule, row.draw, (first + t) / Granule::TOKENS);
            Candidate best = shared.winners.best[column];
            raise_best(row, d, first + t, word, best);
            __syncwarp();
            if (threadIdx.x % 32 == 0) shared.winners.best[column] = best;
            __syncwarp();
        }
    }

    // Four dot products of a row of the tile with the head's bias; what is no token is -inf.
    __device__ __forceinline__ void read_quad(const DotTile& tile, u32 c, u32 t, bool is_aligned, float (&d)[4]) {
        const float* const dots = tile.dots + c * tile.stride;
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
