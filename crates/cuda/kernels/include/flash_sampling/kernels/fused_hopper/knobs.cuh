// What the instance for rows with all knobs does more: it keeps the raw logits of a tile on request, and looks at masks
// before anything is scored, so that tokens that a mask forbids cost nothing however many there are.
#pragma once

#include "../../epilogue/store.cuh"
#include "filter.cuh"

namespace flash_sampling::fused_hopper {

// Stores the raw logits of a thread's elements. Eight lanes hold tokens side by side: whole sectors.
template <class T>
__device__ __forceinline__ void store_raw(const float (&d)[T::UNITS][T::ACCUMULATORS], const u32 (&real)[T::UNITS],
                                          const Call& call, const LogitStore& stored, u32 first, const Consumer& self) {
    const bool is_plain = call.head.scale == 1.0f && call.head.soft_cap == 0.0f;
    const u64 step = 8 * stored.stride;
#pragma unroll
    for (int u = 0; u < T::UNITS; ++u) {
        float* to = stored.logits + self.column(0) * stored.stride + first + self.slab(u) + self.lane / 4;
#pragma unroll
        for (int j = 0; j < T::ACCUMULATORS / 4; ++j, to += step) {
#pragma unroll
            for (int e = 0; e < 4; ++e) {
                if (self.column(j) + e % 2 >= call.row_count || !(real[u] >> e & 1)) continue;
                const float dot = d[u][4 * j + e];
                to[(e & 1 ? stored.stride : 0) + (e & 2 ? 8 : 0)] = is_plain ? dot : call.head.apply(dot, 0.0f, false);
            }
        }
    }
}

// Whether any row has a mask; looked up each time, which takes no register.
template <class T>
__device__ __forceinline__ bool has_masks(const Call& call, const Shared<T>& shared, const Consumer& self) {
    bool any = false;
    for (u32 r = self.lane; r < call.row_count; r += 32) any |= shared.rows[r].mask != nullptr;
    return __any_sync(0xffffffffu, any);
}

// Sets, in `allowed`, the bits of the elements that no mask forbids.
template <class T>
__device__ __forceinline__ void look_at_masks(u32 (&allowed)[T::UNITS][T::WORDS], const Call& call, const Shared<T>& shared,
                                              u32 first, const Consumer& self) {
#pragma unroll
    for (int u = 0; u < T::UNITS; ++u) {
        const u32 low = call.first_token + first + self.slab(u) + self.lane / 4, high = low + 8;
#pragma unroll
        for (int w = 0; w < T::WORDS; ++w) {
            u32 bits = ~0u;
#pragma unroll
            for (int i = 0; i < T::WORD_BITS / 2; ++i) {
                const u32 column = w * 64 + self.column(i / 2) + i % 2;
                if (column >= call.row_count) continue;
                const Row& row = shared.rows[column];
                if (!row.mask) continue;
                const u32 a = (low >> 5) < row.mask_words ? row.mask[low >> 5] >> (low & 31) : 0;
                const u32 b = (high >> 5) < row.mask_words ? row.mask[high >> 5] >> (high & 31) : 0;
                bits &= ~((~a & 1) << (i / 2 * 4 + i % 2) | (~b & 1) << (i / 2 * 4 + i % 2 + 2));
            }
            allowed[u][w] = bits;
        }
    }
}

}  // namespace flash_sampling::fused_hopper
