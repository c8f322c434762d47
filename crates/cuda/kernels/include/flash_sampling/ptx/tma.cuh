// The bulk copy engine: boxes of a 2-D tensor into 128-byte swizzled shared memory, and contiguous bytes.
#pragma once

#include "mbarrier.cuh"

namespace flash_sampling::ptx {

// A tensor map, which the driver encodes; opaque here.
struct alignas(64) TensorMap {
    u64 words[16];
};

#ifndef FS_EMULATED
__device__ __forceinline__ void prefetch_map(const TensorMap* map) {
    asm volatile("prefetch.tensormap [%0];" ::"l"(map) : "memory");
}

// Copies the box at (column, row), and counts its bytes at the barrier.
__device__ __forceinline__ void copy_box(void* to, const TensorMap* map, u64* barrier, i32 column, i32 row, u64 policy) {
    asm volatile(
        "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint"
        " [%0], [%1, {%3, %4}], [%2], %5;" ::"r"(shared_address(to)),
        "l"(map), "r"(shared_address(barrier)), "r"(column), "r"(row), "l"(policy)
        : "memory");
}

// Copies `bytes` bytes, and counts them at the barrier. The number and both addresses are multiples of 16.
__device__ __forceinline__ void copy_bytes(u32 to, const void* from, u32 bytes, u64* barrier, u64 policy) {
    asm volatile(
        "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint [%0], [%1], %2, [%3], %4;" ::"r"(to),
        "l"(from), "r"(bytes), "r"(shared_address(barrier)), "l"(policy)
        : "memory");
}

// Copies the box into every block of the mask `blocks`, at the same offset, and counts its bytes at each block's barrier.
__device__ __forceinline__ void copy_box_multicast(void* to, const TensorMap* map, u64* barrier, i32 column, i32 row,
                                                   u16 blocks, u64 policy) {
    asm volatile(
        "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::cluster.L2::cache_hint"
        " [%0], [%1, {%3, %4}], [%2], %5, %6;" ::"r"(shared_address(to)),
        "l"(map), "r"(shared_address(barrier)), "r"(column), "r"(row), "h"(blocks), "l"(policy)
        : "memory");
}
#endif

}  // namespace flash_sampling::ptx
