// The draw of a row whose filters the other kernels leave undecided: one block sums core's integer masses over all logits. The
// number of kept tokens does not matter.
//
// A token's place is its rank in the order of descending logits as an integer: a larger logit, then a lower token, has a larger
// place. Each filter keeps the tokens from some place up. Top-k and top-p find the place digit by digit, in a pass over the row for
// each digit.
#pragma once

#include "filter_row.cuh"

#ifdef __CUDACC__

namespace flash_sampling {

struct ExactFilters {
    static constexpr u32 THREADS = FilterRow::THREADS;
    static constexpr u32 DIGIT_WIDTH = 3, VALUES = 1 << DIGIT_WIDTH;
    static constexpr u32 ONE = 1073741824u;  // the mass of a logit at the edge of its bin; the mass of any logit is below 2 ONE

    // In the memory of the candidates.
    struct Sums {
        u64 of_threads[VALUES][THREADS];
        u64 of_digits[VALUES];
        u32 low[MASS_BINS], high[MASS_BINS];
        // The bin in which top-p ends: its number, its weight, the mass of the bins before it, and the mass to reach.
        u32 bin;
        double weight, before, limit;
    };
    static_assert(sizeof(Sums) <= sizeof(FilterRow::Shared::candidates.keys), "the sums fit into the candidates' memory");

    FilterRow& row;
    const double* weights;  // [MASS_BINS] e^(-n/8)
    const RowFilters& filters = row.filters;
    Sums& sums = *reinterpret_cast<Sums*>(row.shared.candidates.keys);
    const u32 last = row.logits.first_token + row.logits.tokens - 1;
    const u32 token_width = width(row.logits.tokens - 1);

    static __device__ __forceinline__ u32 width(u64 x) { return x ? 64 - static_cast<u32>(__clzll(static_cast<long long>(x))) : 0; }

    __device__ __forceinline__ u64 place(float logit, u32 token) const {
        return static_cast<u64>(to_monotone_bits(add_rn(logit, 0.0f))) << token_width | (last - token);
    }
    // The lowest place of a logit.
    __device__ __forceinline__ u64 place_of(float logit) const { return place(logit, last); }

    // Calls visit(place, logit) for each token from a place up.
    template <class Visit>
    __device__ __forceinline__ void each(u64 least, Visit visit) {
        row.stream(
            [&](u32 first, const float (&l)[8]) {
#pragma unroll
                for (u32 i = 0; i < 8; ++i) {
                    if (l[i] == -f32_infinity()) continue;
                    const u64 at = place(l[i], row.token_of(first, i));
                    if (at >= least) visit(at, l[i]);
                }
            },
            [] {});
    }

    __device__ __forceinline__ float find_largest() {
        auto& c = row.shared.candidates;
        c.begin();
        __syncthreads();
        float largest = -f32_infinity();
        each(0, [&](u64, float logit) { largest = fmaxf(largest, add_rn(logit, 0.0f)); });
        atomicMax(&c.largest, to_monotone_bits(largest));
        __syncthreads();
        return from_monotone_bits(c.largest);
    }

    // Returns a place from which up the amounts of the tokens first reach a sum: reached(sum) holds, and without the lowest of these
    // tokens it does not. The place is one of the 2^bits places from `least` up, and all tokens with amounts are among them.
    // `one` is the smallest amount except 0, and all amounts are below 2 one. All threads call this.
    template <class Amount, class Reached>
    __device__ __forceinline__ u64 find(u64 least, u32 bits, u64 one, Amount amount, Reached reached) {
        const u32 warp = threadIdx.x / 32, lane = threadIdx.x % 32;
        u64 above = 0;
        while (bits > 0) {
            const u32 shift = bits > DIGIT_WIDTH ? bits - DIGIT_WIDTH : 0;
#pragma unroll
            for (u32 v = 0; v < VALUES; ++v) sums.of_threads[v][threadIdx.x] = 0;
            each(least, [&](u64 at, float logit) {
                const u64 from = at - least;
                if (from >> bits == 0) sums.of_threads[from >> shift][threadIdx.x] += amount(logit);
            });
            __syncthreads();
            if (warp < VALUES) {
                u64 sum = 0;
                for (u32 i = lane; i < THREADS; i += 32) sum += sums.of_threads[warp][i];
                for (u32 distance = 16; distance > 0; distance /= 2) sum += __shfl_xor_sync(0xffffffffu, sum, distance);
                if (lane == 0) sums.of_digits[warp] = sum;
            }
            __syncthreads();
            u32 digit = VALUES - 1;
            while (digit > 0 && !reached(above + sums.of_digits[digit])) above += sums.of_digits[digit--];
            least += static_cast<u64>(digit) << shift;
            bits = shift;
            const bool is_one_token = sums.of_digits[digit] < 2 * one;
            // All threads have read the sums.
            __syncthreads();
            if (is_one_token) break;
        }
        return least;
    }

