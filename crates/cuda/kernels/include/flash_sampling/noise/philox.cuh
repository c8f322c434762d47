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
