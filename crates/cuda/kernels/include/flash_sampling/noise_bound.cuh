// An upper bound of the noise of a granule's tokens, and the test whether a logit can reach the score cutoff.
#pragma once

#include "noise/granule.cuh"

namespace flash_sampling {

// An upper bound of the noise of every token: core's GUMBEL_MAX, 65 ln 2, plus rounding.
[[maybe_unused]] constexpr float NOISE_CEILING = 45.0547f;

FS_FUNCTION float log2_fast(u32 x) {
#ifdef __CUDA_ARCH__
    return __log2f(u32_to_f32(x));
#else
    return log2f(u32_to_f32(x));
#endif
}

// Returns an upper bound of the noise of a granule's tokens: -ln(minimum_bits 2^-32), rounded with an error of up to
// 6e-6.
FS_FUNCTION float noise_bound(u32 minimum_bits) {
    return fminf(0.69314718f * (32.0f - log2_fast(minimum_bits)), NOISE_CEILING);
}

// Returns a lower bound of the leader's score. The leader's exponential is at most v / (1 - v) / 16, with v below
// (minimum_bits + 1) 2^-28.
FS_FUNCTION float leader_score_at_least(float logit, u32 minimum_bits) {
    const float log2_odds = log2_fast(minimum_bits + 1) - log2_fast(0x0fffffffu - minimum_bits);
    return logit + 0.69314718f * (4.0f - log2_odds) - 1e-3f - 1e-6f * fabsf(logit);
}

// Returns whether a logit of at most `top` can reach the score cutoff `cut` with noise of at most `bound`. The margin
// covers all rounding errors: 1.3e-7 |g| + 3.7e-7 in the noise, 6e-6 in the bound, and one rounding per sum. A logit of
// -inf reaches no cutoff.
FS_FUNCTION bool reaches(float top, float bound, float cut) {
    const float sum = top + bound;
    return sum + (2e-5f + 1e-6f * fabsf(sum)) >= cut;
}

}  // namespace flash_sampling
