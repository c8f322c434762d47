// The winner among the listed candidates of each row. Several blocks share a row's candidates, and the last block to finish writes
// the draw.
//
// With LISTS, a row with filters has a list of upper bounds and estimates of logits instead. Its blocks select a cutoff, and
// compute the logits of the tokens whose upper bounds reach the cutoff. They list the logits that reach the cutoff. So the list has
// every token at or above the cutoff. filter_list.cu decides whether the list has all tokens that the filters keep. The winner of
// such a row is the token with the largest logit.
#pragma once

#include "../perturb.cuh"
#include "../ptx/early.cuh"
#include "../ptx/ordered.cuh"
#include "../selection/digit.cuh"
#include "../selection/row_lists.cuh"
#include "exact_dots.cuh"

#ifdef __CUDACC__

namespace flash_sampling {

template <bool LISTS, bool BULK = HAS_BULK_COPIES>
struct ExactWinners {
    using Dots = ExactDots<BULK>;
    static constexpr u32 THREADS = Dots::THREADS, WARPS = Dots::WARPS;
    static constexpr u32 MAX_PARTS = 32;
    static constexpr u32 TOKENS = 4096;     // the maximum in a part
    static constexpr u64 TOO_MANY = ~0ull;  // the key of a part with more tokens
    // Without a cutoff from min-p or the Hopper kernel, a cutoff is at most this distance below the largest estimate.
    static constexpr float WIDEST = 32.0f;

    struct Shared {
        union {
            u32 tokens[TOKENS];
            u32 histogram[1 << DIGIT_BITS];
        };
        u64 full[WARPS][Dots::STAGES];
        PartWinner best[WARPS];
        Row row;
        RowFilters filters;
        u32 count;
        u32 digit, above, within;  // see find_digit
    };

    const Call& call;
    const ShadowCall& shadow;
    const FilterListCall& filtered;  // with LISTS
    Shared& shared;
    u32 row, part, parts;

    // Returns the better of a warp's winners, in every lane.
    static __device__ __forceinline__ PartWinner best_of_warp(const PartWinner& mine) {
        const u64 key = largest_of_warp(mine.key);
        const u32 owner = __ffs(__ballot_sync(0xffffffffu, mine.key == key)) - 1;
        return {key, __shfl_sync(0xffffffffu, mine.logit, owner), 0};
    }

    // Calls use(values[i]) for i = first, first + step, ... below `end`. Keeps several loads in flight to hide their latency.
    template <class X, class Use>
    static __device__ __forceinline__ void for_each(const X* values, u32 first, u32 step, u32 end, const Use& use) {
        constexpr u32 AT_ONCE = 8;
        for (u32 i = first; i < end; i += AT_ONCE * step) {
            X some[AT_ONCE];
#pragma unroll
            for (u32 j = 0; j < AT_ONCE; ++j) some[j] = i + j * step < end ? values[i + j * step] : X{};
#pragma unroll
            for (u32 j = 0; j < AT_ONCE; ++j)
                if (i + j * step < end) use(some[j]);
        }
    }

    // Leaves the row undecided: requests the full kernel, or with LISTS the pass over all logits.
    __device__ __forceinline__ void leave_open() const {
        shadow.words->open = 1;
        atomicAdd(shadow.undecided, 1u);
        if constexpr (LISTS) {
            call.draws[row] = Draw{0, 0.0f, 0.0f, Status::Undecided};
            if (filtered.passes) *filtered.passes = FilterPasses::Both;
        }
    }

