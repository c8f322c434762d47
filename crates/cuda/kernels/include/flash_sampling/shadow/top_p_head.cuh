// The head of a row with a top-k and then a top-p: the few largest logits, if these surely contain every token that top-p keeps.
// Then the other tokens need no logits. Their mass decides where top-p ends, so it must not matter: bounds of it suffice.
//
// Top-p keeps a token if the mass before it is below top-p's share of the mass of all tokens that top-k keeps. With bounds of
// logits, that share and the masses before a token are intervals. Each token of the head must be surely kept or surely dropped, and
// all tokens below the head surely dropped.
#pragma once

#include "../math.cuh"
#include "../selection/digit.cuh"
#include "../selection/row_lists.cuh"

#ifdef __CUDACC__

namespace flash_sampling {

struct TopPHead {
    static constexpr u32 TOKENS = 31;  // of a head at most: a lane each, and one lane for all other tokens
    // The relative error of the masses here and in FilterRow, and of top-p's share.
    static constexpr float SLACK = 1e-3f;

    // The listed tokens of a row, and a cutoff that tokens must reach.
    struct Listed {
        const u64* uppers;     // ordered bits of upper bounds
        const u32* estimates;  // monotone bits
        u32 count;
        u32 cut;
    };

    // Bounds of the logits of the head's tokens.
    float low[TOKENS], high[TOKENS];
    u32 count;      // more than TOKENS: the head lacks tokens
    u32 least;      // monotone bits: tokens with smaller upper bounds are below the head
    float highest;  // the logit that masses are relative to
    float below;    // an upper bound of the mass of the tokens below the head that top-k may keep
    u32 suffices;

    // Whether a row may have a head.
    static FS_FUNCTION bool serves(const RowFilters& filters) {
        return filters.top_k > TOKENS && filters.has_top_p() && !filters.is_min_p_first();
    }

    __device__ __forceinline__ float mass(float logit) const { return expf(logit - highest); }

    // Finds the head, and returns whether it probably suffices. `largest` is the largest estimate, and `distance` that of
    // estimates from upper bounds. `search` has the row's filters and an empty histogram. All threads of the block call this.
    template <u32 THREADS, class Search>
    __device__ __forceinline__ bool find(Search& search, const Listed& listed, float largest, float distance) {
        constexpr u32 DIGITS = 1 << DIGIT_BITS;
        const float start = from_monotone_bits(listed.cut), scale = (DIGITS - 1) / (largest - start);
        if (!(scale > 0.0f && is_finite(scale))) return false;
        // Counts upper bounds in equal intervals from the cutoff to the largest estimate.
        for (u32 i = threadIdx.x; i < listed.count; i += THREADS) {
            const u32 bits = static_cast<u32>(listed.uppers[i] >> 32);
            if (bits < listed.cut) continue;
            const float upper = fminf(from_monotone_bits(bits), largest);
            atomicAdd(&search.histogram[static_cast<u32>((upper - start) * scale)], 1u);
        }
        __syncthreads();
        if (threadIdx.x < 32) find_digit(search, TOKENS + 1);
        __syncthreads();
        // The digit after the head's last.
        const u32 digit = search.digit;
        if (digit == ~0u || digit + 1 >= DIGITS) return false;
        const auto edge = [&](u32 of) { return start + u32_to_f32(of) / scale; };
        if (threadIdx.x == 0) {
            count = 0;
            highest = largest;
            least = to_monotone_bits(edge(digit + 1));
        }
        __syncthreads();
        if (threadIdx.x < 32) {
            // A bound at the edge of the head may have the digit above.
            const float sum = mass_upto(search, digit + 1, edge);
            if (threadIdx.x == 0) below = sum;
        }
        // Exact logits are within five deviations of the middle between the bounds, nearly always.
        const float deviations = 0.625f * (distance - 1.0f);
        for (u32 i = threadIdx.x; i < listed.count; i += THREADS) {
            const u32 bits = static_cast<u32>(listed.uppers[i] >> 32);
            if (bits < least) continue;
            const u32 at = atomicAdd(&count, 1u);
            if (at >= TOKENS) continue;
            const float upper = from_monotone_bits(bits), bound = (upper - from_monotone_bits(listed.estimates[i])) / distance;
            low[at] = upper - bound * (1.0f + deviations);
            high[at] = upper - bound * (1.0f - deviations);
        }
        __syncthreads();
        if (threadIdx.x < 32) {
            const bool is_enough = decides(search.filters.top_p, below);
            if (threadIdx.x == 0) suffices = is_enough;
        }
        __syncthreads();
        return suffices;
    }

