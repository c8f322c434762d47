// Weights in blocks and weights with scales: the twin of core's matrix/blocks.rs and matrix/scales.rs.
//
// A weight is `scale * code - minimum`. Scales, codes and minima are exact in float32, so one fused multiply-add rounds
// the exact weight once, as core does.
#pragma once

#include "element.cuh"
#include "ptx/convert.cuh"

namespace flash_sampling {

// The scales of I8 and F8_E4M3: one for each block of rows and columns.
struct WeightScales {
    const float* values;  // null = every scale is 1
    u32 block_rows;
    u32 block_cols;
    u32 row_blocks;       // blocks of a row
    u32 first_row;        // the index of the weight's first row within its block of rows

    // Returns the scale of a row that has one scale, for a multiplication of the row's sums. Returns NaN for an
    // infinite scale, because a sum of infinite products of both signs is NaN.
    FS_FUNCTION float row_scale(u32 row) const {
        const float scale = at(row, 0);
        return scale - scale == 0.0f ? scale : bits_to_f32(0x7fc00000u);
    }

    // Returns the scale of one weight.
    FS_FUNCTION float at(u32 row, u32 column) const {
        if (!values) return 1.0f;
        return values[static_cast<u64>((first_row + row) / block_rows) * row_blocks + column / block_cols];
    }
};
FS_LAYOUT(WeightScales, 24,
          FS_AT(values, 0) && FS_AT(block_rows, 8) && FS_AT(block_cols, 12) && FS_AT(row_blocks, 16) &&
          FS_AT(first_row, 20));

#ifdef __CUDACC__

// The weight scale * code - minimum.
struct QuantisedWeight {
    float scale, code, minimum;

    FS_FUNCTION float to_f32() const { return fma_rn(scale, code, -minimum); }
    FS_FUNCTION double to_f64() const {
        return add_rn(mul_rn(static_cast<double>(scale), static_cast<double>(code)), -static_cast<double>(minimum));
    }
};

namespace blocks {

// Returns the f16 at an even address.
__device__ __forceinline__ float half_at(const u8* at) { return widen_f16(*reinterpret_cast<const u16*>(at)); }

__device__ __forceinline__ float signed_byte(u32 byte) { return i32_to_f32(static_cast<signed char>(byte)); }

// Returns code `i` of 32 in 16 bytes. Codes 0 to 15 are the low halves of the bytes, codes 16 to 31 the high halves.
__device__ __forceinline__ u32 nibble(const u8* bytes, u32 i) { return bytes[i % 16] >> (i / 16 * 4) & 15; }

// Returns byte `i` of a table of 16 signed bytes.
__device__ __forceinline__ float entry(u64 low, u64 high, u32 i) {
    return signed_byte(static_cast<u32>((i < 8 ? low : high) >> (i % 8 * 8)) & 255);
}

// Returns the value of a code of IQ4_NL.
__device__ __forceinline__ float iq4_nl(u32 code) { return entry(0xf6eaddcfbfad9881ull, 0x7159453526190d01ull, code); }

// Returns twice the value of a code of e2m1.
__device__ __forceinline__ float e2m1(u32 code) { return entry(0x0c08060403020100ull, 0xf4f8fafcfdfeff00ull, code); }

// Returns the value of a code of e4m3.
__device__ __forceinline__ float e4m3(u32 bits) {
    if ((bits & 0x7f) == 0x7f) return bits_to_f32(0x7fc00000u);
    // The exponent's bias is 7 instead of 127. A subnormal e4m3 is a subnormal float32 before the product.
    return mul_rn(bits_to_f32((bits & 0x80) << 24 | (bits & 0x7f) << 20), 0x1p120f);
}

// Returns a weight of Q4_K, or of Q5_K if IS_FIVE. Each span of 32 weights has a scale and a minimum of 6 bits each, in
// 12 bytes.
template <bool IS_FIVE>
__device__ __forceinline__ QuantisedWeight with_minimum(const u8* block, u32 i) {
    const u32 span = i / 32, of_span = i % 32;
    const u8* const bytes = block + 4;
    u32 scale = bytes[span] & 63, minimum = bytes[span + 4] & 63;
    if (span >= 4) {
        scale = (bytes[span + 4] & 15) | (bytes[span - 4] >> 6 << 4);
        minimum = bytes[span + 4] >> 4 | (bytes[span] >> 6 << 4);
    }
    const u8* const low = block + (IS_FIVE ? 48 : 16);
    u32 code = low[span / 2 * 32 + of_span] >> (span % 2 * 4) & 15;
    if (IS_FIVE) code |= (block[16 + of_span] >> span & 1) << 4;
    return {mul_rn(half_at(block), u32_to_f32(scale)), u32_to_f32(code),
            mul_rn(half_at(block + 2), u32_to_f32(minimum))};
}

// Returns a weight of Q6_K.
__device__ __forceinline__ QuantisedWeight q6_k(const u8* block, u32 i) {
    // Each half of the block has four spans: the low nibbles of 64 bytes, then the high nibbles.
    const u32 half = i / 128, part = i / 32 % 4, of_span = i % 32;
    const u32 low = block[half * 64 + part % 2 * 32 + of_span] >> (part / 2 * 4) & 15;
    const u32 high = block[128 + half * 32 + of_span] >> (part * 2) & 3;
    const float scale = mul_rn(half_at(block + 208), signed_byte(block[192 + i / 16]));
    return {scale, i32_to_f32(static_cast<i32>(low | high << 4) - 32), 0.0f};
}

}  // namespace blocks

// Converts two 8-bit elements of a word to two f16, without their scale: the low two bytes, or the high two bytes if
// HIGH. Every I8 and every F8_E4M3 is exact in f16.
template <Element TYPE, bool HIGH>
__device__ __forceinline__ u32 bytes_to_f16(u32 word) {
    static_assert(has_scales(TYPE), "the elements have 8 bits");
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 800
    if constexpr (TYPE == Element::I8) return ptx::i8_to_f16<HIGH>(word);
#endif
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 890
    if constexpr (TYPE == Element::F8_E4M3) return ptx::e4m3_to_f16<HIGH>(word);
#endif
    const auto f16 = [&](u32 i) {
        const u32 byte = word >> 8 * (i + 2 * HIGH) & 255;
        return f16_bits(TYPE == Element::I8 ? blocks::signed_byte(byte) : blocks::e4m3(byte));
    };
    return f16(0) | f16(1) << 16;
}

// Converts the same elements to two bf16. Every I8 and every F8_E4M3 is exact in bf16, too.
template <Element TYPE, bool HIGH>
__device__ __forceinline__ u32 bytes_to_bf16(u32 word) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 890
    return ptx::f16_to_bf16(bytes_to_f16<TYPE, HIGH>(word));
#else
    const auto bf16 = [&](u32 i) {
        const u32 byte = word >> 8 * (i + 2 * HIGH) & 255;
        return f32_to_bits(TYPE == Element::I8 ? blocks::signed_byte(byte) : blocks::e4m3(byte)) >> 16;
    };
    return bf16(0) | bf16(1) << 16;
#endif
}

