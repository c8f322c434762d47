// The element types, and the floats among them read as float32.
#pragma once

#include "platform.cuh"

namespace flash_sampling {

// The host writes these codes. Types from I8 on are of weights only: quantised.cuh.
enum class Element : u32 {
    BF16 = 0,
    F16 = 1,
    F32 = 2,
    I8 = 3,
    F8_E4M3 = 4,
    Q8_0 = 5,
    Q4_0 = 6,
    IQ4_NL = 7,
    MXFP4 = 8,
    Q4_K = 9,
    Q5_K = 10,
    Q6_K = 11,
};

FS_FUNCTION bool is_float(Element type) { return type <= Element::F32; }
FS_FUNCTION constexpr bool has_scales(Element type) { return type == Element::I8 || type == Element::F8_E4M3; }
// Returns the bytes of a float.
FS_FUNCTION u32 element_bytes(Element type) { return type == Element::F32 ? 4 : 2; }

// The elements of a block; 1 for types without blocks.
FS_FUNCTION constexpr u32 block_elements(Element type) { return type < Element::Q8_0 ? 1 : type < Element::Q4_K ? 32 : 256; }
// The bytes of a block; for types without blocks, of an element.
FS_FUNCTION constexpr u32 block_bytes(Element type) {
    switch (type) {
        case Element::F32: return 4;
        case Element::BF16:
        case Element::F16: return 2;
        case Element::I8:
        case Element::F8_E4M3: return 1;
        case Element::Q8_0: return 34;
        case Element::Q4_0:
        case Element::IQ4_NL: return 18;
        case Element::MXFP4: return 17;
        case Element::Q4_K: return 144;
        case Element::Q5_K: return 176;
        default: return 210;
    }
}

#ifdef __CUDACC__

__device__ __forceinline__ float widen_f16(u32 bits) {
#ifdef __CUDA_ARCH__
    float value;
    asm("{.reg .b16 half; cvt.u16.u32 half, %1; cvt.f32.f16 %0, half;}" : "=f"(value) : "r"(bits));
    return value;
#else
    // The exponent's bias is 15 instead of 127. The largest exponent is that of infinity and NaN.
    const u32 magnitude = (bits & 0x7fff) << 13, sign = bits >> 15 << 31;
    const bool is_number = (bits & 0x7c00) != 0x7c00;
    const float scaled = is_number ? bits_to_f32(magnitude) * 0x1p112f : bits_to_f32(magnitude | 0x7f800000u);
    return bits_to_f32(f32_to_bits(scaled) | sign);
#endif
}

// Returns the bits of a number as an f16, rounded toward zero. The magnitude is below 65536, or the number is NaN.
__device__ __forceinline__ u32 f16_bits(float x) {
    const u32 magnitude = f32_to_bits(x) & 0x7fffffff, sign = f32_to_bits(x) >> 16 & 0x8000;
    if (magnitude > 0x7f800000) return 0x7fff;
    // Below the smallest normal number, the bits count multiples of 2^-24.
    return sign | (magnitude >= 0x38800000 ? (magnitude >> 13) - (112 << 10) : static_cast<u32>(fabsf(x) * 0x1p24f));
}

// Returns the number in a word: its float32, or its low or high 16-bit number.
template <Element TYPE>
__device__ __forceinline__ float widen(u32 word, bool high) {
    if (TYPE == Element::F32) return bits_to_f32(word);
    if (TYPE == Element::BF16) return bits_to_f32(high ? word & 0xffff0000u : word << 16);
    return widen_f16(high ? word >> 16 : word & 0xffffu);
}

// Loads one number at any address.
template <Element TYPE>
__device__ __forceinline__ float element(const void* from, u64 at) {
    if (TYPE == Element::F32) return static_cast<const float*>(from)[at];
    return widen<TYPE>(static_cast<const u16*>(from)[at], false);
}

// Loads eight 16-bit numbers of a row, from number k on, at a multiple of 16 bytes. Zeros beyond the row.
template <Element TYPE>
__device__ __forceinline__ void load_elements(float (&x)[8], const u8* row, u32 k, u32 width) {
    if (k + 8 <= width) {
        const uint4 words = *reinterpret_cast<const uint4*>(row + 2 * k);
        const u32 pairs[] = {words.x, words.y, words.z, words.w};
#pragma unroll
        for (u32 i = 0; i < 8; ++i) x[i] = widen<TYPE>(pairs[i / 2], i % 2);
    } else {
#pragma unroll
        for (u32 i = 0; i < 8; ++i) x[i] = k + i < width ? element<TYPE>(row, k + i) : 0.0f;
    }
}

// Loads one number of a type known only at run time.
__device__ __forceinline__ float element(Element type, const void* from, u64 at) {
    if (type == Element::F32) return element<Element::F32>(from, at);
    return type == Element::BF16 ? element<Element::BF16>(from, at) : element<Element::F16>(from, at);
}

#endif

}  // namespace flash_sampling
