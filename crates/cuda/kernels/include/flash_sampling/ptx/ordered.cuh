// Words by which blocks of a launch tell one another that what they stored is there. A fence for all of a block's stores where one
// thread calls these between barriers of the block; less than __threadfence(), which orders among all threads.
#pragma once

#include "../platform.cuh"

#ifdef __CUDACC__

namespace flash_sampling::ptx {

// Adds, and returns what was there. What was stored before is there for whoever sees the sum; what those stored whose sums this
// sees is there afterwards.
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
