// The draw of a row with top-p first, from its logits in memory and the draw without filters, by a team of blocks.
//
// Top-p keeps the first tokens in the order of descending logits, possibly many. But two sums decide whether it keeps one
// token: the mass before the token and the total mass. The search first tries the winner of the draw without filters, which
// top-p keeps with probability p. If top-p drops the winner, it also drops all later tokens. So the search tries the best token
// before it, and so on.
//
//   loop: before, all = mass before `place`, total mass        per block, then over the team
//         if before < p all: the draw is the token at `place`
//         place = the best of the tokens before `place`        per block, then over the team
//
// The sums are in float32, with an error bound. For a decision within the bound, the host sums core's integers. So the draw does
// not depend on the number of blocks.
#pragma once

#include "../scan/row_lines.cuh"
#include "filter_call.cuh"
#include "team.cuh"

#ifdef __CUDACC__

namespace flash_sampling {

// NOTE: the compiler orders functions that are not inlined by their mangled names, and another order changes the machine code. So
// this name sorts before TopPResolve.
struct TopPSearch {
    static constexpr u32 THREADS = 512;
    static constexpr u32 WARPS = THREADS / 32;
    // Tokens per step of a block.
    static constexpr u32 STEP = WARPS * SCAN_TOKENS;
    using Lines = RowLines<4>;
    static constexpr u32 TURNS = 8;
    // The best score of the tokens before a place is less than this far below the logarithm of their mass, except with
    // probability 10^-8 (e^-e^3). In that case the search scores all tokens.
    static constexpr float BELOW_MASS = 3.0f;

    // Returns a bound on the relative error of a sum, including its exponentials, if a thread adds up `tokens` tokens.
    static __device__ __forceinline__ double error_of(u32 tokens) { return 2e-5 + 1.2e-7 * (tokens + 8); }

    // A block's message to its team: sums as bits of doubles, and the largest logit or the best score as ordered bits.
    struct Share {
        u64 before;
        u64 all;
        u64 best;
    };
    struct Masses {
        double before;
        double all;
        float largest;
    };
    struct Shared {
        Share shares[2];  // of this exchange and of the previous one, which other blocks may still read
        double before[WARPS], all[WARPS];
        u64 best;
        u64 invalid;
        Row row;
        WarpScan<32, 4> scans[WARPS];
        u32 cut;
    };

    const RowFilters& filters;
    const ExistingRow logits;
    Shared& shared;
    u32 exchanges = 0;

    // Returns block r's share in lane r, and nothing in other lanes. The first thread of each block has stored the block's share.
    // All threads of the team call this.
    __device__ __forceinline__ Share gather_shares() {
        Team::sync();
        const Share* const own = &shared.shares[exchanges % 2];
        ++exchanges;
        const u32 lane = threadIdx.x % 32;
        if (lane >= Team::size()) return {0, 0, 0};
        return {Team::load(&own->before, lane), Team::load(&own->all, lane), Team::load(&own->best, lane)};
    }

    static __device__ __forceinline__ double sum_of_warp(double x) {
#pragma unroll
        for (u32 distance = 16; distance > 0; distance /= 2) x += __shfl_xor_sync(0xffffffffu, x, distance);
        return x;
    }

    // Return this warp's first part, the end of the parts, and the step to the warp's next part.
    __device__ __forceinline__ u32 first_part() const {
        return logits.first_token / SCAN_TOKENS + Team::rank() * WARPS + threadIdx.x / 32;
    }
    __device__ __forceinline__ u32 end_part() const { return (logits.first_token + logits.tokens - 1) / SCAN_TOKENS + 1; }
    static __device__ __forceinline__ u32 part_step() { return Team::size() * WARPS; }

    // A thread's masses, relative to the logit of a place. The rounded exponent of this logit is a factor of every mass.
    struct Weights {
        static constexpr float LOG2_E = 1.44269504088896340736f;
        float place, shift;
        u32 token;
        float before, all, top;

