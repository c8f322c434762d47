// With POLICY, CI's guard must reject this kernel; without POLICY, it must accept it. The kernel makes copies with a cache policy
// to a ring of stages whose address the compiler keeps in a uniform register (see src/compile/instructions.rs).

__device__ __forceinline__ void copy(unsigned to, const void* from, unsigned long long keep) {
    if constexpr (POLICY)
        asm volatile("cp.async.cg.shared.global.L2::cache_hint [%0], [%1], 16, 16, %2;" ::"r"(to), "l"(from), "l"(keep)
                     : "memory");
    else
        asm volatile("cp.async.cg.shared.global [%0], [%1], 16, 16;" ::"r"(to), "l"(from) : "memory");
}

extern "C" __global__ void copies(const float4* from, float4* to, int count) {
    extern __shared__ float4 shared[];
    unsigned long long keep;
    asm volatile("createpolicy.fractional.L2::evict_last.b64 %0;" : "=l"(keep));
    const unsigned first = static_cast<unsigned>(__cvta_generic_to_shared(shared)), last = first + 3 * 4096;
    const unsigned own = (threadIdx.x * 16) ^ (threadIdx.x / 8 % 8 * 16);
    unsigned stage = first;
#pragma unroll 1
    for (int i = 0; i < count; ++i) {
#pragma unroll
        for (int k = 0; k < 4; ++k) copy(stage + (k * 1024 + own), from + i * 256 + k * 64 + threadIdx.x, keep);
        stage = stage == last ? first : stage + 4096;
    }
    asm volatile("cp.async.wait_all;" ::: "memory");
    __syncthreads();
    to[threadIdx.x] = shared[threadIdx.x];
}
