// Warpgroup matrix products: D [64, N] += A [64, K] x B [N, K]^T, both operands K-major in 128-byte swizzled shared
// memory. D is in registers. K is 32 bytes: 16 elements of 16 bits with D in float32, or 32 elements of 8 bits with D
// in 32-bit integers.
//
// Thread t of the warpgroup holds rows r = 16 (t / 32) + (t % 32) / 4 and r + 8 of D, columns 8 j + 2 (t % 4) + {0, 1}:
// d[4 j + e] is row r + 8 (e / 2), column 8 j + 2 (t % 4) + e % 2.
#pragma once

#include "mbarrier.cuh"
#include "operand.cuh"

namespace flash_sampling::ptx {

// Returns the descriptor of a K-major operand with 128 bytes per row, in groups of 8 rows.
__device__ __forceinline__ u64 operand_descriptor(u32 address) {
    const u64 group_stride = 1024 >> 4;
    const u64 swizzle_128 = 1;
    return address >> 4 | 1ull << 16 | group_stride << 32 | swizzle_128 << 62;
}

// Returns the part of an address in shared memory that a descriptor takes: the offset within the block's shared memory.
__device__ __forceinline__ u32 operand_address(u32 address) { return address & 0x3ffff; }

// The descriptor's increment per step of 32 bytes.
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

#define FS_WGMMA(N, OPERAND, SUM, C, TYPES, FLAGS, A, B, P)                                                   \
    template <>                                                                                                \
    struct Wgmma<N, Operand::OPERAND> {                                                                        \
        static __device__ __forceinline__ void multiply(SUM (&d)[N / 2], u64 a, u64 b, bool accumulate) {      \
            asm volatile("{ .reg .pred keep;\n"                                                                \
                         "setp.ne.b32 keep, " P ", 0;\n"                                                       \
                         "wgmma.mma_async.sync.aligned.m64n" #N TYPES " {" FS_R##N "}, "                       \
                         A ", " B ", keep" FLAGS "; }\n"                                                       \
                         : FS_D##N(C)                                                                          \
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
#define FS_FOUR(C, i) C(d[i]), C(d[i + 1]), C(d[i + 2]), C(d[i + 3])
#define FS_SIXTEEN(C, i) FS_FOUR(C, i), FS_FOUR(C, i + 4), FS_FOUR(C, i + 8), FS_FOUR(C, i + 12)
#define FS_D8(C) FS_FOUR(C, 0)
#define FS_D16(C) FS_D8(C), FS_FOUR(C, 4)
#define FS_D32(C) FS_SIXTEEN(C, 0)
#define FS_D64(C) FS_D32(C), FS_SIXTEEN(C, 16)
#define FS_D96(C) FS_D64(C), FS_SIXTEEN(C, 32)
#define FS_D128(C) FS_D96(C), FS_SIXTEEN(C, 48)
#define FS_D192(C) FS_D128(C), FS_SIXTEEN(C, 64), FS_SIXTEEN(C, 80)
#define FS_D224(C) FS_D192(C), FS_SIXTEEN(C, 96)
#define FS_D256(C) FS_D224(C), FS_SIXTEEN(C, 112)
#define FS_WGMMA_OF_ALL(N, A, B, P)                                                 \
    FS_WGMMA(N, BF16, float, "+f", "k16.f32.bf16.bf16", ", 1, 1, 0, 0", A, B, P)    \
    FS_WGMMA(N, F16, float, "+f", "k16.f32.f16.f16", ", 1, 1, 0, 0", A, B, P)       \
    FS_WGMMA(N, S8, i32, "+r", "k32.s32.s8.s8", "", A, B, P)
FS_WGMMA_OF_ALL(8, "%4", "%5", "%6")
FS_WGMMA_OF_ALL(16, "%8", "%9", "%10")
FS_WGMMA_OF_ALL(32, "%16", "%17", "%18")
FS_WGMMA_OF_ALL(64, "%32", "%33", "%34")
FS_WGMMA_OF_ALL(96, "%48", "%49", "%50")
FS_WGMMA_OF_ALL(128, "%64", "%65", "%66")
FS_WGMMA_OF_ALL(192, "%96", "%97", "%98")
FS_WGMMA_OF_ALL(224, "%112", "%113", "%114")
FS_WGMMA_OF_ALL(256, "%128", "%129", "%130")

// The same products of 16-bit elements, with A in registers. Thread t holds two rows, r and r + 8: columns 2 (t % 4) +
// {0, 1} of these rows in a[0] and a[1], and columns 2 (t % 4) + {8, 9} in a[2] and a[3]. The registers must stay
// unchanged until the product is complete.
template <int N, Operand T>
struct WgmmaRegisters;

#define FS_WGMMA_REGISTERS_OF(N, OPERAND, TYPES, A, B, P)                                                      \
    template <>                                                                                                \
    struct WgmmaRegisters<N, Operand::OPERAND> {                                                               \
        static __device__ __forceinline__ void multiply(float (&d)[N / 2], const u32 (&a)[4], u64 b,           \
                                                        bool accumulate) {                                     \
            asm volatile("{ .reg .pred keep;\n"                                                                \
                         "setp.ne.b32 keep, " P ", 0;\n"                                                       \
                         "wgmma.mma_async.sync.aligned.m64n" #N TYPES " {" FS_R##N "}, "                       \
                         "{" A "}, " B ", keep, 1, 1, 0; }\n"                                                  \
                         : FS_D##N("+f")                                                                       \
                         : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(static_cast<u32>(accumulate))); \
        }                                                                                                      \
    };
#define FS_WGMMA_REGISTERS(N, A, B, P)                                \
    FS_WGMMA_REGISTERS_OF(N, BF16, "k16.f32.bf16.bf16", A, B, P)      \
    FS_WGMMA_REGISTERS_OF(N, F16, "k16.f32.f16.f16", A, B, P)
FS_WGMMA_REGISTERS(8, "%4, %5, %6, %7", "%8", "%9")
FS_WGMMA_REGISTERS(32, "%16, %17, %18, %19", "%20", "%21")
FS_WGMMA_REGISTERS(64, "%32, %33, %34, %35", "%36", "%37")
FS_WGMMA_REGISTERS(128, "%64, %65, %66, %67", "%68", "%69")

#undef FS_WGMMA_REGISTERS
#undef FS_WGMMA_REGISTERS_OF
#undef FS_WGMMA_OF_ALL
#undef FS_WGMMA
#undef FS_FOUR
#undef FS_SIXTEEN
#undef FS_D8
#undef FS_D16
#undef FS_D32
#undef FS_D64
#undef FS_D96
#undef FS_D128
#undef FS_D192
#undef FS_D224
#undef FS_D256

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
