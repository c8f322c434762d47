// Products of a warp: D [16, 8] += A [16, 16] x B [8, 16]^T, both operands K-major, D in float32 registers. With 8-bit integers,
// A is [16, 32], B is [8, 32], and D is in int32 registers: the same bytes in the same registers.
//
// Lane l holds rows l / 4 and l / 4 + 8 of D, columns 2 (l % 4) + {0, 1}:
// d[e] is row l / 4 + 8 (e / 2), column 2 (l % 4) + e % 2.
#pragma once

#include "address.cuh"
#include "operand.cuh"

#ifndef FS_EMULATED

namespace flash_sampling::ptx {

// Loads four 8 x 8 matrices of 16-bit elements. Lane l passes the address of row l % 8 of matrix l / 8. For an A: rows 0-7 and
// 8-15 of the first 8 columns, then of the last 8 columns. For a B: two halves of 8 columns.
__device__ __forceinline__ void load_matrices(u32 (&r)[4], u32 address) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
                 : "r"(address)
                 : "memory");
}

template <Operand T>
__device__ __forceinline__ void multiply(float (&d)[4], const u32 (&a)[4], u32 b0, u32 b1) {
    if constexpr (T == Operand::BF16) {
        asm volatile(
            "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
            "{%0, %1, %2, %3};"
            : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
            : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
    } else {
        asm volatile(
            "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
            "{%0, %1, %2, %3};"
            : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
            : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
    }
}

template <Operand T>
__device__ __forceinline__ void multiply(i32 (&d)[4], const u32 (&a)[4], u32 b0, u32 b1) {
    static_assert(T == Operand::S8, "other products have float32 sums");
    asm volatile(
        "mma.sync.aligned.m16n8k32.row.col.s32.s8.s8.s32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
        "{%0, %1, %2, %3};"
        : "+r"(d[0]), "+r"(d[1]), "+r"(d[2]), "+r"(d[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

}  // namespace flash_sampling::ptx

#endif
