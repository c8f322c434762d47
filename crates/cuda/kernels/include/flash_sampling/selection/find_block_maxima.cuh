// The largest logit of each granule (16 tokens), from logits in memory, for rows with min-p first or a top-k. For logits of the
// fused kernel, this kernel is not necessary: the fused kernel stores the maxima beside the logits (store_logits.cuh).
#pragma once

#include "../ptx/arithmetic.cuh"
#include "filter_call.cuh"

#ifdef __CUDACC__

namespace flash_sampling {

struct FindBlockMaxima {
    static constexpr u32 THREADS = 256;
    static constexpr u32 EACH = 4;   // tokens per load
    static constexpr u32 LOADS = 8;  // loads per thread
    static constexpr u32 TOKENS = THREADS * EACH * LOADS;  // tokens per block
    static constexpr u32 LANES = BlockMaxima::TOKENS / EACH;  // lanes per granule

    const FilterCall& call;  // raw logits; each row begins at a multiple of 16 bytes, and loads of 16 bytes can read its end
    u16* maxima;             // the maxima of the draws, in the layout of BlockMaxima

    // Writes the maxima of one part of the row of draw i. One block has one part.
    __device__ __forceinline__ void block(u32 part, u32 i) const {
        const RowFilters& filters = call.filters[i];
        // The kernel of filters reads all logits of rows with a mask or biases.
        if (!filters.is_any() || filters.is_by_mass() || call.rows[i].mask || call.rows[i].biases) return;
        const float* const from = static_cast<const float*>(call.row(i).logits);
        const u32 granules = BlockMaxima::granules_of(call.tokens);
        u16* const to = maxima + BlockMaxima::octet(i / BlockMaxima::ROWS, granules) + i % BlockMaxima::ROWS;
        const u32 first = part * TOKENS + threadIdx.x * EACH;
        u32 words[LOADS][EACH];
        // Starts all loads before the first result is used.
#pragma unroll
        for (u32 k = 0; k < LOADS; ++k) {
            const u32 token = first + k * THREADS * EACH;
            if (token < call.tokens) load_16_bytes(from + token, words[k]);
        }
#pragma unroll
        for (u32 k = 0; k < LOADS; ++k) {
            const u32 token = first + k * THREADS * EACH;
            float top = -f32_infinity();
#pragma unroll
            for (u32 e = 0; e < EACH; ++e)
                if (token + e < call.tokens) top = fmaxf(top, bits_to_f32(words[k][e]));
#pragma unroll
            for (u32 distance = 1; distance < LANES; distance *= 2) top = fmaxf(top, __shfl_xor_sync(0xffffffffu, top, distance));
            if (threadIdx.x % LANES == 0 && token < call.tokens)
                to[token / BlockMaxima::TOKENS * BlockMaxima::ROWS] = static_cast<u16>(ptx::pair_of_halves(top, top));
        }
    }
};

}  // namespace flash_sampling

#endif
