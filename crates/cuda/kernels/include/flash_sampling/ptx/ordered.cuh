// Atomic words by which the blocks of a launch order their stores. If one thread uses such a word between two barriers of its
// block, it orders all stores of the block, at less cost than __threadfence().
#pragma once

#include "../platform.cuh"

#ifdef __CUDACC__

namespace flash_sampling::ptx {

// Adds, and returns the old value. Releases earlier stores to every thread that reads the sum, and acquires the stores of threads
// whose sums this thread reads.
__device__ __forceinline__ u32 add_ordered(u32* to, u32 more) {
#ifdef __CUDA_ARCH__
    u32 before;
    asm volatile("atom.acq_rel.gpu.global.add.u32 %0, [%1], %2;" : "=r"(before) : "l"(to), "r"(more) : "memory");
    return before;
#else
    return atomicAdd(to, more);
#endif
}

__device__ __forceinline__ void store_released(u32* to, u32 value) {
    asm volatile("st.release.gpu.global.u32 [%0], %1;" ::"l"(to), "r"(value) : "memory");
}

__device__ __forceinline__ u32 load_acquired(const u32* from) {
    u32 value;
    asm volatile("ld.acquire.gpu.global.u32 %0, [%1];" : "=r"(value) : "l"(from) : "memory");
    return value;
}

}  // namespace flash_sampling::ptx

#endif
