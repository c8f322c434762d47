// The products of a tile of a shadow, as upper bounds of dot products.
#pragma once

#include "multiply.cuh"

namespace flash_sampling::fused_hopper {

// Loads the numbers of token m of a tile; zeros beyond the tile.
template <class T>
__device__ __forceinline__ TokenBound load_bound(const Consumer<T>& self, u32 m) {
    return m < self.size ? TokenBound::of(self.shared.candidates, self.first + m) : TokenBound{};
}

// Multiplies a tile of the shadow. Writes the upper bounds in the places of dot products.
template <class T>
__device__ __forceinline__ void multiply_shadow(float (&d)[T::ACCUMULATORS], const u8* stages, Ring<T>& ring, u32 steps,
                                                const Consumer<T>& self) {
    const u32 m = self.slab() + self.lane / 4;
    const TokenBound tokens[2] = {load_bound(self, m), load_bound(self, m + 8)};
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
