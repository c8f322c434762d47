// Clusters of blocks, which can read the shared memory of all blocks of their cluster. Compute capability 9.0 and up.
#pragma once

#include "mbarrier.cuh"

namespace flash_sampling::ptx {

__device__ __forceinline__ u32 cluster_size() {
    u32 size;
    asm volatile("mov.u32 %0, %%cluster_nctarank;" : "=r"(size));
    return size;
}

// Waits for all threads of the cluster, but orders no stores.
__device__ __forceinline__ void cluster_sync_relaxed() {
    asm volatile("barrier.cluster.arrive.relaxed.aligned;\nbarrier.cluster.wait.aligned;" ::: "memory");
}

// Loads from the same offset in the shared memory of block `rank` of the cluster.
__device__ __forceinline__ u64 load_cluster(const u64* pointer, u32 rank) {
    u64 value;
    asm volatile(
        "{ .reg .b32 remote;\n"
        "mapa.shared::cluster.u32 remote, %1, %2;\n"
        "ld.shared::cluster.u64 %0, [remote]; }"
        : "=l"(value)
        : "r"(shared_address(pointer)), "r"(rank)
        : "memory");
    return value;
}

}  // namespace flash_sampling::ptx
