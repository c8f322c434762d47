// One pass over the existing logits of a row: which tokens can still reach a score, and their exact scores.
//
// The plain version gives every token its Gumbel and keeps the best:
//
//   for each token t: keep.offer(logit[t] + gumbel(word[t]), t)
//
// 1. A warp takes 256 tokens that begin at a multiple of 256, a lane eight of them in two groups of four, so that two
//    Philox blocks give all of a lane's words.
// 2. The two logarithms of a Gumbel are computed only for words that could reach `keep.cut()`, by word_limit (noise_bound.cuh); where even
//    the largest Gumbel could not, there are no words.
// 3. Without any cut the warp first finds one: a lower bound of its best score, from cheap logarithms.
// A token that is left out could not reach the cut, so what is kept is that of the plain version, bit for bit.
#pragma once

#include "abi.cuh"
#include "element.cuh"
#include "noise.cuh"
#include "noise_bound.cuh"
#include "noise/row_philox.cuh"
#include "perturb.cuh"

#ifdef __CUDACC__

namespace flash_sampling {

// Tokens of a warp at a time.
constexpr u32 SCAN_TOKENS = 256;

// The logits of one row, raw or transformed.
struct ExistingRow {
    const void* logits;  // `tokens` elements
    u32 first_token;
    u32 tokens;
};

// The eight logits of a lane, as they lie in memory.
template <Element TYPE>
struct Raw {
    u32 word[TYPE == Element::F32 ? 8 : 4];

