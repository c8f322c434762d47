// Exact conversions of two elements at a time.
#pragma once

#include "../platform.cuh"

#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 800
namespace flash_sampling::ptx {

// Converts two f16 to two bf16. The value of each f16 must be exact in bf16.
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

// Converts two 8-bit integers of a word to two f16: the low two bytes, or the high two bytes if HIGH.
template <bool HIGH>
__device__ __forceinline__ u32 i8_to_f16(u32 word) {
    // The byte of an integer i with its sign bit inverted is i + 128. The f16 with this low byte and the high byte 0x64
    // is 1024 + 128 + i. The f16 0x6480 is 1024 + 128.
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
// Converts two e4m3 of a word to two f16: the low two bytes, or the high two bytes if HIGH.
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
