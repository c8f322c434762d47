// A step of radix select: finds the next digit of the n-th largest key from a histogram of digits.
#pragma once

#include "../platform.cuh"

#ifdef __CUDACC__

namespace flash_sampling {

constexpr u32 DIGIT_BITS = 11;

// Finds the digit of the `need`-th largest key, from search.histogram with 1 << DIGIT_BITS words. Writes search.digit,
// search.above (keys with larger digits) and search.within (keys with this digit). One warp calls this.
template <class Search>
__device__ __forceinline__ void find_digit(Search& search, u32 need) {
    constexpr u32 SHARE = (1 << DIGIT_BITS) / 32;
    const u32 lane = threadIdx.x;
    // Lane 0 has the highest digits.
    const u32 base = (31 - lane) * SHARE;
    u32 sum = 0;
    for (u32 i = 0; i < SHARE; ++i) sum += search.histogram[base + (i + lane) % SHARE];
    u32 upto = sum;
    for (u32 distance = 1; distance < 32; distance *= 2) {
        const u32 other = __shfl_up_sync(0xffffffffu, upto, distance);
        if (lane >= distance) upto += other;
    }
    u32 above = upto - sum;
    if (above < need && need <= upto) {
        u32 digit = base + SHARE - 1;
        while (above + search.histogram[digit] < need) above += search.histogram[digit--];
        search.digit = digit;
        search.above = above;
        search.within = search.histogram[digit];
    }
}

}  // namespace flash_sampling

#endif
