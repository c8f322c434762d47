// Addresses in shared memory for PTX, and L2 eviction policies.
#pragma once

#include "../platform.cuh"

#ifdef FS_EMULATED
#include FS_EMULATED  // stand-ins for the processor, for this header and every other header that names FS_EMULATED
#else

namespace flash_sampling::ptx {

__device__ __forceinline__ u32 shared_address(const void* pointer) {
    return static_cast<u32>(__cvta_generic_to_shared(pointer));
}

// Returns a value that all lanes share, in a form that the compiler knows to be uniform. Values computed only from it stay in
// uniform registers, from which wgmma reads its descriptors. NOTE: a reduction, because the compiler does not always recognise
// the result of a shuffle as uniform.
__device__ __forceinline__ u32 uniform(u32 value) { return __reduce_or_sync(0xffffffffu, value); }

// Keeps the eviction order of lines, so that data that is read once evicts nothing else.
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
