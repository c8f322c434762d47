// An upper bound of the noise of a granule's tokens, and the largest logit that cannot reach the score cutoff with this noise.
#pragma once

#include "granule.cuh"

namespace flash_sampling {

// An upper bound of the noise of every token: core's GUMBEL_MAX, 65 ln 2, plus rounding.
[[maybe_unused]] constexpr float NOISE_CEILING = 45.0547f;

FS_FUNCTION float log2_fast(u32 x) {
#ifdef __CUDA_ARCH__
    float y;
    asm("lg2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(u32_to_f32(x)));
    return y;
#else
    return log2f(u32_to_f32(x));
#endif
}

// Returns an upper bound of the noise of a granule's tokens: -ln(minimum_bits 2^-32), with an error of up to 6e-6.
FS_FUNCTION float noise_bound(u32 minimum_bits) {
    return fminf(0.69314718f * (32.0f - log2_fast(minimum_bits)), NOISE_CEILING);
}

// Returns a lower bound of the leader's score; -inf for the few words with a loose bound. The leader's exponential is -ln(1 - v)
// / 16, with v below (minimum_bits + 1) 2^-28, and -ln(1 - v) is below v e^(v/2 + v^2/2) up to v = 1/2. `bound` is
// -ln(minimum_bits 2^-32).
FS_FUNCTION float leader_score_at_least(float logit, float bound, u32 minimum_bits) {
    const float v = u32_to_f32(minimum_bits) * 0x1p-28f;
    if (v > 0.5f || minimum_bits < 1u << 12) return -f32_infinity();
    return logit + bound - 0.5f * fma_rn(v, v, v) - 5e-4f - 1e-6f * fabsf(logit);
}

// Returns a logit up to which no token reaches the score cutoff `cut` with noise of at most `bound`. The margin covers all
// rounding errors: 1.3e-7 |g| + 3.7e-7 in the noise, 6e-6 in the bound, 2^-24 |score| in the score, and the errors of this
// arithmetic. A logit of -inf reaches no cutoff.
FS_FUNCTION float logit_threshold(float cut, float bound) {
    const float low = cut - (2e-5f + 1e-6f * fabsf(cut));
    return low - 1.000001f * bound;
}

}  // namespace flash_sampling
