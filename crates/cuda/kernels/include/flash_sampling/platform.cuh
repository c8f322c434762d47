// The basis of headers that compile as CUDA and as plain C++: fixed-width types, bit casts, and arithmetic that no compiler
// fuses.
//
// Noise has the same bits everywhere, because every operation below is one IEEE operation, rounded to nearest. On the device the
// intrinsics forbid contraction. A plain C++ build must pass -ffp-contract=off.
#pragma once

#ifdef __CUDACC__
#define FS_FUNCTION __host__ __device__ __forceinline__
#else
#define FS_FUNCTION inline
#endif

#ifndef __CUDA_ARCH__
#ifndef __CUDACC_RTC__
#include <math.h>
#include <string.h>
#endif
#endif

// Declares the size of a type that the host passes, and the offset of each of its fields, in bytes.
#define FS_LAYOUT(TYPE, SIZE, ...)                                                                        \
    struct TYPE##Layout {                                                                                 \
        using Type = TYPE;                                                                                \
        static_assert(sizeof(TYPE) == SIZE && (__VA_ARGS__), "the host has this layout, in its module abi"); \
    }
// Older run-time compilers lack offsetof, so they check only the size. Nvcc and plain C++ check every offset.
#ifdef __CUDACC_RTC__
#define FS_AT(FIELD, PLACE) true
#else
#define FS_AT(FIELD, PLACE) (__builtin_offsetof(Type, FIELD) == PLACE)
#endif

namespace flash_sampling {

using u8 = unsigned char;
using u16 = unsigned short;
using u32 = unsigned int;
using i32 = int;
using u64 = unsigned long long;
static_assert(sizeof(u32) == 4 && sizeof(u64) == 8, "the names state the widths");

#ifdef __CUDA_ARCH__
FS_FUNCTION float bits_to_f32(u32 bits) { return __uint_as_float(bits); }
FS_FUNCTION u32 f32_to_bits(float x) { return __float_as_uint(x); }
FS_FUNCTION float fma_rn(float a, float b, float c) { return __fmaf_rn(a, b, c); }
FS_FUNCTION float mul_rn(float a, float b) { return __fmul_rn(a, b); }
FS_FUNCTION float add_rn(float a, float b) { return __fadd_rn(a, b); }
FS_FUNCTION float sub_rn(float a, float b) { return __fsub_rn(a, b); }
FS_FUNCTION float div_rn(float a, float b) { return __fdiv_rn(a, b); }
FS_FUNCTION float u32_to_f32(u32 x) { return __uint2float_rn(x); }
FS_FUNCTION float i32_to_f32(i32 x) { return __int2float_rn(x); }
FS_FUNCTION u64 mul_wide(u32 a, u32 b) {
    u64 product;
    asm("mul.wide.u32 %0, %1, %2;" : "=l"(product) : "r"(a), "r"(b));
    return product;
}
FS_FUNCTION double mul_rn(double a, double b) { return __dmul_rn(a, b); }
FS_FUNCTION double add_rn(double a, double b) { return __dadd_rn(a, b); }
#elif !defined(__CUDACC_RTC__)
FS_FUNCTION float bits_to_f32(u32 bits) { float x; memcpy(&x, &bits, 4); return x; }
FS_FUNCTION u32 f32_to_bits(float x) { u32 bits; memcpy(&bits, &x, 4); return bits; }
FS_FUNCTION float fma_rn(float a, float b, float c) { return fmaf(a, b, c); }
FS_FUNCTION float mul_rn(float a, float b) { return a * b; }
FS_FUNCTION float add_rn(float a, float b) { return a + b; }
FS_FUNCTION float sub_rn(float a, float b) { return a - b; }
FS_FUNCTION float div_rn(float a, float b) { return a / b; }
FS_FUNCTION float u32_to_f32(u32 x) { return static_cast<float>(x); }
FS_FUNCTION float i32_to_f32(i32 x) { return static_cast<float>(x); }
FS_FUNCTION u64 mul_wide(u32 a, u32 b) { return static_cast<u64>(a) * b; }
FS_FUNCTION double mul_rn(double a, double b) { return a * b; }
FS_FUNCTION double add_rn(double a, double b) { return a + b; }
#endif

constexpr u32 F32_INFINITY_BITS = 0x7f800000u;
FS_FUNCTION float f32_infinity() { return bits_to_f32(F32_INFINITY_BITS); }
FS_FUNCTION bool is_nan(float x) { return x != x; }

// Returns the larger number; NaN if either is NaN.
FS_FUNCTION float max_or_nan(float a, float b) {
#ifdef __CUDA_ARCH__
    float largest;
    asm("max.NaN.f32 %0, %1, %2;" : "=f"(largest) : "f"(a), "f"(b));
    return largest;
#else
    return a != a || b < a ? a : b;
#endif
}
FS_FUNCTION bool is_finite(float x) { return (f32_to_bits(x) & F32_INFINITY_BITS) != F32_INFINITY_BITS; }

}  // namespace flash_sampling
