// Single instructions on registers that the compiler does not generate.
#pragma once

#include "address.cuh"

#ifndef FS_EMULATED

namespace flash_sampling::ptx {

// Returns a constant whose value the compiler does not know, in a register that no earlier instruction can use.
template <u32 VALUE>
__device__ __forceinline__ u32 opaque() {
    u32 value;
    asm volatile("mov.u32 %0, %1;" : "=r"(value) : "n"(VALUE));
    return value;
}

// Returns a float whose bits outside `kept` come from `tag`. NOTE: with a bit cast, the compiler keeps all accumulators as
// integers, and the products of a step wait for the moves.
__device__ __forceinline__ float tagged(float x, u32 kept, u32 tag) {
    float y;
    asm("lop3.b32 %0, %1, %2, %3, 0xea;" : "=f"(y) : "f"(x), "r"(kept), "r"(tag));
    return y;
}

// Returns the larger number for each of the two halves, in f16.
__device__ __forceinline__ u32 max_of_pairs(u32 a, u32 b) {
    u32 largest;
    asm("max.f16x2 %0, %1, %2;" : "=r"(largest) : "r"(a), "r"(b));
    return largest;
}

// Returns two floats rounded to f16, with `low` in the low half.
__device__ __forceinline__ u32 pair_of_halves(float low, float high) {
    u32 pair;
    asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(high), "f"(low));
    return pair;
}

}  // namespace flash_sampling::ptx

#endif
