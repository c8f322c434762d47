// The largest logit of every granule of 16 tokens, which the fused kernel stores beside the logits: what a pass over a row need
// not read.
#pragma once

#include "../element.cuh"
#include "../math.cuh"

namespace flash_sampling {

// Bits of f16, rounded to the nearest: [octets of rows][granules][8].
struct BlockMaxima {
    static constexpr u32 TOKENS = 16, ROWS = 8;

    static FS_FUNCTION u32 granules_of(u32 tokens) { return (tokens + TOKENS - 1) / TOKENS; }
    // Where a row of an octet begins.
    static FS_FUNCTION u64 octet(u32 octet, u32 granules) { return static_cast<u64>(octet) * granules * ROWS; }

    // Rounding is by half a unit in the last place, 2^-11 of the number and at least 2^-25; here doubled.
    static constexpr float SLACK = 0x1p-10f, LEAST_SLACK = 0x1p-24f;

    // No token of a granule whose top, as it is stored, is below this has a raw logit of `raw` or above. What is stored as
    // infinite may have been finite, beyond the largest f16, 65504.
    static FS_FUNCTION float least_maximum(float raw) {
        if (!(raw > -65000.0f)) return -f32_infinity();
        return fminf(raw - fma_rn(fabsf(raw), 2.0f * SLACK, 2.0f * LEAST_SLACK), 65000.0f);
    }

    // A raw logit that the granule's largest is not below, where it is no more than 65000.
    static FS_FUNCTION float lower_bound(float top) { return fma_rn(fabsf(top), -SLACK, top) - LEAST_SLACK; }
};

}  // namespace flash_sampling
