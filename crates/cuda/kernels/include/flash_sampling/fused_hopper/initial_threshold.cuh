// A block's first thresholds, before any token has a score. Each block publishes an estimate for each row: a lower bound of the
// score of one token of its first tile that is probably the best of the tile. The best estimate of all blocks so far is close to
// the best score of all first tiles.
//
// Before the first thresholds, `thresholds` holds noise bounds of granules, with their leaders' indices in the last four bits.
#pragma once

#include "../ptx/arithmetic.cuh"
#include "filter.cuh"
#include "halve.cuh"

namespace flash_sampling::fused_hopper {

// A block that has published its estimates adds this to the launch's counter. The low half of the counter counts finished blocks.
constexpr u32 PUBLISHED = 1u << 16;

// The maximum number of times that an early block reads the estimates of other blocks.
constexpr u32 MAX_POLLS = 16;

// Returns a bound, rounded up, with a leader's index in the last four bits.
__device__ __forceinline__ float with_leader(float bound, u32 leader) {
    return bits_to_f32(((f32_to_bits(bound) | 15) + 1) | leader);
}

// Returns the dot product that equals 1 nat of noise. Returns 0 for rows without noise. Also returns 0 if the sixteen tokens of a
// consumer warp overlap two granules: then noise makes no token likelier.
__device__ __forceinline__ float nat_of(const Call& call, const Row& row) {
    const float nat = 1.0f / (row.inv_temperature * call.head.scale);
    return !row.greedy && call.first_token % Granule::TOKENS == 0 && nat < 1e28f ? nat : 0.0f;
}

// Writes the likeliest token of each row's first tile to `largest`: the largest dot product plus the leaders' noise, with the
// token's index in the last bits. Eight lanes hold the tokens of a column.
template <class T>
__device__ __forceinline__ void find_likely(const float (&d)[T::ACCUMULATORS], const u32 (&counted)[T::WORDS],
                                            const Consumer<T>& self) {
    constexpr int HELD = T::ACCUMULATORS / 2;  // columns of a lane
    constexpr int AT_ONCE = HELD < 16 ? HELD : HELD % 16 ? 8 : 16;
    // NOTE: opaque. Otherwise the compiler reads products before they are complete, and serialises them.
    const u32 kept = ptx::opaque<~(T::PLACES - 1)>();
#pragma unroll
    for (int first = 0; first < HELD; first += AT_ONCE) {
        float m[AT_ONCE];
#pragma unroll
        for (int at = 2 * first; at < 2 * (first + AT_ONCE); at += 4) {
            const float2 bounds = self.pair(self.shared.thresholds[self.warp], at / 4);
            const float2 nats = self.pair(self.shared.nat, at / 4);
#pragma unroll
            for (int e = 0; e < 4; ++e) {
                const float bound = e & 1 ? bounds.y : bounds.x, bonus = bound * (e & 1 ? nats.y : nats.x);
                const u32 place = self.lane / 4 + (e & 2 ? 8 : 0);
                const float likely = f32_to_bits(bound) % T::GRANULE == place ? d[at + e] + bonus : d[at + e];
                // Without masks, all accumulators of a token have equal bits.
                const bool counts = counted[at / T::WORD_BITS] >> (T::MASKS_PENALTIES ? at % T::WORD_BITS + e : e) & 1;
                const float tagged = counts ? ptx::tagged(likely, kept, self.slab() + place) : -f32_infinity();
                float& largest = m[at / 2 - first + e % 2];
                largest = e & 2 ? fmaxf(largest, tagged) : tagged;
            }
        }
        u32 column = first / 2 * 8 + self.lane % 4 * 2;
        const bool owns = reduce_by_halves<2, 4>(m, self.lane, column, [](float a, float b) { return fmaxf(a, b); });
#pragma unroll
        for (int i = 0; i < 2; ++i)
            if (owns) atomicMax(&self.shared.largest[column + i], to_monotone_bits(m[i]));
    }
}

// Returns a lower bound of a token's score, from its granule's noise bound and whether it is the leader. No Gumbel is below -3.19:
// an exponential is at most 29 ln 2 / 16 + 33 ln 2.
__device__ __forceinline__ float score_at_least(float logit, float bound, bool is_leader) {
    const float least = logit - 3.25f - 1e-6f * fabsf(logit);
    if (!is_leader) return least;
    const u32 minimum_bits = static_cast<u32>(exp2f(32.0f - 1.442695f * bound) * 1.001f);
    // The bound is rounded up by less than 1e-4.
    return fmaxf(least, leader_score_at_least(logit, bound, minimum_bits) - 2e-4f);
}

// Returns the estimate of a row as a winner: a lower bound of the likeliest token's score; 0 = none. The token's dot product
// passes every threshold of a score up to its own, so the block scores the token later. So an estimate remains a row's winner
// only if it equals the token's score.
template <class T>
__device__ __forceinline__ u64 estimate_of(const Call& call, const Shared<T>& shared, u32 first, u32 column) {
    const float largest = from_monotone_bits(shared.largest[column]);
    if (!is_finite(largest)) return 0;
    const Row& row = shared.rows[column];
    const u32 m = f32_to_bits(largest) % T::PLACES, token = call.first_token + first + m;
    const float bound = shared.thresholds[m / T::GRANULE][column];
    const bool is_leader = f32_to_bits(bound) % T::GRANULE == m % T::GRANULE;
    const float bonus = is_leader ? bound * shared.nat[column] : 0.0f;
    // Lowered by more than the errors from index and bonus (also for the smallest floats) and the rounding of a soft-cap.
    float dot = largest - bonus - 1e-4f * (fabsf(largest) + fabsf(bonus)) - 1e-37f;
    if constexpr (T::CANDIDATES) dot = lower_dot(call, shared, column, token, dot);
    const float logit = row.apply(lowered(call.head.apply(dot, 0.0f, false)), token);
    if (!is_finite(logit)) return 0;
    const Noise noise{row.seed, row.position};
    float score = logit;
    // NOTE: candidates do without the exact noise, because its instructions would be read from memory while the products wait.
    if constexpr (T::CANDIDATES)
        score = row.greedy ? logit : score_at_least(logit, bound, is_leader && call.first_token % Granule::TOKENS == 0);
    else
        score = row.greedy ? logit : add_rn(logit, noise.gumbel(Domain::Token, row.draw, token));
    return to_ordered_bits(Winner::of(score, token));
}

// Returns the best estimate of a row. An early block waits until half of the blocks have published. With its own estimates alone,
// many tokens of flat logits would pass the filter.
template <class T>
__device__ __forceinline__ u64 best_estimate(const Call& call, u32 column) {
    u64 best;
    u32 published, polls = 0;
    do {
        best = ptx::load_relaxed(&call.best[column]);
        published = T::AWAITS_ESTIMATES ? *const_cast<volatile u32*>(call.arrived) / PUBLISHED : gridDim.x;
    } while (published < gridDim.x / 2 && ++polls < MAX_POLLS);
    return best;
}

// Publishes the estimates of a block's first tile, and replaces the noise bounds by thresholds. One thread per row.
template <class T>
__device__ __forceinline__ void estimate(const float (&d)[T::ACCUMULATORS], const u32 (&counted)[T::WORDS],
                                         const Consumer<T>& self) {
    static_assert(T::COLUMNS <= T::CONSUMERS, "a thread has a row");
    const Call& call = self.call;
    Shared<T>& shared = self.shared;
    find_likely(d, counted, self);
    self.barrier();
    const u32 column = self.thread;
    u64 best = 0, key = 0;
    if (column < call.row_count) {
        key = estimate_of(call, shared, self.first, column);
        if (key) atomicMax(&call.best[column], key);
        if constexpr (T::LISTS) post(shared, column, key);
    }
    if (T::AWAITS_ESTIMATES && self.thread == 0) atomicAdd(call.arrived, PUBLISHED);
    if (column < call.row_count) {
        best = best_estimate<T>(call, column);
        if constexpr (T::CANDIDATES) improve(&shared.best[column], best, 0.0f);
        if constexpr (T::LISTS) estimate_cut(call, shared, column, self.size);
        if constexpr (T::LISTS && T::CANDIDATES) set_bins(call, shared, column, key);
    }
    if (column < T::COLUMNS) {
        const ThresholdLine line = thresholds_of(call, shared, column, best, call.first_token + self.first);
#pragma unroll 1
        for (u32 g = 0; g < T::GRANULES; ++g)
            shared.thresholds[g][column] = line.dot_threshold(shared.thresholds[g][column], call.head);
    }
    self.barrier();
}

}  // namespace flash_sampling::fused_hopper
