// Addresses in shared memory as PTX takes them, and how long L2 should keep a line.
#pragma once

#include "../platform.cuh"

#ifdef FS_EMULATED
#include FS_EMULATED  // the processor's stand-ins for this header, and for every other one that names FS_EMULATED
#else

namespace flash_sampling::ptx {

__device__ __forceinline__ u32 shared_address(const void* pointer) {
    return static_cast<u32>(__cvta_generic_to_shared(pointer));
}

// A value that is the same in all lanes, known to be so. What comes of it alone stays in uniform registers, where wgmma takes
// its descriptors from. NOTE: of a shuffle's result the compiler does not always know it, of a reduction's it does.
__device__ __forceinline__ u32 uniform(u32 value) { return __reduce_or_sync(0xffffffffu, value); }

// Lines keep their places in the order of eviction: what passes by once pushes nothing else out.
__device__ __forceinline__ u64 policy_evict_unchanged() {
    u64 policy;
    asm volatile("createpolicy.fractional.L2::evict_unchanged.b64 %0, 1.0;" : "=l"(policy));
    return policy;
}

__device__ __forceinline__ u64 policy_evict_last() {
    u64 policy;
    asm volatile("createpolicy.fractional.L2::evict_last.b64 %0, 1.0;" : "=l"(policy));
    return policy;
}

}  // namespace flash_sampling::ptx

#endif