    // Returns the place of the `count`-th token, in descending order; `least` if fewer tokens are from `least` up.
    __device__ __forceinline__ u64 find_nth(u32 count, u64 least, float largest) {
        const u32 bits = width(place(largest, row.logits.first_token) - least);
        return find(least, bits, 1, [](float) { return 1; }, [&](u64 tokens) { return tokens >= count; });
    }

    // Returns the weight of one unit of mass in a bin.
    __device__ __forceinline__ double weight(float top, u32 bin) const {
        const double of_one = fabsf(top) < 131072.0f ? weights[bin] : ::exp(static_cast<double>(bin) * -0.125);
        return mul_rn(of_one, 1.0 / ONE);
    }

    // Finds the bin in which top-p ends. The order and the rounding are those of core's CumulativeMass.
    __device__ __forceinline__ void find_bin(float top) {
        double total = 0.0;
        for (u32 pass = 0; pass < 2; ++pass) {
            double through = 0.0;
            for (u32 bin = 0; bin < MASS_BINS; ++bin) {
                const u64 sum = (static_cast<u64>(sums.high[bin]) << 32) + sums.low[bin];
                if (sum == 0) continue;
                const double of_unit = weight(top, bin), before = through;
                through = add_rn(before, mul_rn(of_unit, static_cast<double>(sum)));
                if (pass == 0 || through < mul_rn(static_cast<double>(filters.top_p), total)) continue;
                sums.bin = bin;
                sums.weight = of_unit;
                sums.before = before;
                sums.limit = mul_rn(static_cast<double>(filters.top_p), total);
                return;
            }
            total = through;
        }
    }

    // Sums the masses of the tokens from `least` up, in bins from the edge `top` down. All threads call this.
    __device__ __forceinline__ void add_masses(u64 least, float top) {
        for (u32 bin = threadIdx.x; bin < MASS_BINS; bin += THREADS) sums.low[bin] = sums.high[bin] = 0;
        __syncthreads();
        each(least, [&](u64, float logit) {
            const float edge = mass_edge(logit), below = sub_rn(top, edge);
            if (!(below < MASS_WINDOW)) return;
            const u32 bin = static_cast<u32>(mul_rn(below, 8.0f)), units = static_cast<u32>(mass_units(logit, edge));
            if (atomicAdd(&sums.low[bin], units) > ~units) atomicAdd(&sums.high[bin], 1u);
        });
        __syncthreads();
    }

    // Returns the place from which up top-p keeps the tokens from `least` up.
    __device__ __forceinline__ u64 by_top_p(u64 least, float largest) {
        const float top = mass_edge(largest);
        add_masses(least, top);
        if (threadIdx.x == 0) find_bin(top);
        __syncthreads();
        const float edge = sub_rn(top, mul_rn(static_cast<float>(sums.bin), 0.125f));
        const u64 lowest = place_of(edge), begin = lowest > least ? lowest : least;
        const u64 end = place(fminf(largest, add_rn(edge, 0.125f)), row.logits.first_token);
        const double of_unit = sums.weight, before = sums.before, limit = sums.limit;
        return find(
            begin, width(end - begin), ONE,
            [&](float logit) { return mass_edge(logit) == edge ? mass_units(logit, edge) : 0; },
            [&](u64 mass) { return add_rn(before, mul_rn(of_unit, static_cast<double>(mass))) >= limit; });
    }

    // The lowest place of all finite logits.
    __device__ __forceinline__ u64 lowest() const { return place_of(-bits_to_f32(0x7f7fffffu)); }

    // Returns the place from which up the filters keep the tokens. All threads call this.
    __device__ __forceinline__ u64 find_least() {
        const float largest = find_largest();
        const float smallest = filters.has_min_p() ? filters.least(largest) : 0.0f;
        u64 least = filters.is_min_p_first() ? place_of(smallest) : lowest();
        if (filters.top_k) least = find_nth(filters.top_k, least, largest);
        if (filters.has_top_p()) least = by_top_p(least, largest);
        if (filters.has_min_p() && filters.min_p_last) {
            const u64 by_min_p = place_of(smallest);
            least = by_min_p > least ? by_min_p : least;
        }
        return least;
    }

    // Returns the draw of the row, which is in shared memory. All threads call this.
    __device__ __forceinline__ Draw draw() {
        const Draw undecided{0, 0.0f, 0.0f, Status::Undecided};
        const u64 least = find_least();
        const u64 bits = least >> token_width;
        const u32 token = last - static_cast<u32>(least - (bits << token_width));
        // No token has the place of -0, which the comparison of floats takes for +0: all tokens of +0 are above it.
        const bool is_below_zero = bits == to_monotone_bits(-0.0f);
        const u64 best = row.best_before(from_monotone_bits(static_cast<u32>(bits)), is_below_zero ? 0xffffffffu : token + 1);
        if (best == 0) return undecided;
        const Winner winner = from_ordered_bits(best);
        const float logit = row.logit_of(winner.token);
        if (!is_finite(logit)) return undecided;
        return {winner.token, winner.score, logit, Status::Drawn};
    }
};

}  // namespace flash_sampling

#endif
