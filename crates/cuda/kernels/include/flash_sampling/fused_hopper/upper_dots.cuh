// From the sums of a shadow's codes and digits to upper bounds of dot products.
#pragma once

#include "multiply.cuh"

namespace flash_sampling::fused_hopper {

// The shadow's numbers of one token.
struct TokenBound {
    float scale = 0.0f, error = 0.0f, norm = 0.0f;

    // Loads the numbers of token m of a tile; zeros beyond the tile.
    template <class T>
    static __device__ __forceinline__ TokenBound load(const Consumer<T>& self, u32 m) {
        if (m >= self.size) return {};
        const Candidates& from = self.shared.candidates;
        return {from.scales[self.first + m], from.errors[self.first + m], from.norms[self.first + m]};
    }
};

// Returns an upper bound of a dot product from the sums of its high and low digits. The products keep the precision also if the
// dot product is tiny: an integer times a scale is a normal number.
__device__ __forceinline__ float upper_dot(i32 high, i32 low, const TokenBound& token, const HiddenBound& row) {
    const float sum = fma_rn(256.0f, i32_to_f32(high), i32_to_f32(low));
    return fma_rn(mul_rn(sum, row.scale), token.scale, row.of(token.error, token.norm));
}

// Multiplies a tile of the shadow. Writes the upper bounds in the places of dot products.
template <class T>
__device__ __forceinline__ void multiply_shadow(float (&d)[T::ACCUMULATORS], const u8* stages, Ring<T>& ring, u32 steps,
                                                const Consumer<T>& self) {
    const u32 m = self.slab() + self.lane / 4;
    const TokenBound tokens[2] = {TokenBound::load(self, m), TokenBound::load(self, m + 8)};
    i32 sums[2 * T::ACCUMULATORS];
    multiply<T, ptx::Operand::S8>(sums, stages, ring, steps, self);
#pragma unroll
    for (u32 j = 0; j < T::ACCUMULATORS / 4; ++j) {
        const float2 scale = self.pair(self.shared.hidden_scale, j), error = self.pair(self.shared.error_factor, j);
        const float2 norm = self.pair(self.shared.norm_factor, j), constant = self.pair(self.shared.constant, j);
#pragma unroll
        for (u32 e = 0; e < 4; ++e) {
            const HiddenBound row = e & 1 ? HiddenBound{scale.y, error.y, norm.y, constant.y}
                                          : HiddenBound{scale.x, error.x, norm.x, constant.x};
            d[4 * j + e] = upper_dot(sums[8 * j + e], sums[8 * j + 4 + e], tokens[e / 2], row);
        }
    }
}

}  // namespace flash_sampling::fused_hopper
