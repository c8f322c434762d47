// CI's guard must reject this kernel unless KNOWN. Its products have descriptors from ordinary registers, because the compiler
// cannot prove that a warpgroup's number is equal in all lanes. With KNOWN, the compiler can.

__device__ __forceinline__ void step(float (&d)[4], unsigned long long a, unsigned long long b) {
    asm volatile(
        "{\n.reg .pred p;\nsetp.ne.b32 p, 1, 0;\n"
        "wgmma.mma_async.sync.aligned.m64n8k16.f32.bf16.bf16 {%0, %1, %2, %3}, %4, %5, p, 1, 1, 0, 0;\n}\n"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
        : "l"(a), "l"(b));
}

extern "C" __global__ void __launch_bounds__(256) moves(float* out, unsigned long long a, unsigned long long b, int n) {
    float d[4] = {0.0f, 0.0f, 0.0f, 0.0f};
    const unsigned place = KNOWN ? __reduce_or_sync(~0u, threadIdx.x / 128) : threadIdx.x / 128;
#pragma unroll 1
    for (int k = 0; k < n; ++k) {
        asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
        step(d, a + place * 512 + k, b + k);
        step(d, a + place * 512 + k + 2, b + k + 2);
        asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
        asm volatile("wgmma.wait_group.sync.aligned 0;" ::: "memory");
    }
    for (int i = 0; i < 4; ++i) out[threadIdx.x * 4 + i] = d[i];
}
