// The largest logit of every block of 16 tokens (a granule). The fused kernel stores them besides its logits;
// find_block_maxima.cuh finds those of other logits. A pass over a row uses them to skip blocks.
#pragma once

#include "../element.cuh"
#include "../math.cuh"

namespace flash_sampling {

// Bits of f16, rounded to the nearest: [octets of rows][granules][8].
struct BlockMaxima {
    static constexpr u32 TOKENS = 16, ROWS = 8;

    static FS_FUNCTION u32 granules_of(u32 tokens) { return (tokens + TOKENS - 1) / TOKENS; }
    // Returns the index of an octet's first element.
    static FS_FUNCTION u64 octet(u32 octet, u32 granules) { return static_cast<u64>(octet) * granules * ROWS; }

    // Twice the largest rounding error, which is half a unit in the last place: 2^-11 of the number, or 2^-25 if larger.
    static constexpr float SLACK = 0x1p-10f, LEAST_SLACK = 0x1p-24f;

    // Returns a bound: a granule whose stored maximum is below it has no raw logit of `raw` or above. A stored infinity may
    // have been finite, beyond the largest f16, 65504.
    static FS_FUNCTION float least_maximum(float raw) {
        if (!(raw > -65000.0f)) return -f32_infinity();
        return fminf(raw - fma_rn(fabsf(raw), 2.0f * SLACK, 2.0f * LEAST_SLACK), 65000.0f);
    }

    // Returns a lower bound of the granule's largest raw logit, for a stored maximum of at most 65000.
    static FS_FUNCTION float lower_bound(float top) { return fma_rn(fabsf(top), -SLACK, top) - LEAST_SLACK; }
};

}  // namespace flash_sampling