    __device__ __forceinline__ float logit(u32 i) const {
        return TYPE == Element::F32 ? bits_to_f32(word[i]) : widen<TYPE>(word[i / 2], i & 1);
    }
};

// Where a lane's group of four begins in the warp's 256 tokens: what makes a load of 16 bytes a lane contiguous.
template <Element TYPE>
__device__ __forceinline__ u32 group_offset(u32 lane, u32 group) {
    return TYPE == Element::F32 ? 128 * group + 4 * lane : 8 * lane + 4 * group;
}

__device__ __forceinline__ void load_16_bytes(const void* from, u32* to) {
    asm volatile("ld.global.nc.L1::no_allocate.v4.u32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(to[0]), "=r"(to[1]), "=r"(to[2]), "=r"(to[3])
                 : "l"(from));
}

// Whether the row lies so that the address of every token that is a multiple of 256 is a multiple of 16.
template <Element TYPE>
__device__ __forceinline__ bool is_aligned(const ExistingRow& row) {
    constexpr u64 BYTES = TYPE == Element::F32 ? 4 : 2;
    return (reinterpret_cast<u64>(row.logits) - row.first_token * BYTES) % 16 == 0;
}

// Loads a lane's logits of the 256 tokens from `first` on (a multiple of 256). Tokens that are not in the row are -inf.
template <Element TYPE>
__device__ __forceinline__ Raw<TYPE> load_lane(const ExistingRow& row, bool aligned, u32 first, u32 lane) {
    Raw<TYPE> raw;
    constexpr u32 BYTES = TYPE == Element::F32 ? 4 : 2;
    // Modulo 2^32: the first 256 tokens may begin before the row does.
    const u32 at = first - row.first_token;
    if (aligned && first >= row.first_token && at + SCAN_TOKENS <= row.tokens) {
        const u8* const from = static_cast<const u8*>(row.logits) + static_cast<u64>(at) * BYTES;
        load_16_bytes(from + 16 * lane, raw.word);
        if (TYPE == Element::F32) load_16_bytes(from + 512 + 16 * lane, raw.word + (TYPE == Element::F32 ? 4 : 0));
        return raw;
    }
#pragma unroll
    for (u32 i = 0; i < 8; ++i) {
        const u32 t = at + group_offset<TYPE>(lane, i / 4) + i % 4;
        if (TYPE == Element::F32) {
            raw.word[i] = t < row.tokens ? static_cast<const u32*>(row.logits)[t] : 0xff800000u;
        } else {
            u32 bits = TYPE == Element::BF16 ? 0xff80u : 0xfc00u;
            if (t < row.tokens) bits = static_cast<const u16*>(row.logits)[t];
            if (i % 2 == 0) raw.word[i / 2] = bits; else raw.word[i / 2] |= bits << 16;
        }
    }
    return raw;
}

// Mask, biases and temperature of a lane's logits.
template <Element TYPE>
__device__ __forceinline__ void transform_lane(const RowTransform& row, u32 first, u32 lane, float (&logits)[8]) {
    if (row.mask) {
#pragma unroll
        for (u32 group = 0; group < 2; ++group) {
            const u32 token = first + group_offset<TYPE>(lane, group);
            const u32 word = (token >> 5) < row.mask_words ? row.mask[token >> 5] >> (token & 31) : 0;
#pragma unroll
            for (u32 i = 0; i < 4; ++i)
                if (!(word >> i & 1)) logits[4 * group + i] = -f32_infinity();
        }
    }
    if (row.biases) {
        // The warp's biases one by one: most warps have none.
        for (u32 at = row.find_bias(first); at < row.bias_count() && row.bias[at].token - first < SCAN_TOKENS; ++at) {
            const u32 token = row.bias[at].token;
#pragma unroll
            for (u32 i = 0; i < 8; ++i)
                if (first + group_offset<TYPE>(lane, i / 4) + i % 4 == token) logits[i] = row.adjust(logits[i], at);
        }
    }
    if (row.inv_temperature != 1.0f) {
#pragma unroll
        for (u32 i = 0; i < 8; ++i) logits[i] = mul_rn(logits[i], row.inv_temperature);
    }
}

// One of eight registers, by selects.
template <class T>
__device__ __forceinline__ T pick(const T (&from)[8], u32 i) {
    const T a = i & 1 ? from[1] : from[0], b = i & 1 ? from[3] : from[2];
    const T c = i & 1 ? from[5] : from[4], d = i & 1 ? from[7] : from[6];
    const T low = i & 2 ? b : a, high = i & 2 ? d : c;
    return i & 4 ? high : low;
}

// Products with 0 are NaN for NaN and for infinities of either sign: one multiplication a logit where all are finite.
__device__ __forceinline__ bool any_invalid(const float (&logits)[8]) {
    float sum = 0.0f;
#pragma unroll
    for (u32 i = 0; i < 8; ++i) sum = fma_rn(logits[i], 0.0f, sum);
    if (!is_nan(sum)) return false;
    bool invalid = false;
#pragma unroll
    for (u32 i = 0; i < 8; ++i) invalid |= !(logits[i] < f32_infinity());
    return invalid;
}

// Notes the first invalid logit of a lane. Rare, so the logits are read again.
template <Element TYPE>
__device__ __forceinline__ void note_invalid(const ExistingRow& existing, const RowTransform& row, u32 first, u32 lane,
                                             u64* invalid) {
#pragma unroll 1
    for (u32 i = 0; i < 8; ++i) {
        const u32 token = first + group_offset<TYPE>(lane, i / 4) + i % 4, t = token - existing.first_token;
        if (t >= existing.tokens) continue;
        checked_logit(element<TYPE>(existing.logits, t), row, token, invalid);
    }
}

__device__ __forceinline__ float warp_max(float x) {
    return from_monotone_bits(__reduce_max_sync(0xffffffffu, to_monotone_bits(x)));
}

// A lower bound of logit + Gumbel. For v <= 1/2 the exponential -ln(1 - v) is at most v + v^2; beyond, a Gumbel is below
// 0.37 and no bound worth having.
__device__ __forceinline__ float score_at_least(float logit, u32 word) {
    const float v = (u32_to_f32(word) + 1.0f) * WORD_SCALE;
    const float score = logit - __logf(v + v * v) - 1e-3f - 1e-6f * fabsf(logit);
    return v <= 0.5f ? score : -f32_infinity();
}

// Offers to `keep` every token that can reach its cut, among the 256-token parts `begin`, `begin + step`, ... below `end`
// of the vocabulary. All lanes of a warp call it together. `row` and
// `philox` are the draw's, in shared memory; `next` are the lane's logits of the part `begin`.
//
//   float Keep::cut()                      what a score must reach now; -inf at first, or fixed
//   float Keep::raise(float)               some score of the row is at least this; returns the cut that follows
//   void Keep::offer(float score, u32 token, float logit)
//   void Keep::weigh(logits, float top)    with WEIGHS: a lane's transformed logits of each part, and the largest of them
template <Element TYPE, bool WEIGHS = false, class Keep>
__device__ __forceinline__ void scan(const ExistingRow& existing, const Row& row, const RowPhilox* philox, u32 begin,
                                     u32 end, u32 step, Raw<TYPE> next, u64* invalid, Keep& keep) {
    const u32 lane = threadIdx.x % 32;
    const bool aligned = is_aligned<TYPE>(existing);
    // One register instead of the row's twelve, which are read where they are needed.
    const bool transforms = row.mask || row.biases || row.inv_temperature != 1.0f;
#pragma unroll 1
    for (u32 part = begin; part < end; part += step) {
        const u32 first = part * SCAN_TOKENS;
        float logits[8];
#pragma unroll
        for (u32 i = 0; i < 8; ++i) logits[i] = next.logit(i);
        if (part + step < end) next = load_lane<TYPE>(existing, aligned, (part + step) * SCAN_TOKENS, lane);

        // Before the transforms too: a mask hides what is invalid.
        bool bad = any_invalid(logits);
        if (transforms) {
            transform_lane<TYPE>(row.transform(), first, lane, logits);
            bad |= any_invalid(logits);
        }
        if (bad) {
            note_invalid<TYPE>(existing, row.transform(), first, lane, invalid);
#pragma unroll
            for (u32 i = 0; i < 8; ++i) logits[i] = logits[i] < f32_infinity() ? logits[i] : -f32_infinity();
        }
        float top = logits[0];
#pragma unroll
        for (u32 i = 1; i < 8; ++i) top = fmaxf(top, logits[i]);
        if constexpr (WEIGHS) keep.weigh(logits, top);

        // NOTE: one lane's view for all: other warps raise the cut at any time, and the lanes decide together below.
        float cut = __shfl_sync(0xffffffffu, keep.cut(), 0);
        if (row.greedy) {
            if (cut == -f32_infinity()) cut = keep.raise(warp_max(top));
            if (top < cut || top == -f32_infinity()) continue;
#pragma unroll 1
            for (u32 i = 0; i < 8; ++i) {
                const float logit = pick(logits, i);
                if (logit >= keep.cut() && logit > -f32_infinity())
                    keep.offer(logit, first + group_offset<TYPE>(lane, i / 4) + i % 4, logit);
            }
            continue;
        }

        // Most often every lane needs its words. All lanes decide alike: the warp reduces together below.
        const bool alive = top > -f32_infinity();
        if (!__any_sync(0xffffffffu, alive && !cannot_reach(top, cut))) continue;
        const u32 blocks[2] = {(first + group_offset<TYPE>(lane, 0)) >> 2, (first + group_offset<TYPE>(lane, 1)) >> 2};
        Words words[2];
        row_words(philox, blocks, words);
        if (cut == -f32_infinity()) {
            float least = -f32_infinity();
#pragma unroll
            for (u32 i = 0; i < 8; ++i) least = fmaxf(least, score_at_least(logits[i], words[i / 4].w[i % 4]));
            cut = keep.raise(warp_max(least));
        }
        const u32 limit = word_limit(top, cut);
        bool hit = false;
#pragma unroll
        for (u32 i = 0; i < 8; ++i) hit |= words[i / 4].w[i % 4] <= limit;
        if (!hit || !alive) continue;
        u32 hits = 0;
#pragma unroll
        for (u32 i = 0; i < 8; ++i) hits |= words[i / 4].w[i % 4] <= limit ? 1u << i : 0u;
#pragma unroll 1
        for (; hits; hits &= hits - 1) {
            const u32 i = __ffs(static_cast<int>(hits)) - 1;
            const u32 word = i & 4 ? Noise::pick(words[1], i & 3) : Noise::pick(words[0], i & 3);
            const float logit = pick(logits, i);
            if (logit == -f32_infinity() || word > word_limit(logit, keep.cut())) continue;
            const u32 token = first + group_offset<TYPE>(lane, i / 4) + i % 4;
            const Noise noise{row.seed, row.position};
            keep.offer(add_rn(logit, noise.gumbel_of(Domain::Token, row.draw, token, word)), token, logit);
        }
    }
}

}  // namespace flash_sampling

#endif
