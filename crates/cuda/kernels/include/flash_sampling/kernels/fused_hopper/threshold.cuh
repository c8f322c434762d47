// What surely loses: bounds on the dot products of a tile, from the best that all blocks have found.
#pragma once

#include "marks.cuh"

namespace flash_sampling::fused_hopper {

// The threshold of a row beyond the batch, the largest finite float: no finite dot product is above it.
constexpr u32 LOSES_ALWAYS = 0x7f7fffffu;

__device__ __forceinline__ u64 load_relaxed(const u64* pointer) {
    u64 value;
    asm volatile("ld.relaxed.gpu.global.u64 %0, [%1];" : "=l"(value) : "l"(pointer) : "memory");
    return value;
}

// The threshold of a row from its best winner so far.
__device__ __forceinline__ float losing_dot_of(const Call& call, const Row& row, u64 key, float noise_bound,
                                               u32 next_token) {
    if (key == 0) return -f32_infinity();
    const Winner winner = from_ordered_bits(key);
    const bool plain =
        row.inv_temperature == 1.0f && row.biases == 0 && call.head.scale == 1.0f && call.head.soft_cap == 0.0f;
    // An equal logit of a later token loses a greedy row.
    if (row.greedy && plain && winner.token < next_token) return winner.score;
    return losing_dot(winner.score, row.greedy ? 0.0f : noise_bound, call.head, row);
}

// The same as below in a block's first tile, when every block has news: waits for what the others have found.
__device__ __forceinline__ float first_losing_dot(const Call& call, const Row* rows, const Best* best, u32 column,
                                                  float noise_bound, u32 next_token) {
    if (column >= call.row_count) return bits_to_f32(LOSES_ALWAYS);
    const u64 mine = best[column].key;
    const u64 theirs = atomicMax(&call.best[column], mine);
    return losing_dot_of(call, rows[column], mine > theirs ? mine : theirs, noise_bound, next_token);
}

// Tells the other blocks what this one has found for a row; returns the threshold from what all have found.
__device__ __forceinline__ float refreshed_losing_dot(const Call& call, const Row* rows, const Best* best, u32 column,
                                                      float noise_bound, u32 next_token) {
    if (column >= call.row_count) return bits_to_f32(LOSES_ALWAYS);
    const Row& row = rows[column];
    const u64 mine = *const_cast<volatile const u64*>(&best[column].key);
    const u64 theirs = load_relaxed(&call.best[column]);
    if (mine > theirs) atomicMax(&call.best[column], mine);
    return losing_dot_of(call, row, mine > theirs ? mine : theirs, noise_bound, next_token);
}

// Scores one token exactly, offers it, and lists it.
template <class T>
__device__ __forceinline__ void offer_to(const Call& call, Shared<T>& shared, u32 column, u32 token, float dot) {
    if constexpr (T::LISTS) {
        if (column >= call.row_count) return;
        const Row& row = shared.rows[column];
        if (row.greedy > 1) {
            const float raw = call.head.apply(dot, 0.0f, false);
            float logit = 0.0f;
            if (!check_logit(raw, row, token, &call.invalid[column], logit) || logit == -f32_infinity()) return;
            if (*const_cast<volatile u32*>(&shared.takes)) list(shared, column, token, logit);
            improve(&shared.best[column], to_ordered_bits(Winner::of(logit, token)), logit);
            return;
        }
    }
    offer(call, shared.rows, shared.best, column, token, dot);
}

// The threshold of a row for the next tile.
template <class T>
__device__ __forceinline__ void refresh_losing(const Call& call, Shared<T>& shared, u32 column, u32 next_token) {
    const float losing = refreshed_losing_dot(call, shared.rows, shared.best, column, NEAR_NOISE, next_token);
    if constexpr (T::LISTS) {
        if (column < call.row_count && shared.rows[column].greedy > 1) {
            const u64 mine = *const_cast<volatile const u64*>(&shared.best[column].key);
            const u64 theirs = load_relaxed(&call.best[column]);
            shared.losing[column] = is_list_full(shared, column)
                                        ? bits_to_f32(LOSES_ALWAYS)
                                        : listed_losing_dot(call, shared, column, mine > theirs ? mine : theirs);
            return;
        }
    }
    shared.losing[column] = losing;
}

// The same within a block's first tile, after a pass.
template <class T>
__device__ __forceinline__ void first_losing(const Call& call, Shared<T>& shared, u32 column, float noise_bound, bool is_last,
                                             u32 size, u32 next_token) {
    const float losing = first_losing_dot(call, shared.rows, shared.best, column, noise_bound, next_token);
    if constexpr (T::LISTS) {
        if (is_last)
            guess_cut(call, shared, column, size);
        else
            post(call, shared, column);
        if (column == 0 && is_last) shared.takes = 1;
        if (column < call.row_count && shared.rows[column].greedy > 1) {
            const u64 mine = shared.best[column].key, theirs = load_relaxed(&call.best[column]);
            shared.losing[column] = listed_losing_dot(call, shared, column, mine > theirs ? mine : theirs);
            return;
        }
    }
    shared.losing[column] = losing;
}

}  // namespace flash_sampling::fused_hopper
