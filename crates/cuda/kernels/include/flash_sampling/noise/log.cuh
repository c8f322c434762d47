// ln x and -ln(1 - v) in float32 fused multiply-adds: the twin of core's noise/log.rs, operation by operation.
#pragma once

#include "../platform.cuh"

namespace flash_sampling {

constexpr u32 LN_2_HI_BITS = 0x3f318000u;
constexpr u32 LN_2_LO_BITS = 0xb95e8083u;

// Returns ln(1 + f) + k ln 2 for f in [sqrt(1/2) - 1, sqrt(2) - 1].
FS_FUNCTION float ln_1p_reduced(float f, float k) {
    float q = bits_to_f32(0xbd9c5b0cu);
    q = fma_rn(q, f, bits_to_f32(0x3e02adc5u));
    q = fma_rn(q, f, bits_to_f32(0xbe06c29au));
    q = fma_rn(q, f, bits_to_f32(0x3e116d0cu));
    q = fma_rn(q, f, bits_to_f32(0xbe2a3923u));
    q = fma_rn(q, f, bits_to_f32(0x3e4cd004u));
    q = fma_rn(q, f, bits_to_f32(0xbe800113u));
    q = fma_rn(q, f, bits_to_f32(0x3eaaaaaau));
    const float r = fma_rn(mul_rn(f, f), fma_rn(f, q, -0.5f), f);
    return fma_rn(k, bits_to_f32(LN_2_HI_BITS), fma_rn(k, bits_to_f32(LN_2_LO_BITS), r));
}

// Returns ln x for positive, normal, finite x; relative error below 2^-22.9.
FS_FUNCTION float ln(float x) {
    const u32 bits = f32_to_bits(x);
    const i32 k = static_cast<i32>(bits - 0x3f3504f3u) >> 23;
    const float m = bits_to_f32(bits - (static_cast<u32>(k) << 23));
    return ln_1p_reduced(sub_rn(m, 1.0f), i32_to_f32(k));
}

// Returns -ln(1 - v) for v in (0, 1/2]; relative error below 2^-22.9, also as v -> 0.
FS_FUNCTION float neg_ln_1m(float v) {
    const bool low = v <= 0.29289323f;
    const float f = low ? -v : fma_rn(-2.0f, v, 1.0f);
    return -ln_1p_reduced(f, low ? 0.0f : -1.0f);
}

}  // namespace flash_sampling
