// The best token of a warp's tokens of one row, by exact scores of few of them.
//
// The plain version scores every token and keeps the best. A granule's word bounds the noise of its tokens, so a lane scores
// its tokens by falling logits, one a round, and the warp goes on only with tokens that can still reach the best.
#pragma once

#include "../dot_tile.cuh"
#include "../noise.cuh"
#include "../noise_bound.cuh"
#include "../winner.cuh"

namespace flash_sampling {

#ifdef __CUDACC__

// The Philox blocks of a tile's granules, 64 tokens each, are counted from the block of its first token. A tile may begin
// within a block.
constexpr u32 TILE_BLOCKS = TILE_TOKENS / 64 + 1;
constexpr u32 TILE_GRANULES = 4 * TILE_BLOCKS;

// The place of a token's granule among those of a tile whose first token is `first`.
__device__ __forceinline__ u32 granule_of_tile(u32 first, u32 token) { return token / Granule::TOKENS - first / 64 * 4; }

// Calls visit(c, granule, words) for each row c of the tile's part and each of its blocks: the words of four granules from
// that place on. All threads of the block call it.
template <class Visit>
__device__ __forceinline__ void each_block(const Call& call, const DotTile& tile, Visit visit) {
    const u32 first = call.first_token + tile.first, last = first + tile.tokens - 1;
    for (u32 i = threadIdx.x; i < tile.columns * 4; i += EPILOGUE_THREADS) {
        const u32 c = i / 4, block = first / 64 + i % 4;
        if (block > last / 64) continue;
        const Row& row = call.rows[tile.column + c];
        visit(c, i % 4 * 4, Noise{row.seed, row.position}.words(Domain::Granule, row.draw, block));
    }
}

__device__ __forceinline__ u64 largest_of_warp(u64 key) {
    const u32 high = __reduce_max_sync(0xffffffffu, static_cast<u32>(key >> 32));
    const u32 low = __reduce_max_sync(0xffffffffu, static_cast<u32>(key >> 32) == high ? static_cast<u32>(key) : 0);
    return static_cast<u64>(high) << 32 | low;
}

// Raises `best` to the best of a warp's tokens: of each lane four from `first` on, of one granule, with these logits (-inf =
// no token) and its word. All lanes of a warp call it, with the same `best`. Logits that were scored become -inf.
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
        const bool can_win = reaches(logit, bound, best.winner.score);
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
