// Sums over the lanes of a warp.
#pragma once

#include "platform.cuh"

#ifdef __CUDACC__

namespace flash_sampling {

// Returns the sum of the values of this lane and of all earlier lanes. All lanes call this.
template <class T>
__device__ __forceinline__ T sum_to_lane(T value) {
    T sum = value;
#pragma unroll
    for (u32 distance = 1; distance < 32; distance *= 2) {
        const T earlier = __shfl_up_sync(0xffffffffu, sum, distance);
        if (threadIdx.x % 32 >= distance) sum += earlier;
    }
    return sum;
}

}  // namespace flash_sampling

#endif
