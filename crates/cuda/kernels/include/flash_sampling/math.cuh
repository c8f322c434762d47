// exp and tanh with the same bits on all platforms: the twin of core's math.rs.
#pragma once

#include "noise/log.cuh"

namespace flash_sampling {

FS_FUNCTION float exp(float x) {
    x = x > 88.0f ? 88.0f : x;
    x = x < -87.0f ? -87.0f : x;
    const float round = 12582912.0f;
    const float k = sub_rn(fma_rn(x, 1.44269504088896340736f, round), round);
    const float r = fma_rn(k, -bits_to_f32(LN_2_LO_BITS), fma_rn(k, -bits_to_f32(LN_2_HI_BITS), x));
    float p = bits_to_f32(0x3ab5122fu);
    p = fma_rn(p, r, bits_to_f32(0x3c091ceau));
    p = fma_rn(p, r, bits_to_f32(0x3d2aac79u));
    p = fma_rn(p, r, bits_to_f32(0x3e2aaa49u));
    p = fma_rn(p, r, bits_to_f32(0x3efffffeu));
    const float y = add_rn(fma_rn(mul_rn(r, r), p, r), 1.0f);
    return bits_to_f32(f32_to_bits(y) + (static_cast<u32>(static_cast<i32>(k)) << 23));
}

FS_FUNCTION float tanh(float x) {
    const float a = bits_to_f32(f32_to_bits(x) & 0x7fffffffu);
    if (a < 0.625f) {
        const float z = mul_rn(x, x);
        float t = bits_to_f32(0xbbbaf0e5u);
        t = fma_rn(t, z, bits_to_f32(0x3ca9134du));
        t = fma_rn(t, z, bits_to_f32(0xbd5c1e2du));
        t = fma_rn(t, z, bits_to_f32(0x3e088393u));
        t = fma_rn(t, z, bits_to_f32(0xbeaaaa99u));
        return fma_rn(mul_rn(x, z), t, x);
    }
    const float t = sub_rn(1.0f, div_rn(2.0f, add_rn(exp(add_rn(a, a)), 1.0f)));
    return bits_to_f32((f32_to_bits(t) & 0x7fffffffu) | (f32_to_bits(x) & 0x80000000u));
}

}  // namespace flash_sampling