    // Returns a cutoff for the logits of a listed row, as monotone bits. It is the largest of three values: the Hopper kernel's
    // cutoff `cut`, min-p's limit below the largest estimate `largest`, and an estimate of the k-th largest logit, rounded down.
    // All threads call this.
    __device__ __forceinline__ u32 find_cut(u32 listed, u32 largest, u32 cut) const {
        const RowFilters& filters = shared.filters;
        if (filters.is_listed_by_min_p()) cut = max(cut, to_monotone_bits(filters.least(from_monotone_bits(largest))));
        if (filters.top_k == 0 || listed <= filters.top_k) return cut;
        // Counts the estimates in intervals of equal width between the cutoff and the largest estimate.
        const float top = from_monotone_bits(largest), low = cut ? from_monotone_bits(cut) : top - WIDEST;
        const float scale = ((1 << DIGIT_BITS) - 1) / (top - low);
        if (!(scale > 0.0f && is_finite(scale))) return cut;
        for (u32 digit = threadIdx.x; digit < 1u << DIGIT_BITS; digit += THREADS) shared.histogram[digit] = 0;
        constexpr u32 NONE = ~0u;
        if (threadIdx.x == 0) shared.digit = NONE;
        __syncthreads();
        const u32* const estimates = shadow.candidates.estimates + static_cast<u64>(row) * Candidates::ROOM;
        for_each(estimates, threadIdx.x, THREADS, listed, [&](u32 bits) {
            const float estimate = from_monotone_bits(min(bits, largest));
            if (estimate >= low) atomicAdd(&shared.histogram[static_cast<u32>((estimate - low) * scale)], 1u);
        });
        __syncthreads();
        if (threadIdx.x < 32) find_digit(shared, filters.top_k);
        __syncthreads();
        if (shared.digit == NONE) return cut;
        return max(cut, to_monotone_bits(lowered(low + u32_to_f32(shared.digit) / scale, fabsf(low) + fabsf(top))));
    }

    // Gathers the tokens whose upper bounds reach `least`, from this block's part of the candidates.
    __device__ __forceinline__ void gather(u32 listed, u32 least) const {
        const u64* const keys = shadow.candidates.keys + static_cast<u64>(row) * Candidates::ROOM;
        for_each(keys, part + threadIdx.x * parts, THREADS * parts, listed, [&](u64 key) {
            if (static_cast<u32>(key >> 32) < least) return;
            const u32 at = atomicAdd(&shared.count, 1u);
            if (at < TOKENS) shared.tokens[at] = ~static_cast<u32>(key);
        });
        __syncthreads();
    }

    // Adds the tokens of a warp whose exact logits reach the cutoff to the list of the row.
    __device__ __forceinline__ void list(const PartWinner& candidate, u32 cut) const {
        const bool is_kept = candidate.key && static_cast<u32>(candidate.key >> 32) >= cut;
        const u32 ballot = __ballot_sync(0xffffffffu, is_kept), lane = threadIdx.x % 32;
        if (ballot == 0) return;
        u32 first = 0;
        if (lane == 0) first = atomicAdd(&filtered.lists.counters[row].count, static_cast<u32>(__popc(ballot)));
        first = __shfl_sync(0xffffffffu, first, 0);
        u64* const keys = filtered.lists.keys + static_cast<u64>(row) * RowLists::ROOM;
        const u32 at = first + __popc(ballot & ((1u << lane) - 1));
        if (is_kept && at < RowLists::ROOM) keys[at] = candidate.key;
    }

    // Returns the noise of a token; 0 for a row that is greedy or listed.
    __device__ __forceinline__ float noise_of(u32 token) const {
        const Noise noise{shared.row.seed, shared.row.position};
        return shared.row.greedy ? 0.0f : noise.gumbel(Domain::Token, shared.row.draw, token);
    }

    // Returns a token with its exact score and logit. The key is 0 if the token is forbidden.
    __device__ __forceinline__ PartWinner score(u32 token, float dot, float noise) const {
        if (call.bias) dot = add_rn(dot, call.bias[token - call.first_token]);
        const Row& of_row = shared.row;
        // The logit needs no check, because its upper bound is valid.
        const float logit = of_row.apply(call.head.apply(dot, 0.0f, false), token);
        if (!(logit > -f32_infinity())) return {0, 0.0f, 0};
        const float score = of_row.greedy ? logit : add_rn(logit, noise);
        return {to_ordered_bits(Winner::of(score, token)), logit, 0};
    }

