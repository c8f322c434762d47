// Conversions of pairs of numbers. Every conversion is exact.
#pragma once

#include "../platform.cuh"

#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 800
namespace flash_sampling::ptx {

// Converts two f16, each of which is a bf16, to two bf16.
__device__ __forceinline__ u32 f16_to_bf16(u32 pair) {
    u32 converted;
    asm("{ .reg .b16 low, high; .reg .f32 x, y;\n"
        "mov.b32 {low, high}, %1;\n"
        "cvt.f32.f16 x, low;\n"
        "cvt.f32.f16 y, high;\n"
        "cvt.rn.bf16x2.f32 %0, y, x; }\n"
        : "=r"(converted)
        : "r"(pair));
    return converted;
}

// Converts two 8-bit integers, the low or the high bytes of a word, to two f16.
template <bool HIGH>
__device__ __forceinline__ u32 i8_to_f16(u32 word) {
    // An f16 from 1024 to 2047 has the integer's low bits as its own. The sign bit inverted, an integer is 128 larger.
    u32 pair;
    asm("{ .reg .b32 larger, both;\n"
        "xor.b32 larger, %1, 0x80808080;\n"
        "prmt.b32 both, larger, 0x64, %2;\n"
        "sub.rn.f16x2 %0, both, %3; }\n"
        : "=r"(pair)
        : "r"(word), "n"(HIGH ? 0x4342 : 0x4140), "r"(0x64806480));
    return pair;
}

#if __CUDA_ARCH__ >= 890
// Converts two e4m3, the low or the high bytes of a word, to two f16.
template <bool HIGH>
__device__ __forceinline__ u32 e4m3_to_f16(u32 word) {
    u32 pair;
    asm("{ .reg .b16 part<2>;\n"
        "mov.b32 {part0, part1}, %1;\n"
        "cvt.rn.f16x2.e4m3x2 %0, part%2; }\n"
        : "=r"(pair)
        : "r"(word), "n"(HIGH));
    return pair;
}
#endif

}  // namespace flash_sampling::ptx
#endif
