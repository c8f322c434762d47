// philox4x32-10 (Salmon et al. 2011), with Random123's constants.
#pragma once

#include "../platform.cuh"

namespace flash_sampling {

struct Words {
    u32 w[4];
};

constexpr u32 PHILOX_M4x32_0 = 0xD2511F53u;
constexpr u32 PHILOX_M4x32_1 = 0xCD9E8D57u;
constexpr u32 PHILOX_W32_0 = 0x9E3779B9u;
constexpr u32 PHILOX_W32_1 = 0xBB67AE85u;

FS_FUNCTION Words philox4x32_round(const Words& c, u32 k0, u32 k1) {
    const u64 p0 = mul_wide(PHILOX_M4x32_0, c.w[0]);
    const u64 p1 = mul_wide(PHILOX_M4x32_1, c.w[2]);
    return {{static_cast<u32>(p1 >> 32) ^ c.w[1] ^ k0, static_cast<u32>(p1), static_cast<u32>(p0 >> 32) ^ c.w[3] ^ k1,
             static_cast<u32>(p0)}};
}

// The high half of factor * x from 16-bit products.
FS_FUNCTION u32 narrow_mul_high(u32 factor, u32 x) {
    const u32 fl = factor & 0xffffu, fh = factor >> 16, xl = x & 0xffffu, xh = x >> 16;
    const u32 middle = xh * fl + (xl * fl >> 16);
    const u32 other = xl * fh + (middle & 0xffffu);
    return xh * fh + (middle >> 16) + (other >> 16);
}

// The same round without wide multiplications. On Hopper those share a pipe with the tensor cores: beside a running
// matmul this one is free, and the short one slows the matmul down by a quarter.
FS_FUNCTION Words narrow_philox4x32_round(const Words& c, u32 k0, u32 k1) {
    return {{narrow_mul_high(PHILOX_M4x32_1, c.w[2]) ^ c.w[1] ^ k0, PHILOX_M4x32_1 * c.w[2],
             narrow_mul_high(PHILOX_M4x32_0, c.w[0]) ^ c.w[3] ^ k1, PHILOX_M4x32_0 * c.w[0]}};
}

FS_FUNCTION Words philox4x32_10(Words c, u32 k0, u32 k1) {
#if defined(__CUDACC__)
#pragma unroll
#endif
    for (int round = 0; round < 10; ++round) {
        c = philox4x32_round(c, k0, k1);
        k0 += PHILOX_W32_0;
        k1 += PHILOX_W32_1;
    }
    return c;
}

}  // namespace flash_sampling
