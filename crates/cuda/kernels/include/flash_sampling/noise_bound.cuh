// What the noise of a granule's tokens is at most, and which logits reach a score with it.
#pragma once

#include "noise/granule.cuh"

namespace flash_sampling {

// Above the noise of every token: core's GUMBEL_MAX, 65 ln 2, and rounding.
[[maybe_unused]] constexpr float NOISE_CEILING = 45.0547f;

FS_FUNCTION float log2_fast(u32 x) {
#ifdef __CUDA_ARCH__
    return __log2f(u32_to_f32(x));
#else
    return log2f(u32_to_f32(x));
#endif
}

// The noise of a granule's tokens is at most -ln(minimum_bits 2^-32), give or take 6e-6 of rounding.
FS_FUNCTION float noise_bound(u32 minimum_bits) {
    return fminf(0.69314718f * (32.0f - log2_fast(minimum_bits)), NOISE_CEILING);
}

// A lower bound of a leader's score. Its exponential is at most v / (1 - v) / 16, with v below (minimum_bits + 1) 2^-28.
FS_FUNCTION float leader_score_at_least(float logit, u32 minimum_bits) {
    const float log2_odds = log2_fast(minimum_bits + 1) - log2_fast(0x0fffffffu - minimum_bits);
    return logit + 0.69314718f * (4.0f - log2_odds) - 1e-3f - 1e-6f * fabsf(logit);
}

// Whether a logit of at most `top` reaches a score of `cut` with noise of at most `bound`, all rounding taken in its favour:
// the noise is within 1.3e-7 |g| + 3.7e-7, its bound within 6e-6, and sums are rounded once. A logit of -inf reaches nothing.
FS_FUNCTION bool reaches(float top, float bound, float cut) {
    const float sum = top + bound;
    return sum + (2e-5f + 1e-6f * fabsf(sum)) >= cut;
}

}  // namespace flash_sampling
