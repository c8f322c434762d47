// The candidates of a row with min-p first or a top-k, from the largest logit of each granule (block_maxima.cuh). A pass over
// these logits selects the few granules to read.
#pragma once

#include "filter_row.cuh"

#ifdef __CUDACC__

namespace flash_sampling {

struct GranuleCandidates {
    static constexpr u32 THREADS = FilterRow::THREADS, KEPT = FilterRow::KEPT, CAPACITY = FilterRow::CAPACITY;

    // Gathers the same tokens as FilterRow::gather(), but reads only granules whose largest logit may be a candidate. Every
    // `BlockMaxima::ROWS`-th element of `maxima` is the largest logit of a granule. The row has neither a mask nor biases.
    // Returns false if the row needs FilterRow::gather(): too many granules or candidates, too few granules for top-k, or values
    // out of range. All threads call this.
    static __device__ __noinline__ bool gather(FilterRow& row, const u16* maxima) {
        auto& c = row.shared.candidates;
        const u32 granules = BlockMaxima::granules_of(row.logits.tokens), k = row.filters.top_k;
        // The granules' largest logits, as monotone bits, in the memory of the candidates' keys.
        u16* const tops = reinterpret_cast<u16*>(c.keys);
        if (granules > CAPACITY * (sizeof(u64) / sizeof(u16)) || k > granules) return false;
        c.begin();
        if (threadIdx.x == 0) row.shared.cut = row.shared.end = 0;
        __syncthreads();
        u32 top = 0;
        constexpr u32 LOADS = 8;
#pragma unroll 1
        for (u32 first = threadIdx.x; first < granules; first += LOADS * THREADS) {
            u32 bits[LOADS];
#pragma unroll
            for (u32 i = 0; i < LOADS; ++i)
                bits[i] = maxima[static_cast<u64>(min(first + i * THREADS, granules - 1)) * BlockMaxima::ROWS];
#pragma unroll
            for (u32 i = 0; i < LOADS; ++i) {
                const u32 at = first + i * THREADS, key = bits[i] ^ (bits[i] & 0x8000u ? 0xffffu : 0x8000u);
                if (at < granules) tops[at] = static_cast<u16>(key), top = max(top, key);
            }
        }
        top = __reduce_max_sync(0xffffffffu, top);
        if (threadIdx.x % 32 == 0) atomicMax(&row.shared.cut, top);
        __syncthreads();
        // Lower bounds of the kept tokens' logits: `raw` of raw logits, `least` of transformed logits.
        const float scale = row.shared.row.inv_temperature;
        float raw = -f32_infinity(), least = -f32_infinity();
        if (row.filters.is_min_p_first()) {
            const float largest = largest_of(row.shared.cut);
            least = row.filters.least(mul_rn(BlockMaxima::lower_bound(largest), scale));
            raw = least / scale;
        }
        if (k) {
            // k granules have a token whose raw logit is at least `kth`.
            const float kth = BlockMaxima::lower_bound(largest_of(find_top(row.shared.candidates, tops, granules, k)));
            least = fmaxf(least, mul_rn(kth, scale));
            raw = fmaxf(raw, kth);
        }
        // NOTE: a smaller scale may round different logits to equal ones.
        if (!(scale >= 0x1p-100f && is_finite(least) && fabsf(raw) <= 65000.0f)) return false;
        const float reach = BlockMaxima::least_maximum(raw);
        for (u32 at = threadIdx.x; at < granules; at += THREADS) {
            if (!(largest_of(tops[at]) >= reach)) continue;
            const u32 place = atomicAdd(&row.shared.end, 1u);
            if (place < KEPT) row.shared.units[place] = at;
        }
        __syncthreads();
        const u32 listed = row.shared.end;
        if (listed > KEPT) return false;
        constexpr u32 EACH = 4, LANES = BlockMaxima::TOKENS / EACH;
        const float* const from = static_cast<const float*>(row.logits.logits);
#pragma unroll 1
        for (u32 i = threadIdx.x; i < LANES * listed; i += THREADS) {
            const u32 first = row.shared.units[i / LANES] * BlockMaxima::TOKENS + i % LANES * EACH;
            if (first >= row.logits.tokens) continue;
            // A row has room for a multiple of 16 bytes, so the load stays within the row's memory.
            u32 words[EACH];
            load_16_bytes(from + first, words);
#pragma unroll
            for (u32 e = 0; e < EACH; ++e) {
                const float logit = mul_rn(bits_to_f32(words[e]), scale);
                if (first + e >= row.logits.tokens || !(logit >= least)) continue;
                c.push(to_ordered_bits(Winner::of(logit, row.logits.first_token + first + e)));
                atomicMax(&c.largest, to_monotone_bits(add_rn(logit, 0.0f)));
            }
        }
        __syncthreads();
        const u32 count = c.count;
        // All threads have read the count before FilterRow::gather() clears it.
        __syncthreads();
        if (count > CAPACITY) return false;
        row.drop_others();
        return true;
    }

    // Returns the float16 with these monotone bits, as float32.
    static __device__ __forceinline__ float largest_of(u32 key) {
        return widen_f16(key ^ (key & 0x8000u ? 0x8000u : 0xffffu));
    }

    // Returns the `need`-th largest of `count` keys; `need` is at most `count`. All threads call this.
    template <class Search>
    static __device__ __forceinline__ u32 find_top(Search& c, const u16* keys, u32 count, u32 need) {
        constexpr u32 LOW = 16 - DIGIT_BITS;
        u32 found = 0;
#pragma unroll 1
        for (u32 shift = LOW + DIGIT_BITS; shift > 0;) {
            const u32 known = shift;
            shift = shift > LOW ? LOW : 0;
            for (u32 b = threadIdx.x; b < 1u << DIGIT_BITS; b += THREADS) c.histogram[b] = 0;
            __syncthreads();
            for (u32 i = threadIdx.x; i < count; i += THREADS) {
                const u32 key = keys[i];
                if (key >> known == found >> known) atomicAdd(&c.histogram[(key >> shift) & ((1u << (known - shift)) - 1)], 1u);
            }
            __syncthreads();
            if (threadIdx.x < 32) find_digit(c, need);
            __syncthreads();
            found |= c.digit << shift;
            need -= c.above;
            __syncthreads();
        }
        return found;
    }
};

// Gathers the candidates of the row. `maxima`: for GranuleCandidates, or null. All threads call this.
__device__ __forceinline__ void gather_candidates(FilterRow& row, const u16* maxima) {
    if (!maxima || !GranuleCandidates::gather(row, maxima)) row.gather();
}

}  // namespace flash_sampling

#endif
