// What the noise of a word is at most, and which words can lift a logit to a score: the twin of the bounds in the CPU
// backend's perturb.rs.
#pragma once

#include "platform.cuh"

namespace flash_sampling {

// Above the noise of every word: core's GUMBEL_MAX, 65 ln 2, and rounding.
[[maybe_unused]] constexpr float NOISE_CEILING = 45.0547f;

// About one word in 1024 lies below this one; the noise of all others is at most 10 ln 2, rounded up.
[[maybe_unused]] constexpr u32 NEAR_WORD = 1u << 22;
[[maybe_unused]] constexpr float NEAR_NOISE = 6.931473f;

// The noise of a word is at most -ln(word 2^-32), give or take 6e-6 of rounding.
FS_FUNCTION float noise_bound(u32 word) {
#ifdef __CUDA_ARCH__
    const float log2_word = __log2f(u32_to_f32(word));
#else
    const float log2_word = log2f(u32_to_f32(word));
#endif
    return fminf(0.69314718f * (32.0f - log2_word), NOISE_CEILING);
}

// The largest word that could bring a logit of at most `top` (not -inf) to a score of `cut`.
//
// A word x gives v >= x 2^-32 and an exponential E >= v, so its Gumbel is at most -ln(x 2^-32). The slack covers what
// the computed Gumbel and the rounded sum may exceed that by. 2^y <= (1 + frac y) 2^floor(y), because 2^f is convex on
// [0, 1]: the limit is never too small, and at most 6.2% larger than it must be.
FS_FUNCTION u32 word_limit(float top, float cut) {
    const float slack = 1.53e-5f + 2.4e-7f * (fabsf(top) + fabsf(cut));
    const float y = (top - cut + slack) * 1.44269504088896340736f + 32.0f;
    if (y >= 32.0f) return 0xffffffffu;
    if (!(y >= -1.0f)) return 0;
    // A little more for the rounding of y and of the conversion.
    const float limit = bits_to_f32(static_cast<u32>((y + 127.0f) * 8388608.0f)) * 1.0001f;
    return limit < 4294967040.0f ? static_cast<u32>(limit) + 1 : 0xffffffffu;
}

// Whether no noise lifts a logit of at most `top` to a score of `cut`.
FS_FUNCTION bool cannot_reach(float top, float cut) {
    return top + NOISE_CEILING + 1e-4f * (1.0f + fabsf(top)) < cut;
}

}  // namespace flash_sampling
