// Warpgroup matrix products: D [64, N] += A [64, 16] x B [N, 16]^T, both operands K-major in 128-byte swizzled shared
// memory, D in float32 registers.
//
// Thread t of the warpgroup holds rows r = 16 (t / 32) + (t % 32) / 4 and r + 8 of D, columns 8 j + 2 (t % 4) + {0, 1}:
// d[4 j + e] is row r + 8 (e / 2), column 8 j + 2 (t % 4) + e % 2.
#pragma once

#include "mbarrier.cuh"
#include "operand.cuh"

namespace flash_sampling::ptx {

// Returns the descriptor of a K-major operand with 64 elements (128 bytes) per row, in groups of 8 rows.
__device__ __forceinline__ u64 operand_descriptor(u32 address) {
    const u64 group_stride = 1024 >> 4;
    const u64 swizzle_128 = 1;
    return address >> 4 | 1ull << 16 | group_stride << 32 | swizzle_128 << 62;
}

// Returns the part of an address in shared memory that a descriptor takes: the offset within the block's shared memory.
__device__ __forceinline__ u32 operand_address(u32 address) { return address & 0x3ffff; }

// The descriptor's increment per step of 16 elements.
constexpr u64 DESCRIPTOR_STEP = 32 >> 4;

#ifndef FS_EMULATED
__device__ __forceinline__ void wgmma_fence() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
__device__ __forceinline__ void wgmma_commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
template <int GROUPS>
__device__ __forceinline__ void wgmma_wait() {
    asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(GROUPS) : "memory");
}

template <int N, Operand T>
struct Wgmma;

#define FS_D4(i) "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3])
#define FS_D16(i) FS_D4(i), FS_D4(i + 4), FS_D4(i + 8), FS_D4(i + 12)
#define FS_D64(i) FS_D16(i), FS_D16(i + 16), FS_D16(i + 32), FS_D16(i + 48)
#define FS_WGMMA(N, OPERAND, NAME, REGISTERS, A, B, P, ...)                                                    \
    template <>                                                                                                \
    struct Wgmma<N, Operand::OPERAND> {                                                                        \
        static __device__ __forceinline__ void multiply(float (&d)[N / 2], u64 a, u64 b, bool accumulate) {    \
            asm volatile("{ .reg .pred keep;\n"                                                                \
                         "setp.ne.b32 keep, " P ", 0;\n"                                                       \
                         "wgmma.mma_async.sync.aligned.m64n" #N "k16.f32." NAME "." NAME " {" REGISTERS "}, "  \
                         A ", " B ", keep, 1, 1, 0, 0; }\n"                                                    \
                         : __VA_ARGS__                                                                         \
                         : "l"(a), "l"(b), "r"(static_cast<u32>(accumulate)));                                 \
        }                                                                                                      \
    };

// The accumulators' operands of each shape: the operands of the next smaller shape, and more.
#define FS_R8 "%0, %1, %2, %3"
#define FS_R16 FS_R8 ", %4, %5, %6, %7"
#define FS_R32 FS_R16 ", %8, %9, %10, %11, %12, %13, %14, %15"
#define FS_R64 FS_R32 ", %16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31"
#define FS_R96 FS_R64 ", %32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47"
#define FS_R128 FS_R96 ", %48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63"
#define FS_R192 FS_R128 \
    ", %64, %65, %66, %67, %68, %69, %70, %71, %72, %73, %74, %75, %76, %77, %78, %79" \
    ", %80, %81, %82, %83, %84, %85, %86, %87, %88, %89, %90, %91, %92, %93, %94, %95"
#define FS_R224 FS_R192 ", %96, %97, %98, %99, %100, %101, %102, %103, %104, %105, %106, %107, %108, %109, %110, %111"
#define FS_R256 FS_R224 ", %112, %113, %114, %115, %116, %117, %118, %119, %120, %121, %122, %123, %124, %125, %126, %127"
#define FS_WGMMA_OF_BOTH(N, A, B, P, ...)                       \
    FS_WGMMA(N, BF16, "bf16", FS_R##N, A, B, P, __VA_ARGS__)    \
    FS_WGMMA(N, F16, "f16", FS_R##N, A, B, P, __VA_ARGS__)
FS_WGMMA_OF_BOTH(8, "%4", "%5", "%6", FS_D4(0))
FS_WGMMA_OF_BOTH(16, "%8", "%9", "%10", FS_D4(0), FS_D4(4))
FS_WGMMA_OF_BOTH(32, "%16", "%17", "%18", FS_D16(0))
FS_WGMMA_OF_BOTH(64, "%32", "%33", "%34", FS_D16(0), FS_D16(16))
FS_WGMMA_OF_BOTH(96, "%48", "%49", "%50", FS_D16(0), FS_D16(16), FS_D16(32))
FS_WGMMA_OF_BOTH(128, "%64", "%65", "%66", FS_D64(0))
FS_WGMMA_OF_BOTH(192, "%96", "%97", "%98", FS_D64(0), FS_D16(64), FS_D16(80))
FS_WGMMA_OF_BOTH(224, "%112", "%113", "%114", FS_D64(0), FS_D16(64), FS_D16(80), FS_D16(96))
FS_WGMMA_OF_BOTH(256, "%128", "%129", "%130", FS_D64(0), FS_D64(64))

#undef FS_WGMMA_OF_BOTH
#undef FS_WGMMA
#undef FS_D64
#undef FS_D16
#undef FS_D4

#undef FS_R8
#undef FS_R16
#undef FS_R32
#undef FS_R64
#undef FS_R96
#undef FS_R128
#undef FS_R192
#undef FS_R224
#undef FS_R256
#endif

}  // namespace flash_sampling::ptx
