// Scans the existing logits of a row. Finds the tokens that can reach the score cutoff, and computes their exact scores.
//
// The plain version computes a Gumbel for every token and keeps the best score:
//
//   for each token t: keep.offer(logit[t] + gumbel(t), t)
//
// 1. A warp takes a part of 256 tokens that begins at a multiple of 256. A lane takes eight tokens of the part, in two groups of
//    four. Each group is in one granule, and the granule's word bounds the noise of its tokens (bound.cuh).
// 2. A part has sixteen granules, and so four Philox blocks. Once every eight parts, each lane computes one Philox block, and the
//    warp stores words and noise bounds in shared memory. With little shared memory, half of the lanes do so every four parts.
// 3. A lane scores a token only if the logit plus the noise bound can reach the cutoff.
// 4. A leader's score has a cheap lower bound. The best of these bounds raises the cutoff before any token is scored.
// 5. The remaining tokens enter a queue, so that full warps compute their exact scores.
//
// A skipped token cannot reach the cutoff, so `keep` has the same final result as the plain version, bit for bit.
#pragma once

#include "../abi.cuh"
#include "../element.cuh"
#include "../noise/noise.cuh"
#include "../noise/bound.cuh"
#include "../perturb.cuh"

#ifdef __CUDACC__

namespace flash_sampling {

// Tokens per part: the tokens of one step of a warp.
constexpr u32 SCAN_TOKENS = 256;

// A token that can reach the cutoff, and its granule's word.
struct Queued {
    u32 token;
    float logit;
    u32 word;
};

// The shared memory of one warp: the words and noise bounds of PARTS parts, and a queue for at least one token per lane.
template <u32 QUEUE, u32 PARTS = 8>
struct WarpScan {
    static constexpr u32 GRANULES = PARTS * SCAN_TOKENS / Granule::TOKENS;
    static_assert(GRANULES <= 4 * 32, "at most one Philox block per lane");
    u32 words[GRANULES];
    float bounds[GRANULES];
    Queued queue[QUEUE];
};

// The logits of one row, raw or transformed.
struct ExistingRow {
    const void* logits;  // `tokens` elements
    u32 first_token;
    u32 tokens;

