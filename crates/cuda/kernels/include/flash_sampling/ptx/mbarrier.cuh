// Barriers in shared memory that count arrivals and bytes.
#pragma once

#include "address.cuh"

#ifndef FS_EMULATED

namespace flash_sampling::ptx {

__device__ __forceinline__ void mbarrier_init(u64* barrier, u32 arrivals) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(shared_address(barrier)), "r"(arrivals) : "memory");
}

// Makes the initialised barriers visible to the copy engine and to the cluster.
__device__ __forceinline__ void mbarrier_init_fence() {
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
}

// Makes a thread's stores to shared memory visible to the copy engine and to the tensor cores.
__device__ __forceinline__ void shared_writes_fence() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }

__device__ __forceinline__ void mbarrier_arrive(u64* barrier) {
    asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(shared_address(barrier)) : "memory");
}

// Arrives `arrivals` times.
__device__ __forceinline__ void mbarrier_arrive(u64* barrier, u32 arrivals) {
    asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0], %1;" ::"r"(shared_address(barrier)), "r"(arrivals) : "memory");
}

__device__ __forceinline__ void mbarrier_arrive_expect(u64* barrier, u32 bytes) {
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(shared_address(barrier)), "r"(bytes)
                 : "memory");
}

// Returns the address of the same barrier in block `rank` of the cluster.
__device__ __forceinline__ u32 cluster_address(const u64* barrier, u32 rank) {
    u32 address;
    asm volatile("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(address) : "r"(shared_address(barrier)), "r"(rank));
    return address;
}

// Arrives at a barrier of the cluster, to signal that reads are complete. NOTE: this orders no ordinary stores of other blocks.
// With .release.cluster it would, at the cost of a fence in the main loop.
__device__ __forceinline__ void mbarrier_arrive_cluster(u32 address) {
    asm volatile("mbarrier.arrive.shared::cluster.b64 _, [%0];" ::"r"(address) : "memory");
}

// Waits until the phase with this parity is complete.
__device__ __forceinline__ void mbarrier_wait(u32 address, u32 parity) {
    asm volatile(
        "{ .reg .pred done;\n"
        "again: mbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n"
        "@done bra finished;\n"
        "bra again;\n"
        "finished: }" ::"r"(address),
        "r"(parity)
        : "memory");
}
__device__ __forceinline__ void mbarrier_wait(const u64* barrier, u32 parity) {
    mbarrier_wait(shared_address(barrier), parity);
}

// A barrier for `threads` threads of the block. Barrier 0 is __syncthreads.
__device__ __forceinline__ void named_barrier(u32 id, u32 threads) {
    asm volatile("bar.sync %0, %1;" ::"r"(id), "r"(threads) : "memory");
}

// Arrives at a barrier for `threads` threads, without waiting.
__device__ __forceinline__ void named_arrive(u32 id, u32 threads) {
    asm volatile("bar.arrive %0, %1;" ::"r"(id), "r"(threads) : "memory");
}

// Reads blockIdx.x again. Otherwise the compiler keeps an earlier value in a register.
__device__ __forceinline__ u32 block_index() {
    u32 index;
    asm volatile("mov.u32 %0, %%ctaid.x;" : "=r"(index));
    return index;
}

__device__ __forceinline__ u32 cluster_rank() {
    u32 rank;
    asm volatile("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
    return rank;
}

__device__ __forceinline__ void cluster_sync() {
    asm volatile("barrier.cluster.arrive.release.aligned;\nbarrier.cluster.wait.acquire.aligned;" ::: "memory");
}

template <int REGISTERS>
__device__ __forceinline__ void raise_registers() {
    asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(REGISTERS));
}

template <int REGISTERS>
__device__ __forceinline__ void lower_registers() {
    asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(REGISTERS));
}

}  // namespace flash_sampling::ptx

#endif