    // Whether the head suffices by its exact logits, those of a list that reach it. One warp calls this.
    __device__ __forceinline__ bool confirm(const u64* keys, u32 listed, const RowFilters& filters) {
        const u32 lane = threadIdx.x % 32, tokens = count;
        u32 found = 0;
        for (u32 first = 0; first < listed; first += 32) {
            const u64 key = first + lane < listed ? __ldcg(keys + first + lane) : 0;
            const bool is_head = static_cast<u32>(key >> 32) >= least;
            const u32 ballot = __ballot_sync(0xffffffffu, is_head), at = found + __popc(ballot & ((1u << lane) - 1));
            if (is_head && at < TOKENS) low[at] = high[at] = from_ordered_bits(key).score;
            found += __popc(ballot);
        }
        __syncwarp();
        if (lane == 0) count = found;
        __syncwarp();
        // Tokens whose exact logits are below the head.
        const float others = u32_to_f32(tokens - found) * mass(from_monotone_bits(least));
        return found <= tokens && decides(filters.top_p, below + others);
    }

  private:
    // Returns an upper bound of the mass of the tokens with digits up to `last`, as many as top-k keeps, by the upper edges of the
    // digits. One warp calls this.
    template <class Search, class Edge>
    __device__ __forceinline__ float mass_upto(const Search& search, u32 last, const Edge& edge) const {
        constexpr u32 SHARE = (1 << DIGIT_BITS) / 32;
        const u32 lane = threadIdx.x % 32, base = (31 - lane) * SHARE;
        const auto tokens = [&](u32 digit) { return digit <= last ? search.histogram[digit] : 0; };
        u32 sum = 0;
        for (u32 i = 0; i < SHARE; ++i) sum += tokens(base + (i + lane) % SHARE);
        u32 upto = sum;
        for (u32 apart = 1; apart < 32; apart *= 2) {
            const u32 other = __shfl_up_sync(0xffffffffu, upto, apart);
            if (lane >= apart) upto += other;
        }
        const u32 before = upto - sum, top_k = search.filters.top_k;
        u32 left = top_k > before ? top_k - before : 0;
        float mass_of_lane = 0.0f;
        for (u32 digit = base + SHARE; digit-- > base && left > 0;) {
            const u32 taken = min(tokens(digit), left);
            if (taken) mass_of_lane += u32_to_f32(taken) * mass(edge(digit + 1));
            left -= taken;
        }
#pragma unroll
        for (u32 apart = 16; apart > 0; apart /= 2) mass_of_lane += __shfl_xor_sync(0xffffffffu, mass_of_lane, apart);
        return mass_of_lane;
    }

    // Whether top-p surely ends within the head, at a place that does not depend on logits within their bounds. `rest` is the
    // largest mass of other tokens. One warp calls this.
    __device__ __forceinline__ bool decides(float top_p, float rest) const {
        const u32 lane = threadIdx.x % 32;
        if (count == 0 || count > TOKENS) return false;
        const float end = from_monotone_bits(least);
        const bool is_token = lane < count;
        const float lower = is_token ? low[lane] : end, upper = is_token ? high[lane] : end;
        // Masses of the tokens that surely precede this one and of all others, and the same for those that may precede it. Lanes
        // without a token take the place of the tokens below the head.
        float sure = 0.0f, others = rest, possible = 0.0f, least_others = 0.0f;
        for (u32 j = 0; j < count; ++j) {
            const bool is_other = j != lane, is_sure = is_other && low[j] > upper, is_possible = is_other && high[j] >= lower;
            (is_sure ? sure : others) += mass(is_sure ? low[j] : high[j]);
            if (is_possible) possible += mass(high[j]);
            else if (low[j] >= end) least_others += mass(low[j]);
        }
        const bool is_kept = is_token && possible < (1.0f - SLACK) * top_p * (possible + least_others);
        const bool is_dropped = sure > (1.0f + SLACK) * top_p * (sure + others);
        return __ballot_sync(0xffffffffu, !(is_kept || is_dropped)) == 0;
    }
};

}  // namespace flash_sampling

#endif
