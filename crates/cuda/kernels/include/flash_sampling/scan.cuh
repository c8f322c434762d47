// Scans the existing logits of a row: finds tokens that can reach the score cutoff, and computes their exact scores.
//
// The plain version computes a Gumbel for every token and keeps the best score:
//
//   for each token t: keep.offer(logit[t] + gumbel(t), t)
//
// 1. A warp takes a part of 256 tokens that begins at a multiple of 256. A lane takes eight tokens of the part, in two
//    groups of four. Each group lies in one granule. The granule's word bounds the noise of its tokens
//    (noise_bound.cuh).
// 2. A part has sixteen granules, and so four Philox blocks. Once every eight parts, each lane computes one Philox
//    block, and the warp stores the words of eight parts in shared memory.
// 3. A lane scores a token only if the logit plus the noise bound can reach the cutoff.
// 4. A leader's score has a cheap lower bound. The best of these bounds raises the cutoff before any token is scored.
// 5. The tokens that are left wait in a queue, so that full warps compute their exact scores.
// A skipped token cannot reach the cutoff, so `keep` ends with the same result as the plain version, bit for bit.
#pragma once

#include "abi.cuh"
#include "element.cuh"
#include "noise.cuh"
#include "noise_bound.cuh"
#include "perturb.cuh"

#ifdef __CUDACC__

namespace flash_sampling {

// Tokens per part: the tokens of one step of a warp.
constexpr u32 SCAN_TOKENS = 256;
// Parts with words in shared memory at a time, and the number of these words; per warp.
constexpr u32 SCAN_PARTS = 8;
constexpr u32 SCAN_WORDS = SCAN_PARTS * SCAN_TOKENS / Granule::TOKENS;
static_assert(SCAN_WORDS == 4 * 32, "one Philox block per lane");

// A token that can reach the cutoff, and its granule's word.
struct Queued {
    u32 token;
    float logit;
    u32 word;
};

// The shared memory of one scanning warp. A queue has room for at least a token per lane.
template <u32 QUEUE>
struct WarpScan {
    u32 words[SCAN_WORDS];
    Queued queue[QUEUE];
};

// The logits of one row, raw or transformed.
struct ExistingRow {
    const void* logits;  // `tokens` elements
    u32 first_token;
    u32 tokens;
};

// The eight logits of a lane, in the element type of the row.
template <Element TYPE>
struct Raw {
    u32 word[TYPE == Element::F32 ? 8 : 4];

