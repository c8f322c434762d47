// Integer masses on an absolute grid of logits: the bin and the mass of one logit, as in core's mass_histogram.rs.
#pragma once

#include "../platform.cuh"

namespace flash_sampling {

constexpr u32 MASS_BINS = 512;
constexpr float MASS_WINDOW = 64.0f;

// Returns the lower edge of a logit's bin of 1/8 nat.
FS_FUNCTION float mass_edge(float logit) {
    const float size = bits_to_f32(f32_to_bits(logit) & 0x7fffffffu);
    if (!(size < 2097152.0f)) return logit;
    // + 0 gives the edge zero one sign.
    return add_rn(mul_rn(floorf(mul_rn(logit, 8.0f)), 0.125f), 0.0f);
}

// Returns the slot of an edge: 8 edge mod 512.
FS_FUNCTION u32 mass_slot(float edge) {
    const float size = bits_to_f32(f32_to_bits(edge) & 0x7fffffffu);
    if (size < 2097152.0f) return static_cast<u32>(static_cast<i32>(mul_rn(edge, 8.0f))) & (MASS_BINS - 1);
    const float rest = fmodf(edge, MASS_WINDOW);
    return static_cast<u32>(mul_rn(rest < 0.0f ? add_rn(rest, MASS_WINDOW) : rest, 8.0f));
}

// Returns e^r - 1 in units of 2^-30, for r from 0 to 1/8.
FS_FUNCTION u32 mass_fraction_above(float r) {
    const float p = fma_rn(fma_rn(bits_to_f32(0x3d341741u), r, bits_to_f32(0x3e2a7721u)), r, bits_to_f32(0x3f000057u));
    return static_cast<u32>(mul_rn(fma_rn(mul_rn(r, r), p, r), 1073741824.0f));
}

// Returns e^(logit - edge) in units of 2^-30.
FS_FUNCTION u64 mass_units(float logit, float edge) { return 1073741824u + mass_fraction_above(sub_rn(logit, edge)); }

// 1.5 * 2^23. The last bits of its sum with an integer below 2^22 in size are the bits of the integer.
constexpr float FLOOR_MAGIC = 12582912.0f;

// Returns the integer below a float smaller than 2^22 in size, plus FLOOR_MAGIC.
FS_FUNCTION float floor_with_magic(float x) {
#ifdef __CUDA_ARCH__
    return __fadd_rd(x, FLOOR_MAGIC);
#else
    return floorf(x) + FLOOR_MAGIC;
#endif
}

}  // namespace flash_sampling
