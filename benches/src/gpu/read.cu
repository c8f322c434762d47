// The physical limit of a memory-bound matmul: one read of the weight's bytes. There are two kernels, because neither is faster
// on all GPUs; the benchmark takes the faster one as the ceiling.

using u8 = unsigned char;
using u32 = unsigned int;
using u64 = unsigned long long;

struct alignas(16) Quad {
    u32 w[4];
};

__device__ __forceinline__ Quad load_streaming(const Quad* from) {
    Quad q;
    asm volatile("ld.global.L1::no_allocate.L2::256B.v4.u32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(q.w[0]), "=r"(q.w[1]), "=r"(q.w[2]), "=r"(q.w[3])
                 : "l"(from));
    return q;
}

// Each thread has eight loads of 16 bytes in flight. The compiler cannot drop the loads, since `sink` is written if the
// exclusive-or of a thread's words has one certain value.
extern "C" __global__ void __launch_bounds__(512) read_streaming(const Quad* from, u64 quads, u32* sink) {
    constexpr int LOADS = 8;
    const u64 step = static_cast<u64>(gridDim.x) * blockDim.x;
    u64 i = static_cast<u64>(blockIdx.x) * blockDim.x + threadIdx.x;
    u32 x = 0;
    for (; i + (LOADS - 1) * step < quads; i += LOADS * step) {
        Quad q[LOADS];
#pragma unroll
        for (int j = 0; j < LOADS; ++j) q[j] = load_streaming(from + i + j * step);
#pragma unroll
        for (int j = 0; j < LOADS; ++j) x ^= q[j].w[0] ^ q[j].w[1] ^ q[j].w[2] ^ q[j].w[3];
    }
    for (; i < quads; i += step) {
        const Quad q = load_streaming(from + i);
        x ^= q.w[0] ^ q.w[1] ^ q.w[2] ^ q.w[3];
    }
    if (x == 0x12345679u) *sink = x;
}

#if __CUDA_ARCH__ >= 900
// One thread of each block copies BULK_BYTES at a time into a ring in shared memory, by the copy engine. No code reads the ring.
constexpr u32 BULK_BYTES = 16384;
constexpr u32 BULK_STAGES = 12;

__device__ __forceinline__ u32 shared_address(const void* p) { return static_cast<u32>(__cvta_generic_to_shared(p)); }

extern "C" __global__ void __launch_bounds__(32, 1) read_bulk(const u8* from, u64 bytes) {
    extern __shared__ __align__(128) u8 ring[];
    __shared__ u64 full[BULK_STAGES];
    if (threadIdx.x != 0) return;
    for (u32 s = 0; s < BULK_STAGES; ++s) asm volatile("mbarrier.init.shared::cta.b64 [%0], 1;" ::"r"(shared_address(&full[s])));
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
    const u64 pieces = (bytes + BULK_BYTES - 1) / BULK_BYTES;
    const auto request = [&](u64 piece, u32 stage) {
        const u64 left = bytes - piece * BULK_BYTES;
        const u32 size = left < BULK_BYTES ? static_cast<u32>(left) & ~15u : BULK_BYTES;
        const u32 barrier = shared_address(&full[stage]);
        asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(size) : "memory");
        if (size != 0)
            asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(
                             shared_address(ring) + stage * BULK_BYTES),
                         "l"(from + piece * BULK_BYTES), "r"(size), "r"(barrier)
                         : "memory");
    };
    u64 asked = blockIdx.x;
    for (u32 s = 0; s < BULK_STAGES && asked < pieces; ++s, asked += gridDim.x) request(asked, s);
    u32 stage = 0, phase = 0;
    for (u64 piece = blockIdx.x; piece < pieces; piece += gridDim.x) {
        u32 done = 0;
        while (!done)
            asm volatile(
                "{\n.reg .pred p;\nmbarrier.try_wait.parity.shared::cta.b64 p, [%1], %2;\nselp.u32 %0, 1, 0, p;\n}\n"
                : "=r"(done)
                : "r"(shared_address(&full[stage])), "r"(phase)
                : "memory");
        if (asked < pieces) request(asked, stage), asked += gridDim.x;
        if (++stage == BULK_STAGES) stage = 0, phase ^= 1;
    }
}
#endif