    __device__ __forceinline__ float logit(u32 i) const {
        return TYPE == Element::F32 ? bits_to_f32(word[i]) : widen<TYPE>(word[i / 2], i & 1);
    }
};

// Returns the offset of a lane's group of four in the part. This layout makes 16-byte loads of the lanes contiguous.
template <Element TYPE>
__device__ __forceinline__ u32 group_offset(u32 lane, u32 group) {
    return TYPE == Element::F32 ? 128 * group + 4 * lane : 8 * lane + 4 * group;
}

__device__ __forceinline__ void load_16_bytes(const void* from, u32* to) {
#ifdef __CUDA_ARCH__
    asm volatile("ld.global.nc.L1::no_allocate.v4.u32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(to[0]), "=r"(to[1]), "=r"(to[2]), "=r"(to[3])
                 : "l"(from));
#else
    memcpy(to, from, 16);
#endif
}

// Returns whether every token id that is a multiple of 256 has a 16-byte aligned address.
template <Element TYPE>
__device__ __forceinline__ bool is_aligned(const ExistingRow& row) {
    constexpr u64 BYTES = TYPE == Element::F32 ? 4 : 2;
    return (reinterpret_cast<u64>(row.logits) - row.first_token * BYTES) % 16 == 0;
}

// Loads a lane's logits of the part that begins at `first`, a multiple of 256. Tokens outside the row are -inf.
template <Element TYPE>
__device__ __forceinline__ Raw<TYPE> load_lane(const ExistingRow& row, bool aligned, u32 first, u32 lane) {
    Raw<TYPE> raw;
    constexpr u32 BYTES = TYPE == Element::F32 ? 4 : 2;
    // Modulo 2^32, because the first part may begin before the row.
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

// Applies mask, biases and temperature to a lane's logits.
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
        // One bias of the part at a time: most parts have no bias.
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

// Returns one of eight registers, by select instructions.
template <class T>
__device__ __forceinline__ T pick(const T (&from)[8], u32 i) {
    const T a = i & 1 ? from[1] : from[0], b = i & 1 ? from[3] : from[2];
    const T c = i & 1 ? from[5] : from[4], d = i & 1 ? from[7] : from[6];
    const T low = i & 2 ? b : a, high = i & 2 ? d : c;
    return i & 4 ? high : low;
}

// Returns whether any logit is NaN or +inf. Zero times NaN or an infinity of either sign is NaN, so finite logits take
// one multiply-add each.
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

// Records the first invalid logit of a lane. Invalid logits are rare, so the function reloads the logits.
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

// Computes the exact scores of the queued tokens that still reach the cutoff. All lanes of a warp call this function.
template <u32 QUEUE, class Keep>
__device__ __forceinline__ void score_queue(const Row& row, const WarpScan<QUEUE>& shared, u32 queued, Keep& keep) {
    __syncwarp();
#pragma unroll 1
    for (u32 slot = threadIdx.x % 32; slot < queued; slot += 32) {
        const auto [token, logit, word] = shared.queue[slot];
        const bool greedy = row.greedy;
        if (!reaches(logit, greedy ? 0.0f : noise_bound(Granule::minimum_bits(word)), keep.cut())) continue;
        float score = logit;
        if (!greedy) {
            const Noise noise{row.seed, row.position};
            const Granule granule = noise.granule(Domain::Token, row.draw, token, word);
            score = add_rn(logit, noise.gumbel_in(granule, Domain::Token, row.draw, token));
        }
        keep.offer(score, token, logit);
    }
    __syncwarp();
}

// Offers every token that can reach the cutoff to `keep`. All lanes of a warp call this function. The warp scans the
// parts `begin`, `begin + step`, ... below `end` of the vocabulary. `row` lies in shared memory and belongs to one
// draw. `shared` belongs to the warp. `next` holds the lane's logits of the part `begin`.
//
//   float Keep::cut()                      returns the current score cutoff; -inf at first, or fixed
//   constexpr bool Keep::RAISES            whether a lower bound of any token's score may raise the cutoff
//   float Keep::raise(float score)         with RAISES: some token has at least this score; returns the new cutoff
//   void Keep::offer(float score, u32 token, float logit)
//   void Keep::weigh(logits, float top)    with WEIGHS: takes a lane's transformed logits of a part, and their largest
template <Element TYPE, bool WEIGHS = false, u32 QUEUE, class Keep>
__device__ __forceinline__ void scan(const ExistingRow& existing, const Row& row, WarpScan<QUEUE>& shared, u32 begin,
                                     u32 end, u32 step, Raw<TYPE> next, u64* invalid, Keep& keep) {
    const u32 lane = threadIdx.x % 32;
    const bool aligned = is_aligned<TYPE>(existing);
    // One register instead of twelve: the code reads the row's fields from shared memory at each use.
    const bool transforms = row.mask || row.biases || row.inv_temperature != 1.0f;
    const bool greedy = row.greedy;
    u32 queued = 0;
#pragma unroll 1
    for (u32 part = begin, turn = 0; part < end; part += step, turn = (turn + 1) % SCAN_PARTS) {
        const u32 first = part * SCAN_TOKENS;
        if (turn == 0 && !greedy) {
            __syncwarp();
            const Words made = Noise{row.seed, row.position}.words(Domain::Granule, row.draw, 4 * (part + lane / 4 * step) + lane % 4);
#pragma unroll
            for (u32 w = 0; w < 4; ++w) shared.words[4 * lane + w] = made.w[w];
            __syncwarp();
        }
        float logits[8];
#pragma unroll
        for (u32 i = 0; i < 8; ++i) logits[i] = next.logit(i);
        if (part + step < end) next = load_lane<TYPE>(existing, aligned, (part + step) * SCAN_TOKENS, lane);

        // Also before the transforms, because a mask hides an invalid logit.
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
        float tops[2];
#pragma unroll
        for (u32 g = 0; g < 2; ++g)
            tops[g] = fmaxf(fmaxf(logits[4 * g], logits[4 * g + 1]), fmaxf(logits[4 * g + 2], logits[4 * g + 3]));
        if constexpr (WEIGHS) keep.weigh(logits, fmaxf(tops[0], tops[1]));

        u32 word[2] = {0, 0};
        float bound[2] = {0.0f, 0.0f};
        if (!greedy) {
#pragma unroll
            for (u32 g = 0; g < 2; ++g) {
                word[g] = shared.words[(turn * SCAN_TOKENS + group_offset<TYPE>(lane, g)) / Granule::TOKENS];
                bound[g] = noise_bound(Granule::minimum_bits(word[g]));
            }
        }
        float cut = keep.cut();
        const bool is_open = reaches(tops[0], bound[0], cut) || reaches(tops[1], bound[1], cut);
        if (!__any_sync(0xffffffffu, is_open)) continue;
        if constexpr (Keep::RAISES) {
            float least = greedy ? fmaxf(tops[0], tops[1]) : -f32_infinity();
#pragma unroll
            for (u32 g = 0; g < 2; ++g) {
                const bool has_leader = ((word[g] ^ group_offset<TYPE>(lane, g)) % Granule::TOKENS) < 4;
                if (greedy || !has_leader) continue;
                const float logit = pick(logits, 4 * g + word[g] % 4);
                least = fmaxf(least, leader_score_at_least(logit, Granule::minimum_bits(word[g])));
            }
            cut = keep.raise(warp_max(least));
        }
        u32 hits = 0;
#pragma unroll
        for (u32 i = 0; i < 8; ++i) hits |= reaches(logits[i], bound[i / 4], cut) ? 1u << i : 0u;
#pragma unroll 1
        while (const u32 lanes = __ballot_sync(0xffffffffu, hits)) {
            if (queued + __popc(lanes) > QUEUE) {
                score_queue(row, shared, queued, keep);
                queued = 0;
            }
            if (hits) {
                const u32 i = __ffs(static_cast<int>(hits)) - 1;
                const u32 token = first + group_offset<TYPE>(lane, i / 4) + i % 4;
                shared.queue[queued + __popc(lanes & ((1u << lane) - 1))] = {token, pick(logits, i), i & 4 ? word[1] : word[0]};
                hits &= hits - 1;
            }
            queued += __popc(lanes);
        }
    }
    score_queue(row, shared, queued, keep);
}

}  // namespace flash_sampling

#endif
