// Thresholds: bounds on the dot products of a tile, from the best scores of all blocks.
#pragma once

#include "../ptx/atomic.cuh"
#include "tile.cuh"

namespace flash_sampling::fused_hopper {

// Returns a row's thresholds as a function of noise bounds, for tokens from `next_token` on. `key` is the row's best winner.
template <class T>
__device__ __forceinline__ ThresholdLine thresholds_of(const Call& call, const Shared<T>& shared, u32 column, u64 key,
                                                       u32 next_token) {
    if (column >= call.row_count) return ThresholdLine::flat(bits_to_f32(NO_MORE_TOKENS));
    if constexpr (T::CANDIDATES) {
        if (is_open(shared, column)) return ThresholdLine::flat(bits_to_f32(NO_MORE_TOKENS));
    }
    if constexpr (T::LISTS) {
        if (is_listed(shared, column)) {
            if (!T::CANDIDATES && is_full(shared, column)) return ThresholdLine::flat(bits_to_f32(NO_MORE_TOKENS));
            return ThresholdLine::flat(listed_capped_threshold(call, shared, column, key));
        }
    }
    return ThresholdLine::of_best(key, next_token, call.head, shared.rows[column]);
}

// Whether a row has noise: it is in the batch, and neither greedy nor listed.
template <class T>
__device__ __forceinline__ bool has_noise(const Call& call, const Shared<T>& shared, u32 column) {
    return column < call.row_count && !shared.rows[column].greedy;
}

// Replaces the best candidate if the new one is better. One 16-byte exchange keeps key and logit consistent. If the row already
// has a candidate, the first exchange only reads it.
__device__ __forceinline__ void improve(Best* best, u64 key, float logit) {
    u64 old_key = 0, old_logit = 0;
    while (key > old_key) {
        const u64 expected = old_key;
        ptx::exchange_if(best, old_key, old_logit, key, f32_to_bits(logit));
        if (old_key == expected) return;
    }
}

// Publishes the block's best winner of a row, and returns the best of all blocks.
template <class T>
__device__ __forceinline__ u64 exchange_best(const Call& call, Shared<T>& shared, u32 column) {
    if (column >= call.row_count) return 0;
    const u64 mine = *const_cast<volatile const u64*>(&shared.best[column].key);
    const u64 theirs = ptx::load_relaxed(&call.best[column]);
    if (mine > theirs) atomicMax(&call.best[column], mine);
    // A lower bound of another block also limits the candidates of this block.
    if (T::CANDIDATES && theirs > mine) improve(&shared.best[column], theirs, 0.0f);
    return mine > theirs ? mine : theirs;
}

// Lists a token of a listed row by an upper bound of its logit, and updates the largest estimate. `estimate` is the token's.
template <class T>
__device__ __forceinline__ void list_by_bound(Shared<T>& shared, u32 column, u32 token, float logit, float estimate,
                                              bool is_real) {
    if (shared.rows[column].greedy == LISTED_BY_MIN_P) {
        const u64 best = *const_cast<volatile const u64*>(&shared.best[column].key);
        const float largest = from_ordered_bits(best).score;
        if (logit < lowered(largest - shared.cut[column], fabsf(largest))) return;
    }
    if (!is_real) return;
    const u64 place = list_candidate(shared, column, to_ordered_bits(Winner::of(logit, token)));
    if (place != ~0ull) shared.candidates.estimates[place] = to_monotone_bits(add_rn(estimate, 0.0f));
    if (!is_finite(estimate)) return;
    improve(&shared.best[column], to_ordered_bits(Winner::of(estimate, token)), 0.0f);
    count_estimate(shared, column, estimate);
}

// Lists a token whose score may reach the best lower bound, and updates this bound. `upper` bounds the dot product with the head's
// bias. An upper bound without a finite logit leaves the row to the full kernel, which finds the row's error if it has one.
template <class T>
__device__ __forceinline__ void offer_candidate(const Call& call, Shared<T>& shared, u32 column, u32 token, float upper,
                                                bool is_real) {
    const Row& row = shared.rows[column];
    const float raw = call.head.apply(upper, 0.0f, false), logit = row.apply(raw, token);
    if (!(raw < f32_infinity() && logit < f32_infinity())) {
        atomicMax(&shared.candidates.counts[column], Candidates::OPEN);
        return;
    }
    if (logit == -f32_infinity()) return;
    const auto least_logit = [&] {
        return row.apply(call.head.apply(lower_dot(call, shared, column, token, upper), 0.0f, false), token);
    };
    if constexpr (T::LISTS) {
        if (is_listed(shared, column)) return list_by_bound<T>(shared, column, token, logit, least_logit(), is_real);
    }
    const Noise noise{row.seed, row.position};
    const float gumbel = row.greedy ? 0.0f : noise.gumbel(Domain::Token, row.draw, token);
    const u64 key = to_ordered_bits(Winner::of(row.greedy ? logit : add_rn(logit, gumbel), token));
    const u64 best = *const_cast<volatile const u64*>(&shared.best[column].key);
    if (key >> 32 < best >> 32) return;
    list_candidate(shared, column, key);
    const float least = least_logit();
    if (!is_finite(least)) return;
    improve(&shared.best[column], to_ordered_bits(Winner::of(row.greedy ? least : add_rn(least, gumbel), token)), 0.0f);
}

// Scores one token exactly, and updates the list or the best candidate. `dot` includes the head's bias. A token that is not real
// is never listed.
template <class T>
__device__ __forceinline__ void offer(const Call& call, Shared<T>& shared, u32 column, u32 token, float dot, bool is_real) {
    // A column beyond the batch is all zeros, but its products with an infinite or NaN weight are NaN.
    if (column >= call.row_count) return;
    if constexpr (T::CANDIDATES) return offer_candidate(call, shared, column, token, dot, is_real);
    const Row& row = shared.rows[column];
    const float raw = call.head.apply(dot, 0.0f, false);
    float logit = 0.0f;
    if (!check_logit(raw, row, token, &call.invalid[column], logit) || logit == -f32_infinity()) return;
    if constexpr (T::LISTS) {
        if (is_listed(shared, column)) list(shared, column, token, logit);
    }
    const Noise noise{row.seed, row.position};
    const float score = row.greedy ? logit : add_rn(logit, noise.gumbel(Domain::Token, row.draw, token));
    improve(&shared.best[column], to_ordered_bits(Winner::of(score, token)), logit);
}

// Scores a queue of a tile that begins with token `first`. Thread `worker` of `workers` handles every `workers`-th entry.
template <class T>
__device__ __forceinline__ void score(const Call& call, Shared<T>& shared, u32 queue, u32 queued, u32 first, u32 worker,
                                      u32 workers, bool is_real = true) {
    for (u32 slot = worker; slot < queued; slot += workers) {
        const Contender contender = shared.queue[queue][slot];
        offer(call, shared, contender.place & 0xffff, call.first_token + first + (contender.place >> 16), contender.dot, is_real);
    }
}

}  // namespace flash_sampling::fused_hopper
