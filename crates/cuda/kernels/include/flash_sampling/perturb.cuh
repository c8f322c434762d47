// From one logit to a winner: errors of invalid logits, thresholds below which tokens surely lose, and the final draw.
#pragma once

#include "abi.cuh"
#include "noise/noise.cuh"
#include "noise/bound.cuh"
#include "summary/winner.cuh"

namespace flash_sampling {

// Returns the key of an invalid logit; all ones for a valid logit. The order of errors within a row is core's: an invalid raw
// logit precedes an invalid transformed one, then the lower token precedes.
FS_FUNCTION u64 invalid_key(float logit, u32 token, u32 stage) {
    if (logit < f32_infinity()) return ~0ull;
    return static_cast<u64>(stage) << 33 | static_cast<u64>(token) << 1 | static_cast<u64>(!is_nan(logit));
}

// Lowers `l`, finite or overflowed, by more than the rounding errors of `l` and the summand `added`. The constant covers
// denormals.
FS_FUNCTION float lowered(float l, float added = 0.0f) {
    l = fminf(l, bits_to_f32(0x7f7fffffu));
    return l - 1e-6f * (fabsf(l) + added) - 1e-37f;
}

// Returns the threshold below which no token of a row can win. It bounds the dot product with the head's bias, before the head's
// soft-cap (`before_cap` undoes the soft-cap).
//
// `logit_threshold` bounds the transformed logit. Then the function undoes the transforms, and widens each result by more than
// its rounding. NaN and +inf exceed every threshold. The threshold is a decreasing, concave function of the noise bound.
FS_FUNCTION float capped_threshold(float best, float noise_bound, const HeadTransform& head, const Row& row) {
    if (best == -f32_infinity()) return best;
    float l = logit_threshold(best, noise_bound);
    if (row.inv_temperature != 1.0f) l = lowered(l / row.inv_temperature);
    if (row.transform().is_penalised()) {
        // The bound for every penalty of the row: the smallest values raise a logit most.
        const Penalty least = *row.transform().penalties();
        l = lowered(l + least.subtract, fabsf(least.subtract));
        l = lowered(l < 0.0f ? l / least.repetition : l * least.repetition);
    }
    if (row.biases) l = lowered(l - row.largest_bias, row.largest_bias);
    return head.scale != 1.0f ? lowered(l / head.scale) : l;
}

// Undoes the head's soft-cap of a threshold.
FS_FUNCTION float before_cap(float l, const HeadTransform& head) {
    if (head.soft_cap != 0.0f) {
        const float t = l / head.soft_cap;
        if (t >= 1.00001f) {
            l = f32_infinity();
        } else if (t <= -1.0f) {
            l = -f32_infinity();
        } else {
            // The computed tanh is within 4e-7 of the true one; the code takes another 1e-6 away on both sides.
            const float below = t - 2e-6f;
            l = below <= -1.0f ? -f32_infinity() : below >= 0.99999f ? 6.0f : atanhf(below);
            l = (l - 1e-5f * fabsf(l)) * head.soft_cap;
        }
    }
    const float largest = bits_to_f32(0x7f7fffffu);
    return l > largest ? largest : l;
}

FS_FUNCTION float dot_threshold(float best, float noise_bound, const HeadTransform& head, const Row& row) {
    return before_cap(capped_threshold(best, noise_bound, head, row), head);
}

// A line at or below `dot_threshold` for every noise bound from 0 to NOISE_CEILING: a chord of `capped_threshold`, lowered by
// more than its rounding. The chord needs a concave function, so the smallest repetition penalty must be at most 1. The host
// ensures this, because its search for the smallest penalties starts at 1.
struct ThresholdLine {
    float at_zero, slope;

    static FS_FUNCTION ThresholdLine flat(float capped) { return {capped, 0.0f}; }
    static FS_FUNCTION ThresholdLine of(float best, const HeadTransform& head, const Row& row) {
        const float first = capped_threshold(best, 0.0f, head, row), last = capped_threshold(best, NOISE_CEILING, head, row);
        return {lowered(first, fabsf(last)), (last - first) / NOISE_CEILING};
    }
    // Returns the line of a row for tokens from `next_token` on. `key` has the ordered bits of the row's best winner so far; 0 =
    // none. A row without noise has one threshold.
    static FS_FUNCTION ThresholdLine of_best(u64 key, u32 next_token, const HeadTransform& head, const Row& row) {
        if (key == 0) return flat(-f32_infinity());
        const Winner winner = from_ordered_bits(key);
        if (!row.greedy) return of(winner.score, head, row);
        const bool is_plain = row.inv_temperature == 1.0f && row.biases == 0 && head.scale == 1.0f && head.soft_cap == 0.0f;
        // A later token with an equal logit loses.
        if (is_plain && winner.token < next_token) return flat(winner.score);
        return flat(capped_threshold(winner.score, 0.0f, head, row));
    }
    // Returns the threshold. It is NaN if the chord exceeds the range of floats; no dot product is at or below NaN.
    FS_FUNCTION float dot_threshold(float noise_bound, const HeadTransform& head) const {
        return before_cap(fma_rn(slope, noise_bound, at_zero), head);
    }
};

#ifdef __CUDACC__

// Computes the transformed logit of a raw one. Returns whether it is valid, and records an invalid one in the row's `invalid`.
template <class RowOrTransform>
__device__ __forceinline__ bool check_logit(float raw, const RowOrTransform& row, u32 token, u64* invalid, float& logit) {
    u64 key = invalid_key(raw, token, 0);
    if (key == ~0ull) {
        logit = row.apply(raw, token);
        key = invalid_key(logit, token, 1);
    }
    if (key == ~0ull) return true;
    atomicMin(invalid, key);
    return false;
}

// As check_logit, but returns the transformed logit; -inf for an invalid one.
template <class RowOrTransform>
__device__ __forceinline__ float checked_logit(float raw, const RowOrTransform& row, u32 token, u64* invalid) {
    float logit = 0.0f;
    return check_logit(raw, row, token, invalid, logit) ? logit : -f32_infinity();
}

// Returns the draw of a row, after every block has arrived.
__device__ __forceinline__ Draw conclude(u64 best, u64 invalid, float logit) {
    if (invalid != ~0ull) {
        const Status status = invalid & 1 ? Status::PositiveInfinity : Status::NaN;
        return {static_cast<u32>(invalid >> 1), static_cast<float>(static_cast<u32>(invalid >> 33)), 0.0f, status};
    }
    if (best == 0) return {0xffffffffu, -f32_infinity(), -f32_infinity(), Status::NoFiniteLogit};
    const Winner winner = from_ordered_bits(best);
    return {winner.token, winner.score, logit, Status::Drawn};
}

#endif

}  // namespace flash_sampling
