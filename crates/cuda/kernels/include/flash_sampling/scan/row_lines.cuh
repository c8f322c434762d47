// A pass over the float32 logits of a row by many warps, with 16-byte loads in flight ahead of their use.
#pragma once

#include "scan.cuh"

#ifdef __CUDACC__

namespace flash_sampling {

// This warp's part of a row: every `warps`-th line of 128 tokens, starting at the row's first token. The constructor starts the
// first loads. SHORT: the code for a line exists once instead of AHEAD times, for short kernels, where instruction fetches count.
template <u32 AHEAD, bool SHORT = false>
struct RowLines {
    static constexpr u32 LINE = 128;

    const float* logits;
    u32 first_token, tokens;
    u32 end;       // the number of tokens in whole 16 bytes
    u32 at, step;  // the lane's next tokens, and the step between lines
    u32 warp;
    u32 next[AHEAD][4];

    // Whether 16-byte loads are possible and each load has the tokens of one Philox block.
    static __device__ __forceinline__ bool takes(const ExistingRow& row) {
        return reinterpret_cast<u64>(row.logits) % 16 == 0 && row.first_token % 4 == 0;
    }

    __device__ __forceinline__ RowLines(const ExistingRow& row, u32 warp, u32 warps)
        : logits(static_cast<const float*>(row.logits)), first_token(row.first_token), tokens(row.tokens), end(row.tokens & ~3u),
          at(LINE * warp + 4 * (threadIdx.x % 32)), step(LINE * warps), warp(warp) {
#pragma unroll
        for (u32 a = 0; a < AHEAD; ++a) load(at + a * step, next[a]);
    }

    // Returns the most tokens of a thread.
    __device__ __forceinline__ u32 most() const { return 4 * (end / step + 2); }

    // Calls add(l, first) with four transformed logits from token `first` on; -inf beyond the row. A warp's lanes call add
    // converged.
    template <class Add>
    __device__ __forceinline__ void each(float inv_temperature, Add add) {
        // NOTE: all lanes continue while the warp's first lane has tokens.
        const u32 lane_offset = 4 * (threadIdx.x % 32);
        if constexpr (SHORT) {
#pragma unroll 1
            for (; at - lane_offset < end; at += step) {
                float l[4];
#pragma unroll
                for (u32 i = 0; i < 4; ++i) l[i] = mul_rn(bits_to_f32(next[0][i]), inv_temperature);
#pragma unroll
                for (u32 a = 1; a < AHEAD; ++a)
#pragma unroll
                    for (u32 i = 0; i < 4; ++i) next[a - 1][i] = next[a][i];
                load(at + AHEAD * step, next[AHEAD - 1]);
                add(l, first_token + at);
            }
        }
#pragma unroll 1
        for (; !SHORT && at - lane_offset < end; at += AHEAD * step) {
#pragma unroll
            for (u32 a = 0; a < AHEAD; ++a) {
                float l[4];
#pragma unroll
                for (u32 i = 0; i < 4; ++i) l[i] = mul_rn(bits_to_f32(next[a][i]), inv_temperature);
                load(at + (a + AHEAD) * step, next[a]);
                add(l, first_token + at + a * step);
            }
        }
        // Up to three tokens after the last whole 16 bytes.
        if (warp != 0 || end == tokens) return;
        float l[4];
#pragma unroll
        for (u32 i = 0; i < 4; ++i)
            l[i] = end + i < tokens && lane_offset == 0 ? mul_rn(logits[end + i], inv_temperature) : -f32_infinity();
        add(l, first_token + end);
    }

  private:
    __device__ __forceinline__ void load(u32 from, u32 (&to)[4]) const {
#pragma unroll
        for (u32 i = 0; i < 4; ++i) to[i] = 0xff800000u;
        if (from < end) load_16_bytes(logits + from, to);
    }
};

}  // namespace flash_sampling

#endif
