// The conversion of e4m3, on compute capability 8.9 and up.
#pragma once

#include "../platform.cuh"

#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 890
namespace flash_sampling::ptx {

// Converts two e4m3, the low bytes of `two`, to two bf16. Every step is exact.
__device__ __forceinline__ u32 e4m3_to_bf16(u32 two) {
    u32 pair;
    asm("{ .reg .b16 low, high; .reg .b32 halves; .reg .f32 x, y;\n"
        "cvt.u16.u32 low, %1;\n"
        "cvt.rn.f16x2.e4m3x2 halves, low;\n"
        "mov.b32 {low, high}, halves;\n"
        "cvt.f32.f16 x, low;\n"
        "cvt.f32.f16 y, high;\n"
        "cvt.rn.bf16x2.f32 %0, y, x; }\n"
        : "=r"(pair)
        : "r"(two));
    return pair;
}

}  // namespace flash_sampling::ptx
#endif
