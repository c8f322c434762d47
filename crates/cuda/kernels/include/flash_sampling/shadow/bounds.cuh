// Bounds of dot products with the weight, from the integer products of a shadow's codes and the digits of hidden states.
#pragma once

#include "../perturb.cuh"
#include "pass.cuh"

namespace flash_sampling {

// The factors of one token's bound, from the shadow.
struct TokenBound {
    float scale = 0.0f, error = 0.0f, norm = 0.0f;

    // Returns the factors of row `at` of the weight.
    static FS_FUNCTION TokenBound of(const Candidates& from, u32 at) { return {from.scales[at], from.errors[at], from.norms[at]}; }
};

// Returns an upper bound of a dot product from the sums of its high and low digits. The products keep their precision even if
// the dot product is tiny, because an integer times a scale is a normal number.
FS_FUNCTION float upper_dot(i32 high, i32 low, const TokenBound& token, const HiddenBound& row) {
    const float sum = fma_rn(256.0f, i32_to_f32(high), i32_to_f32(low));
    return fma_rn(mul_rn(sum, row.scale), token.scale, row.of(token.error, token.norm));
}

// The distance from an upper bound to a lower bound, as a multiple of the error bound.
[[maybe_unused]] constexpr float LOWER_DISTANCE = 2.00001f;

// Returns `upper`, an upper bound of a token's dot product with the head's bias, minus `distance` error bounds. With
// LOWER_DISTANCE, the result is a lower bound. A smaller `upper` also gives a lower bound.
FS_FUNCTION float lower_dot(const Call& call, const Candidates& candidates, const HiddenBound& row, u32 at, float upper,
                            float distance) {
    const float apart = distance * row.of(candidates.errors[at], candidates.norms[at]);
    return lowered(upper - apart, call.bias ? fabsf(call.bias[at]) : 0.0f);
}

}  // namespace flash_sampling
