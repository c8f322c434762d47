// Atomic accesses that lack a CUDA C++ function in some versions of NVRTC.
#pragma once

#include "address.cuh"

#ifndef FS_EMULATED

namespace flash_sampling::ptx {

__device__ __forceinline__ u64 load_relaxed(const u64* pointer) {
    u64 value;
    asm volatile("ld.relaxed.gpu.global.u64 %0, [%1];" : "=l"(value) : "l"(pointer) : "memory");
    return value;
}

// Writes (low, high) to 16 bytes of shared memory if these equal (old_low, old_high). Returns the old bytes in the latter.
__device__ __forceinline__ void exchange_if(void* at, u64& old_low, u64& old_high, u64 low, u64 high) {
    asm volatile(
        "{ .reg .b128 old, now, was;\n"
        "mov.b128 old, {%0, %1};\n"
        "mov.b128 now, {%3, %4};\n"
        "atom.relaxed.cta.shared.cas.b128 was, [%2], old, now;\n"
        "mov.b128 {%0, %1}, was; }"
        : "+l"(old_low), "+l"(old_high)
        : "r"(shared_address(at)), "l"(low), "l"(high)
        : "memory");
}

}  // namespace flash_sampling::ptx

#endif
