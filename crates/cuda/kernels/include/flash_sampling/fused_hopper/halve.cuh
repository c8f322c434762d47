// Reductions over the eight lanes that hold the same columns of a warp's accumulators.
#pragma once

#include "../platform.cuh"

namespace flash_sampling::fused_hopper {

// Reduces values that eight lanes hold. While each lane holds more than LEAST values, a step halves them between pairs of lanes.
// `at`, the index of x[0], becomes the index of the remaining x[0]. LEAST values are adjacent, and the next LEAST values are
// LEAST * STEP further. Returns whether this lane writes the remaining values.
template <int LEAST, int STEP, int HELD, class X, class Join>
__device__ __forceinline__ bool reduce_by_halves(X (&x)[HELD], u32 lane, u32& at, Join join) {
    bool owns = true;
    int held = HELD;
#pragma unroll
    for (int apart = 16; apart >= 4; apart /= 2) {
        const bool upper = lane & apart;
        if (held > LEAST) {
            held /= 2;
#pragma unroll
            for (int i = 0; i < HELD / 2; ++i) {
                if (i < held) {
                    const X other = __shfl_xor_sync(0xffffffffu, upper ? x[i] : x[i + held], apart);
                    x[i] = join(upper ? x[i + held] : x[i], other);
                }
            }
            at += upper ? held * STEP : 0;
        } else {
#pragma unroll
            for (int i = 0; i < LEAST; ++i) x[i] = join(x[i], __shfl_xor_sync(0xffffffffu, x[i], apart));
            owns &= !upper;
        }
    }
    return owns;
}

}  // namespace flash_sampling::fused_hopper