// Returns a weight of a row. If the blocks of the type contain an f16, rows begin at even addresses.
template <Element TYPE>
__device__ __forceinline__ QuantisedWeight quantised(const u8* row, u32 column, float scale) {
    constexpr u32 ELEMENTS = block_elements(TYPE), BYTES = block_bytes(TYPE);
    const u8* const block = row + static_cast<u64>(column / ELEMENTS) * BYTES;
    const u32 i = column % ELEMENTS;
    switch (TYPE) {
        case Element::I8: return {scale, blocks::signed_byte(*block), 0.0f};
        case Element::F8_E4M3: return {scale, blocks::e4m3(*block), 0.0f};
        case Element::Q8_0: return {blocks::half_at(block), blocks::signed_byte(block[2 + i]), 0.0f};
        case Element::Q4_0:
            return {blocks::half_at(block), i32_to_f32(static_cast<i32>(blocks::nibble(block + 2, i)) - 8), 0.0f};
        case Element::IQ4_NL: return {blocks::half_at(block), blocks::iq4_nl(blocks::nibble(block + 2, i)), 0.0f};
        case Element::MXFP4: {
            const u32 e = *block;
            const float power = bits_to_f32(e < 2 ? 0x00200000u << e : (e - 1) << 23);
            return {power, blocks::e2m1(blocks::nibble(block + 1, i)), 0.0f};
        }
        case Element::Q4_K: return blocks::with_minimum<false>(block, i);
        case Element::Q5_K: return blocks::with_minimum<true>(block, i);
        default: return blocks::q6_k(block, i);
    }
}

// Calls `job.run<TYPE>()` for a quantised type. NVRTC accepts no generic lambda.
template <class Job>
__device__ __forceinline__ void with_quantised_type(Element type, Job& job) {
    switch (type) {
        case Element::I8: return job.template run<Element::I8>();
        case Element::F8_E4M3: return job.template run<Element::F8_E4M3>();
        case Element::Q8_0: return job.template run<Element::Q8_0>();
        case Element::Q4_0: return job.template run<Element::Q4_0>();
        case Element::IQ4_NL: return job.template run<Element::IQ4_NL>();
        case Element::MXFP4: return job.template run<Element::MXFP4>();
        case Element::Q4_K: return job.template run<Element::Q4_K>();
        case Element::Q5_K: return job.template run<Element::Q5_K>();
        default: return job.template run<Element::Q6_K>();
    }
}

#endif

}  // namespace flash_sampling
