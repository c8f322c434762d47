// A block's first thresholds, before anything has been scored. For each row the blocks tell each other of one token of their
// first tile that is likely to have its best score; what is told by the time that a block looks is near the best of all first
// tiles.
#pragma once

#include "filter.cuh"
#include "largest.cuh"

namespace flash_sampling::fused_hopper {

// A block that has told its guesses, in the launch's count of blocks that are done: those are in the low half.
constexpr u32 TOLD = 1u << 16;

// How often an early block looks for the guesses of others at most.
constexpr u32 MOST_LOOKS = 16;

// What is added to the dot product of a token with a hint, whose noise is that much above the others' in the mean.
__device__ __forceinline__ float bonus_of(const Call& call, const Row& row) {
    const float bonus = (FIRST_NOISE + 0.45f) / (row.inv_temperature * call.head.scale);
    return !row.greedy && bonus < 1e30f ? bonus : 0.0f;
}

// A float whose bits outside `kept` are those of `tag`. NOTE: with a bit cast the compiler keeps all accumulators as integers,
// and the products of a step wait for the moves.
__device__ __forceinline__ float tagged(float x, u32 kept, u32 tag) {
    float y;
    asm("lop3.b32 %0, %1, %2, %3, 0xea;" : "=f"(y) : "f"(x), "r"(kept), "r"(tag));
    return y;
}

// Tells the other blocks, for each row, a score that the likely token's own is not below, as a winner. The block itself scores
// the token later: its dot product and hint pass any threshold that comes of a score not above its own. So no guess stays a
// row's winner unless the token's score is the same. The bonus of each column stands where its threshold will; the token's
// number stands in the last bits of its dot product.
template <class T, class... Allowed>
__device__ __forceinline__ void tell_guesses(const float (&d)[T::UNITS][T::ACCUMULATORS], const u32 (&real)[T::UNITS],
                                             const Call& call, Shared<T>& shared, u32 first, const Consumer& self,
                                             const Allowed&... allowed) {
    constexpr u32 TOKEN_BITS = T::TILE_UNITS * T::UNIT - 1;
    // NOTE: opaque, or the compiler looks at products before they have ended, and serialises them.
    u32 kept;
    asm volatile("mov.u32 %0, %1;" : "=r"(kept) : "n"(~TOKEN_BITS));
    u32 hints[T::UNITS][T::WORDS];
#pragma unroll
    for (int u = 0; u < T::UNITS; ++u) {
#pragma unroll
        for (int w = 0; w < T::WORDS; ++w)
            hints[u][w] = shared.marks[0][2 * u + self.group][self.warp % 4][w][self.lane] |
                          shared.marks[1][2 * u + self.group][self.warp % 4][w][self.lane];
    }
    raise_largest<T::UNITS, T::ACCUMULATORS>(shared.largest, self.lane, [&](int u, int at, float otherwise) {
        const float2 bonus = pair_of<T>(shared.losing, self, 0, at / 4);
        const float likely = bit_of<T::WORD_BITS>(hints[u], at) ? d[u][at] + (at & 1 ? bonus.y : bonus.x) : d[u][at];
        const u32 token = self.slab(u) + self.lane / 4 + (at & 2 ? 8 : 0);
        return counts<T>(real, u, at, allowed...) ? tagged(likely, kept, token) : otherwise;
    });
    ptx::named_barrier(CONSUMERS_BARRIER, T::CONSUMERS);
    for (u32 column = self.thread; column < call.row_count; column += T::CONSUMERS) {
        const float largest = from_monotone_bits(shared.largest[column]);
        if (!is_finite(largest)) continue;
        const Row& row = shared.rows[column];
        const u32 m = f32_to_bits(largest) & TOKEN_BITS, token = call.first_token + first + m;
        const float bonus = has_mark(shared, m, column) ? shared.losing[column] : 0.0f;
        // Lower by more than what the token's number and the bonus have changed, of the smallest floats too, and what the
        // rounding of a soft-cap may.
        const float dot = largest - bonus - 1e-4f * (fabsf(largest) + bonus) - 1e-37f;
        const float logit = row.apply(lowered(call.head.apply(dot, 0.0f, false)), token);
        if (!is_finite(logit)) continue;
        const Noise noise{row.seed, row.position};
        const float score = row.greedy ? logit : add_rn(logit, noise.gumbel(Domain::Token, row.draw, token));
        atomicMax(&call.best[column], to_ordered_bits(Winner::of(score, token)));
    }
    if (T::AWAITS_GUESSES && self.thread == 0) atomicAdd(call.arrived, TOLD);
}

// The best that has been told for a row. A block that is early looks again until half of the blocks have told theirs: by its
// own guesses alone, many tokens of flat logits would pass.
template <class T>
__device__ __forceinline__ u64 best_guess(const Call& call, u32 column) {
    u64 best;
    u32 told, looks = 0;
    do {
        best = load_relaxed(&call.best[column]);
        told = T::AWAITS_GUESSES ? *const_cast<volatile u32*>(call.arrived) / TOLD : gridDim.x;
    } while (told < gridDim.x / 2 && ++looks < MOST_LOOKS);
    return best;
}

// The thresholds of the first tile. Those of tokens with hints lie lower.
template <class T>
__device__ __forceinline__ void take_guesses(const Call& call, Shared<T>& shared, u32 first, const Consumer& self) {
    for (u32 column = self.thread; column < T::COLUMNS; column += T::CONSUMERS) {
        float losing = bits_to_f32(LOSES_ALWAYS), hinted = losing;
        if (column < call.row_count) {
            const Row& row = shared.rows[column];
            const u64 best = best_guess<T>(call, column);
            losing = losing_dot_of(call, row, best, FIRST_NOISE, call.first_token + first);
            hinted = losing_dot_of(call, row, best, NEAR_NOISE, call.first_token + first);
        }
        shared.losing[column] = losing;
        shared.hinted[column] = hinted;
    }
    ptx::named_barrier(CONSUMERS_BARRIER, T::CONSUMERS);
}

}  // namespace flash_sampling::fused_hopper