    // The parts of the vocabulary that the row overlaps.
    __device__ __forceinline__ u32 begin_part() const { return first_token / SCAN_TOKENS; }
    __device__ __forceinline__ u32 end_part() const { return (first_token + tokens - 1) / SCAN_TOKENS + 1; }
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
__device__ __forceinline__ constexpr u32 group_offset(u32 lane, u32 group) {
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

// The logits of a row, by parts. All lanes of a warp construct it.
template <Element TYPE>
struct RowParts {
    static constexpr u32 BYTES = SCAN_TOKENS * (TYPE == Element::F32 ? 4 : 2);
    ExistingRow row;
    u32 first_whole, whole;  // the parts that 16-byte loads read
    const u8* lane_of_part_0;

    __device__ __forceinline__ explicit RowParts(const ExistingRow& row) : row(row) {
        const u64 first_bytes = static_cast<u64>(row.first_token) * (BYTES / SCAN_TOKENS);
        const u64 part_0 = reinterpret_cast<u64>(row.logits) - first_bytes;
        const u32 first = (row.first_token + SCAN_TOKENS - 1) / SCAN_TOKENS;
        const u32 end = (row.first_token + row.tokens) / SCAN_TOKENS;
        // NOTE: through shuffles. Otherwise the compiler recomputes these values for every part.
        lane_of_part_0 = reinterpret_cast<const u8*>(__shfl_sync(0xffffffffu, part_0, 0)) + 16 * (threadIdx.x % 32);
        first_whole = __shfl_sync(0xffffffffu, first, 0);
        whole = __shfl_sync(0xffffffffu, part_0 % 16 == 0 && end > first ? end - first : 0, 0);
    }

    // The lane's logits of a part. Tokens outside the row are -inf.
    __device__ __forceinline__ Raw<TYPE> load(u32 part) const {
        Raw<TYPE> raw;
        if (part - first_whole < whole) {
            const u8* const from = lane_of_part_0 + static_cast<u64>(part) * BYTES;
            load_16_bytes(from, raw.word);
            if (TYPE == Element::F32) load_16_bytes(from + 512, raw.word + (TYPE == Element::F32 ? 4 : 0));
            return raw;
        }
#pragma unroll
        for (u32 i = 0; i < 8; ++i) {
            // Modulo 2^32, because the first part may begin before the row.
            const u32 token = part * SCAN_TOKENS + group_offset<TYPE>(threadIdx.x % 32, i / 4) + i % 4, t = token - row.first_token;
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
};

// Applies mask and biases to a lane's logits.
template <Element TYPE>
__device__ __forceinline__ void adjust_lane(const RowTransform& row, u32 first, u32 lane, float (&logits)[8]) {
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
}

// Applies mask, biases and temperature to a lane's logits.
template <Element TYPE>
__device__ __forceinline__ void transform_lane(const RowTransform& row, u32 first, u32 lane, float (&logits)[8]) {
    adjust_lane<TYPE>(row, first, lane, logits);
    if (row.inv_temperature != 1.0f) {
#pragma unroll
        for (u32 i = 0; i < 8; ++i) logits[i] = mul_rn(logits[i], row.inv_temperature);
    }
}

// Returns one of eight registers, through select instructions.
template <class T>
__device__ __forceinline__ T pick(const T (&from)[8], u32 i) {
    const T a = i & 1 ? from[1] : from[0], b = i & 1 ? from[3] : from[2];
    const T c = i & 1 ? from[5] : from[4], d = i & 1 ? from[7] : from[6];
    const T low = i & 2 ? b : a, high = i & 2 ? d : c;
    return i & 4 ? high : low;
}

// Computes the largest logit of each group of a lane, or NaN if the group contains NaN.
__device__ __forceinline__ void find_tops(const float (&logits)[8], float (&tops)[2]) {
#pragma unroll
    for (u32 g = 0; g < 2; ++g)
        tops[g] = max_or_nan(max_or_nan(logits[4 * g], logits[4 * g + 1]), max_or_nan(logits[4 * g + 2], logits[4 * g + 3]));
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
template <u32 QUEUE, u32 PARTS, class Keep>
__device__ __forceinline__ void score_queue(const Row& row, const WarpScan<QUEUE, PARTS>& shared, u32 queued, Keep& keep) {
    __syncwarp();
#pragma unroll 1
    for (u32 slot = threadIdx.x % 32; slot < queued; slot += 32) {
        const auto [token, logit, word] = shared.queue[slot];
        const bool greedy = row.greedy;
        if (!(logit > logit_threshold(keep.cut(), greedy ? 0.0f : noise_bound(Granule::minimum_bits(word))))) continue;
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

// Offers every token that can reach the cutoff to `keep`. All lanes of a warp call this function. The warp scans the parts
// `begin`, `begin + step`, ... below `end` of the vocabulary. `row` is the row of one draw, in shared memory. `shared` belongs to
// the warp. `next` holds the lane's logits of part `begin`, which the caller loads early.
//
//   float Keep::cut()                      returns the current score cutoff: -inf at first, or a fixed one
//   constexpr bool Keep::RAISES            whether a lower bound of any token's score may raise the cutoff
//   float Keep::raise(float score)         with RAISES: some token has at least this score; returns the new cutoff
//   void Keep::offer(float score, u32 token, float logit)
template <Element TYPE, u32 QUEUE, u32 PARTS, class Keep>
__device__ __forceinline__ void scan(const RowParts<TYPE>& parts, const Row& row, WarpScan<QUEUE, PARTS>& shared, u32 begin, u32 end,
                                     u32 step, Raw<TYPE> next, u64* invalid, Keep& keep) {
    constexpr u32 GRANULES = WarpScan<QUEUE, PARTS>::GRANULES;
    const u32 lane = threadIdx.x % 32;
    // One register instead of twelve: the code reads the row's other fields from shared memory at each use.
    const bool adjusts = row.mask || row.biases;
    const bool greedy = row.greedy;
    const float inv_temperature = row.inv_temperature;
    // The granule index, within PARTS parts, of the lane's first group, and its distance to the second group's granule.
    constexpr u32 APART = (group_offset<TYPE>(0, 1) - group_offset<TYPE>(0, 0)) / Granule::TOKENS;
    u32 granule = GRANULES, queued = 0;
#pragma unroll 1
    for (u32 part = begin; part < end; part += step, granule += SCAN_TOKENS / Granule::TOKENS) {
        const u32 first = part * SCAN_TOKENS;
        if (granule >= GRANULES) {
            granule = group_offset<TYPE>(lane, 0) / Granule::TOKENS;
            __syncwarp();
            Words made{};
            if (!greedy) {
                const u32 of_lane = 4 * (part + lane / 4 * step) + lane % 4;
                made = Noise{row.seed, row.position}.words(Domain::Granule, row.draw, of_lane);
            }
#pragma unroll
            for (u32 w = 0; w < 4 && 4 * lane < GRANULES; ++w) {
                shared.words[4 * lane + w] = made.w[w];
                shared.bounds[4 * lane + w] = greedy ? 0.0f : noise_bound(Granule::minimum_bits(made.w[w]));
            }
            __syncwarp();
        }
        float logits[8];
#pragma unroll
        for (u32 i = 0; i < 8; ++i) logits[i] = next.logit(i);
        if (part + step < end) next = parts.load(part + step);

        bool bad = false;
        float tops[2];
        if (adjusts) {
            // A mask hides an invalid logit.
            find_tops(logits, tops);
            bad = !(max_or_nan(tops[0], tops[1]) < f32_infinity());
            adjust_lane<TYPE>(row.transform(), first, lane, logits);
        }
        if (inv_temperature != 1.0f) {
#pragma unroll
            for (u32 i = 0; i < 8; ++i) logits[i] = mul_rn(logits[i], inv_temperature);
        }
        find_tops(logits, tops);
        if (bad || !(max_or_nan(tops[0], tops[1]) < f32_infinity())) {
            note_invalid<TYPE>(parts.row, row.transform(), first, lane, invalid);
#pragma unroll
            for (u32 i = 0; i < 8; ++i) logits[i] = logits[i] < f32_infinity() ? logits[i] : -f32_infinity();
            find_tops(logits, tops);
        }

        const float bound[2] = {shared.bounds[granule], shared.bounds[granule + APART]};
        float cut = keep.cut();
        const bool is_open = tops[0] > logit_threshold(cut, bound[0]) || tops[1] > logit_threshold(cut, bound[1]);
        if (!__any_sync(0xffffffffu, is_open)) continue;
        const u32 word[2] = {shared.words[granule], shared.words[granule + APART]};
        if constexpr (Keep::RAISES) {
            float least = greedy ? fmaxf(tops[0], tops[1]) : -f32_infinity();
#pragma unroll
            for (u32 g = 0; g < 2; ++g) {
                const bool has_leader = ((word[g] ^ group_offset<TYPE>(lane, g)) % Granule::TOKENS) < 4;
                if (greedy || !has_leader) continue;
                const float logit = pick(logits, 4 * g + word[g] % 4);
                least = fmaxf(least, leader_score_at_least(logit, bound[g], Granule::minimum_bits(word[g])));
            }
            cut = keep.raise(warp_max(least));
        }
        u32 hits = 0;
#pragma unroll
        for (u32 i = 0; i < 8; ++i) hits |= logits[i] > logit_threshold(cut, bound[i / 4]) ? 1u << i : 0u;
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
