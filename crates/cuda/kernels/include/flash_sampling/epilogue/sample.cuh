// The granules of a tile, and the best token among a warp's tokens of one row, from the exact scores of a few tokens.
//
// The plain version scores every token and keeps the best score. A granule's word bounds the noise of the granule's
// tokens. So a lane scores its tokens in order of descending logits, one per round. The warp stops when no token can reach
// the best score.
#pragma once

#include "../mainloop/dot_tile.cuh"
#include "../noise/noise.cuh"
#include "../noise/bound.cuh"
#include "../summary/winner.cuh"

namespace flash_sampling {

#ifdef __CUDACC__

// The maximum number of granules that a tile overlaps. A tile may begin and end inside a granule.
constexpr u32 TILE_GRANULES = TILE_TOKENS / Granule::TOKENS + 1;
// Rows per part of the batch.
template <int COLUMNS>
constexpr u32 PART_COLUMNS = COLUMNS < TILE_COLUMNS ? COLUMNS : TILE_COLUMNS;

// Returns the index of a token's granule in a tile with first token `first`. Tokens beyond the tile get the last index.
__device__ __forceinline__ u32 granule_of_tile(u32 first, u32 token) {
    return min(token / Granule::TOKENS - first / Granule::TOKENS, TILE_GRANULES - 1);
}

// Reads threadIdx.x again. Otherwise values from an earlier read stay in registers that the products need.
__device__ __forceinline__ u32 thread_index() {
#ifdef __CUDA_ARCH__
    u32 index;
    asm volatile("mov.u32 %0, %%tid.x;" : "=r"(index));
    return index;
#else
    return threadIdx.x;
#endif
}

// Calls visit(c, place, word) for each row c of the tile's part and each granule of the tile. `place` is the index of
// the granule in the tile. All threads of the block call this function; a thread computes at most one Philox block.
template <class Visit>
__device__ __forceinline__ void each_granule(const Call& call, const DotTile& tile, u32 thread, Visit visit) {
    constexpr u32 BLOCKS = 4;
    static_assert(TILE_GRANULES <= 4 * (BLOCKS - 1) && BLOCKS * TILE_COLUMNS <= EPILOGUE_THREADS, "a thread per block");
    const u32 first = call.first_token + tile.first, c = thread / BLOCKS;
    const u32 granule = 4 * (first / 64 + thread % BLOCKS), last = (first + tile.tokens - 1) / Granule::TOKENS;
    if (c >= tile.columns || granule > last) return;
    const Row& row = call.rows[tile.column + c];
    const Words words = Noise{row.seed, row.position}.words(Domain::Granule, row.draw, granule / 4);
    // NOTE: not unrolled, because the code of `visit` is long.
#pragma unroll 1
    for (u32 w = 0; w < 4; ++w) {
        // A granule before the tile wraps to a large number.
        const u32 place = granule + w - first / Granule::TOKENS;
        if (place < TILE_GRANULES) visit(c, place, Noise::pick(words, w));
    }
}

// Raises `best` to the best of a warp's tokens. Each lane passes four tokens from `first` on, with their logits (-inf = no
// token). The four tokens are in one granule with the word `word`. All lanes of a warp call this function with the same `best`.
// The logits of scored tokens become -inf.
__device__ __forceinline__ void raise_best(const Row& row, float (&logits)[4], u32 first, u32 word, Candidate& best) {
    const Noise noise{row.seed, row.position};
    const u32 draw = row.draw;
    const bool greedy = row.greedy;
    const float bound = greedy ? 0.0f : noise_bound(Granule::minimum_bits(word));
#pragma unroll 1
    while (true) {
        float logit = logits[0];
        u32 at = 0;
#pragma unroll
        for (u32 j = 1; j < 4; ++j)
            if (logits[j] > logit) logit = logits[j], at = j;
        const bool can_win = logit > logit_threshold(best.winner.score, bound);
        if (!__any_sync(0xffffffffu, can_win)) return;
        u64 key = 0;
        if (can_win) {
            const u32 token = first + at;
            float score = logit;
            if (!greedy) {
                const Granule granule = noise.granule(Domain::Token, draw, token, word);
                score = add_rn(logit, noise.gumbel_in(granule, Domain::Token, draw, token));
            }
            key = to_ordered_bits(Winner::of(score, token));
#pragma unroll
            for (u32 j = 0; j < 4; ++j)
                if (j == at) logits[j] = -f32_infinity();
        }
        const u64 largest = largest_of_warp(key);
        const Winner winner = from_ordered_bits(largest);
        const u32 owner = __ffs(static_cast<int>(__ballot_sync(0xffffffffu, key == largest))) - 1;
        const float of_owner = __shfl_sync(0xffffffffu, logit, owner);
        if (winner.beats(best.winner)) best = {winner, of_owner};
    }
}

#endif

}  // namespace flash_sampling