        __device__ __forceinline__ Weights(float place, u32 token)
            : place(place), shift(-place * LOG2_E), token(token), before(0.0f), all(0.0f), top(-f32_infinity()) {}

        static __device__ __forceinline__ float exp2(float x) {
            float mass;
            asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(mass) : "f"(x));
            return mass;
        }
        __device__ __forceinline__ float mass_of(float l) const { return exp2(fma_rn(l, LOG2_E, shift)); }

        // Adds four tokens, starting at `first`.
        __device__ __forceinline__ void add(const float (&l)[4], u32 first) {
            bool is_equal = false;
#pragma unroll
            for (u32 i = 0; i < 4; ++i) {
                const float mass = mass_of(l[i]);
                all += mass;
                if (l[i] > place) before += mass;
                is_equal |= l[i] == place;
                top = fmaxf(top, l[i]);
            }
            if (!is_equal) return;
#pragma unroll 1
            for (u32 i = 0; i < 4; ++i)
                if (pick_of(l, i) == place && first + i < token) before += mass_of(place);
        }

        static __device__ __forceinline__ float pick_of(const float (&l)[4], u32 i) {
            const float a = i & 1 ? l[1] : l[0], b = i & 1 ? l[3] : l[2];
            return i & 2 ? b : a;
        }
    };

    // Adds this warp's parts of a row with any transform.
    static __device__ __noinline__ void weigh_parts(Weights& weights, const ExistingRow& logits, const Row& row, u32 part, u32 end,
                                                    u32 step) {
        const u32 lane = threadIdx.x % 32;
        const RowParts<Element::F32> parts(logits);
#pragma unroll 1
        for (; part < end; part += step) {
            const u32 first = part * SCAN_TOKENS;
            const Raw<Element::F32> raw = parts.load(part);
            float l[8];
#pragma unroll
            for (u32 i = 0; i < 8; ++i) l[i] = raw.logit(i);
            transform_lane<Element::F32>(row.transform(), first, lane, l);
            const float low[4] = {l[0], l[1], l[2], l[3]}, high[4] = {l[4], l[5], l[6], l[7]};
            weights.add(low, first + group_offset<Element::F32>(lane, 0));
            weights.add(high, first + group_offset<Element::F32>(lane, 1));
        }
    }

    // Returns the mass before a place and the total mass, relative to the place's logit, and the largest logit.
    __device__ __noinline__ Masses masses(float place, u32 token) {
        const ExistingRow row = logits;
        Weights weights(place, token);
        if (Lines::takes(row) && !shared.row.mask && !shared.row.biases) {
            // A short loop, which fits the instruction cache.
            Lines lines(row, Team::rank() * WARPS + threadIdx.x / 32, part_step());
            lines.each(shared.row.inv_temperature, [&](const float(&l)[4], u32 first) { weights.add(l, first); });
        } else {
            Weights slow = weights;
            weigh_parts(slow, row, shared.row, first_part(), end_part(), part_step());
            weights.before = slow.before, weights.all = slow.all, weights.top = slow.top;
        }
        if (threadIdx.x == 0) shared.best = 0;
        __syncthreads();
        const double warps[2] = {sum_of_warp(weights.before), sum_of_warp(weights.all)};
        const u32 highest = __reduce_max_sync(0xffffffffu, to_monotone_bits(add_rn(weights.top, 0.0f)));
        if (threadIdx.x % 32 == 0) {
            shared.before[threadIdx.x / 32] = warps[0];
            shared.all[threadIdx.x / 32] = warps[1];
            atomicMax(&shared.best, static_cast<u64>(highest));
        }
        __syncthreads();
        if (threadIdx.x < 32) {
            const bool is_one = threadIdx.x < WARPS;
            const double before = sum_of_warp(is_one ? shared.before[threadIdx.x] : 0.0);
            const double all = sum_of_warp(is_one ? shared.all[threadIdx.x] : 0.0);
            if (threadIdx.x == 0) shared.shares[exchanges % 2] = {bits_of(before), bits_of(all), shared.best};
        }
        const Share share = gather_shares();
        return {sum_of_warp(of_bits(share.before)), sum_of_warp(of_bits(share.all)),
                from_monotone_bits(static_cast<u32>(largest_of_warp(share.best)))};
    }

