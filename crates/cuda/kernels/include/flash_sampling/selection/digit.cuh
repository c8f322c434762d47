// One step of radix select: finds the next digit of the n-th largest key, from a histogram of this digit.
#pragma once

#include "../warp.cuh"

#ifdef __CUDACC__

namespace flash_sampling {

constexpr u32 DIGIT_BITS = 11;

// Finds the digit of the `need`-th largest key, from search.histogram with 1 << DIGIT_BITS words. Writes search.digit,
// search.above (the number of keys with larger digits) and search.within (the number of keys with this digit). Writes nothing if
// there are fewer than `need` keys. One warp calls this.
template <class Search>
__device__ __forceinline__ void find_digit(Search& search, u32 need) {
    constexpr u32 SHARE = (1 << DIGIT_BITS) / 32;
    const u32 lane = threadIdx.x % 32;
    // Each lane sums SHARE digits. Lane 0 has the highest digits.
    const u32 base = (31 - lane) * SHARE;
    u32 sum = 0;
#pragma unroll 4
    for (u32 i = 0; i < SHARE; ++i) sum += search.histogram[base + (i + lane) % SHARE];
    const u32 upto = sum_to_lane(sum);
    const u32 reached = __ballot_sync(0xffffffffu, upto >= need);
    if (!reached) return;
    // The first lane whose sum of keys reaches `need` has the digit. Each lane then takes two of this lane's digits.
    const u32 owner = __ffs(static_cast<i32>(reached)) - 1;
    const u32 before = __shfl_sync(0xffffffffu, upto - sum, owner), high = (32 - owner) * SHARE - 1 - 2 * lane;
    const u32 larger = search.histogram[high], smaller = search.histogram[high - 1];
    static_assert(SHARE == 64, "two digits a lane");
    const u32 end = before + sum_to_lane(larger + smaller), middle = end - smaller, begin = middle - larger;
    if (begin >= need || end < need) return;
    const bool is_larger = middle >= need;
    search.digit = is_larger ? high : high - 1;
    search.above = is_larger ? begin : middle;
    search.within = is_larger ? larger : smaller;
}

}  // namespace flash_sampling

#endif
