// The blocks that share a row: the blocks of a cluster, or one block on GPUs without clusters.
#pragma once

#include "../ptx/cluster.cuh"

#ifdef __CUDACC__

namespace flash_sampling {

struct Team {
#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 900
    static __device__ __forceinline__ u32 size() { return ptx::cluster_size(); }
    static __device__ __forceinline__ u32 rank() { return ptx::cluster_rank(); }
    // Waits for all threads of all blocks, and orders their stores, also to shared memory.
    static __device__ __forceinline__ void sync() { ptx::cluster_sync(); }
    // Waits for all threads of all blocks, but orders only reads.
    static __device__ __forceinline__ void sync_relaxed() { ptx::cluster_sync_relaxed(); }
    static __device__ __forceinline__ u64 load(const u64* pointer, u32 of) { return ptx::load_cluster(pointer, of); }
#else
    static __device__ __forceinline__ u32 size() { return 1; }
    static __device__ __forceinline__ u32 rank() { return 0; }
    static __device__ __forceinline__ void sync() { __syncthreads(); }
    static __device__ __forceinline__ void sync_relaxed() {}
    static __device__ __forceinline__ u64 load(const u64* pointer, u32) { return *static_cast<const volatile u64*>(pointer); }
#endif
};

}  // namespace flash_sampling

#endif