    static __device__ __forceinline__ u64 bits_of(double x) { return static_cast<u64>(__double_as_longlong(x)); }
    static __device__ __forceinline__ double of_bits(u64 x) { return __longlong_as_double(static_cast<long long>(x)); }

    // Returns the best token before a place whose score reaches the cutoff, as ordered bits; 0 = none.
    __device__ __noinline__ u64 best_before(float limit, u32 token_limit, float cut) {
        if (threadIdx.x == 0) {
            shared.best = 0;
            shared.cut = to_monotone_bits(cut);
        }
        __syncthreads();
        const ExistingRow row = logits;
        KeepBefore keep{&shared.cut, limit, token_limit, 0};
        const u32 begin = first_part(), end = end_part();
        const RowParts<Element::F32> parts(row);
        Raw<Element::F32> start{};
        if (begin < end) start = parts.load(begin);
        scan(parts, shared.row, shared.scans[threadIdx.x / 32], begin, end, part_step(), start, &shared.invalid, keep);
        if (keep.best) atomicMax(&shared.best, keep.best);
        __syncthreads();
        if (threadIdx.x == 0) shared.shares[exchanges % 2] = {0, 0, shared.best};
        return largest_of_warp(gather_shares().best);
    }

    // Returns the transformed logit of a token.
    __device__ __forceinline__ float logit_of(u32 token) const {
        const float raw = static_cast<const float*>(logits.logits)[token - logits.first_token];
        return shared.row.transform().apply(raw, token);
    }

    // Returns the draw of the row, which is in shared memory. `plain` is the draw without filters, or a token that no kept token
    // beats. All threads of the team call this.
    __device__ __forceinline__ Draw draw(const Draw& plain) {
        const Draw undecided{0, 0.0f, 0.0f, Status::Undecided};
        if (filters.rescale != 1.0f) return undecided;
        float place = plain.logit;
        u32 token = plain.token;
        u64 best = to_ordered_bits(Winner{plain.score, plain.token});
        const double p = filters.top_p;
        const double error = error_of(8 * ((end_part() - logits.first_token / SCAN_TOKENS) / part_step() + 2));
        for (u32 turn = 0; turn < TURNS; ++turn) {
            const Masses sums = masses(place, token);
            const float least = filters.has_min_p() ? filters.least(sums.largest) : -f32_infinity();
            const bool is_within = sums.before * (1.0 + error) < p * sums.all * (1.0 - error);
            const bool is_beyond = sums.before * (1.0 - error) > p * sums.all * (1.0 + error);
            if (is_within && place >= least) {
                const Winner winner = from_ordered_bits(best);
                const float logit = logit_of(winner.token);
                // The host reports logits that a temperature after the filters makes infinite.
                return is_finite(logit) ? Draw{winner.token, winner.score, logit, Status::Drawn} : undecided;
            }
            const bool is_below = place < least;
            if (!is_below && !is_beyond) return undecided;
            const float lowest = -bits_to_f32(0x7f7fffffu), limit = is_below ? least : place;
            const u32 token_limit = is_below ? 0xffffffffu : token;
            float cut = is_below ? lowest : place + logf(static_cast<float>(sums.before)) - BELOW_MASS;
            if (!is_finite(cut)) cut = lowest;
            best = best_before(limit, token_limit, cut);
            if (cut > lowest && (best == 0 || from_ordered_bits(best).score < cut))
                best = best_before(limit, token_limit, lowest);
            if (best == 0) return undecided;
            token = from_ordered_bits(best).token;
            place = logit_of(token);
        }
        return undecided;
    }
};

}  // namespace flash_sampling

#endif
