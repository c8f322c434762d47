// Copies from device to shared memory that run while the threads compute (compute capability 8.0 and up).
#pragma once

#include "address.cuh"

#ifndef FS_EMULATED

namespace flash_sampling::ptx {

// Copies the first `bytes` of 16, and fills with zeros; reads nothing beyond. Both addresses are multiples of 16. Does nothing
// unless `is_wanted`, without a branch, so that the compiler can move the copy among other work.
__device__ __forceinline__ void copy_async(u32 to, const void* from, u32 bytes, bool is_wanted, u64 policy) {
    asm volatile(
        "{ .reg .pred wanted;\n"
        "setp.ne.b32 wanted, %3, 0;\n"
        "@wanted cp.async.cg.shared.global.L2::cache_hint [%0], [%1], 16, %2, %4; }" ::"r"(to),
        "l"(from), "r"(bytes), "r"(static_cast<u32>(is_wanted)), "l"(policy)
        : "memory");
}

// Ends a group: the copies of this thread since the previous group.
__device__ __forceinline__ void copy_async_commit() { asm volatile("cp.async.commit_group;" ::: "memory"); }

// Waits until at most the last `PENDING` groups of this thread are in flight.
template <int PENDING>
__device__ __forceinline__ void copy_async_wait() {
    asm volatile("cp.async.wait_group %0;" ::"n"(PENDING) : "memory");
}

}  // namespace flash_sampling::ptx

#endif