    // Runs one block. `memory` has Dots::SHARED_BYTES bytes.
    template <ptx::Operand OPERAND>
    __device__ __forceinline__ void block(u8* memory) const {
        ptx::start_next_launch();
        ptx::await_earlier_launches();
        // All loads are before the first branch, so that their latencies overlap.
        const u32 listed = shadow.candidates.counts[row], largest = static_cast<u32>(shadow.best[row] >> 32);
        u32 least = 0;
        bool is_skipped = false;
        if constexpr (LISTS) {
            is_skipped = filtered.passes && *filtered.passes == FilterPasses::Logits;
            least = filtered.lists.counters[row].cut;
            if (threadIdx.x == 0) shared.filters = filtered.lists.filters[row];
        }
        copy_row(&shared.row, &call.rows[row]);
        if (threadIdx.x == 0) shared.count = 0;
        __syncthreads();
        if (is_skipped) return;
        if (listed > Candidates::ROOM) {
            if (part == 0 && threadIdx.x == 0) leave_open();
            return;
        }
        bool is_listed = false;
        if constexpr (LISTS) is_listed = !shared.row.greedy && shared.filters.is_listed();
        const u32 cut = is_listed ? find_cut(listed, largest, least) : largest;
        if (LISTS) __syncthreads();
        if (is_listed && threadIdx.x == 0) shared.row.greedy = 1;
        gather(listed, cut);
        const u32 count = shared.count > TOKENS ? 0 : shared.count;
        PartWinner best{shared.count > TOKENS ? TOO_MANY : 0, 0.0f, 0};
        const u32 lane = threadIdx.x % 32, warp = threadIdx.x / 32;
        Dots dots(shadow.candidates, memory, shared.full);
        const u32 each = min((count + WARPS - 1) / WARPS, Dots::TOKENS);  // tokens of a warp at a time
        for (u32 first = warp * each; first < count; first += WARPS * each) {
            const u32 some = min(count - first, each);
            const bool has_token = lane < some;
            const u32 token = shared.tokens[first + (has_token ? lane : 0)];
            float noise = 0.0f;
            const auto meanwhile = [&] { noise = has_token ? noise_of(token) : 0.0f; };
            const float dot = dots.template compute<OPERAND>(row, token - call.first_token, some, meanwhile);
            const PartWinner next = has_token ? score(token, dot, noise) : PartWinner{0, 0.0f, 0};
            if (next.key > best.key) best = next;
            if (is_listed) list(next, cut);
        }
        best = best_of_warp(best);
        if (lane == 0) shared.best[warp] = best;
        __syncthreads();
        if (warp > 0) return;
        best = best_of_warp(lane < WARPS ? shared.best[lane] : PartWinner{0, 0.0f, 0});
        PartWinner* const winners = shadow.winners + row * MAX_PARTS;
        u32 before = 0;
        if (lane == 0) {
            winners[part] = best;
            before = ptx::add_ordered(&shadow.arrived[row], 1);
        }
        if (__shfl_sync(0xffffffffu, before, 0) != parts - 1) return;
        best = best_of_warp(lane < parts ? load(winners + lane) : PartWinner{0, 0.0f, 0});
        if (lane > 0) return;
        if (best.key == 0 || best.key == TOO_MANY) return leave_open();
        if (is_listed) {
            // The thresholds of min-p follow from the largest estimate, so the largest logit must reach this estimate.
            const bool is_valid = best.key >> 32 >= largest;
            if (shared.filters.is_listed_by_min_p() && !is_valid) return leave_open();
            filtered.lists.counters[row].cut = cut;
        }
        call.draws[row] = conclude(best.key, ~0ull, best.logit);
    }

  private:
    // Loads another block's winner.
    static __device__ __forceinline__ PartWinner load(const PartWinner* from) {
        return {__ldcg(&from->key), __ldcg(&from->logit), 0};
    }
};

}  // namespace flash_sampling

#endif
