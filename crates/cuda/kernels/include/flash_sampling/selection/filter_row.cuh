// The draw of a row that has a top-k, or whose first filter is min-p. The input is the row's logits in memory, or lists
// of its largest logits. One block per row.
//
// The filters keep few tokens, the first in the order of descending logits. One pass over the row gathers these tokens
// as candidates; granule_candidates.cuh gathers them with fewer reads. The block sorts the candidates, applies the
// filters as core's Selector does, and draws. The host decides rows with too many candidates. top_p.cuh handles rows
// whose first filter is top-p.
#pragma once

#include "candidates.cuh"
#include "../summary/mass_histogram.cuh"
#include "row_lists.cuh"
#include "filter_call.cuh"

#ifdef __CUDACC__

namespace flash_sampling {

struct FilterRow {
    static constexpr u32 THREADS = 512;
    static constexpr u32 WARPS = THREADS / 32;
    // Tokens per step of the block, and the maximum number of candidates for the filters.
    static constexpr u32 STEP = WARPS * SCAN_TOKENS;
    static constexpr u32 KEPT = 2048;
    static constexpr u32 CAPACITY = STEP + KEPT;
    static_assert(RowLists::WHOLE <= CAPACITY, "shorten() takes lists of all tokens");

    struct Shared {
        Candidates<THREADS, CAPACITY> candidates;
        u32 units[KEPT];    // integer masses; in GranuleCandidates, the numbers of granules
        float edges[KEPT];  // the edges of the candidates' mass bins
        Row row;
        WarpScan<32, 4> scans[WARPS];
        u64 best;
        u64 invalid;
        u32 cut;
        u32 end;
    };

    // The sums of `walk` follow the candidates' keys in memory. At that point at most KEPT candidates remain.
    static_assert(CAPACITY >= 3 * KEPT, "two doubles per kept token, behind the keys");
    static_assert(sizeof(Shared) <= 99 * 1024, "the least of compute capability 8.0 and up");
    __device__ __forceinline__ double* cumulative() const { return reinterpret_cast<double*>(shared.candidates.keys + KEPT); }
    __device__ __forceinline__ double* weights() const { return cumulative() + KEPT; }

    const RowFilters& filters;
    const ExistingRow logits;
    Shared& shared;

    // Calls visit(first, l) for each part of 256 tokens from `first` on, with a lane's eight transformed logits. All
    // threads call between() after each step of STEP tokens.
    template <class Visit, class Between>
    __device__ __forceinline__ void stream(Visit visit, Between between) {
        const u32 lane = threadIdx.x % 32, begin = logits.begin_part(), end = logits.end_part();
        const RowParts<Element::F32> parts(logits);
        const Row& row = shared.row;
        const bool transforms = row.mask || row.biases || row.inv_temperature != 1.0f;
        Raw<Element::F32> next{};
        u32 part = begin + threadIdx.x / 32;
        if (part < end) next = parts.load(part);
#pragma unroll 1
        for (u32 step = begin; step < end; step += WARPS, part += WARPS) {
            if (part < end) {
                float l[8];
#pragma unroll
                for (u32 i = 0; i < 8; ++i) l[i] = next.logit(i);
                if (part + WARPS < end) next = parts.load(part + WARPS);
                if (transforms) transform_lane<Element::F32>(row.transform(), part * SCAN_TOKENS, lane, l);
                visit(part * SCAN_TOKENS, l);
            }
            between();
        }
    }

    static __device__ __forceinline__ u32 token_of(u32 first, u32 i) {
        return first + group_offset<Element::F32>(threadIdx.x % 32, i / 4) + i % 4;
    }

    // Gathers the tokens that min-p and top-k may keep.
    __device__ __noinline__ void gather() {
        auto& c = shared.candidates;
        const u32 k = filters.top_k;
        c.begin();
        __syncthreads();
        stream(
            [&](u32 first, const float (&l)[8]) {
                float top = l[0];
#pragma unroll
                for (u32 i = 1; i < 8; ++i) top = fmaxf(top, l[i]);
                const u32 cut = *static_cast<volatile u32*>(&c.cut);
                if (to_monotone_bits(add_rn(top, 0.0f)) < cut) return;
#pragma unroll 1
                for (u32 i = 0; i < 8; ++i) {
                    const u64 key = to_ordered_bits(Winner::of(pick(l, i), token_of(first, i)));
                    if (static_cast<u32>(key >> 32) >= cut) c.push(key);
                }
                atomicMax(&c.largest, to_monotone_bits(add_rn(top, 0.0f)));
            },
            [&] {
                __syncthreads();
                const u32 count = c.count, settled = c.settled;
                // All threads have read both counts before any thread adds candidates.
                __syncthreads();
                const bool is_full = count > KEPT && count > settled;
                if (!is_full && !(settled == 0 && count > 0)) return;
                u64 least = least_by_min_p(from_monotone_bits(c.largest));
                if (k && is_full && count <= CAPACITY) {
                    const u64 kth = c.find(k);
                    least = kth > least ? kth : least;
                }
                if (count <= CAPACITY) c.compact(least);
                // For top-k, a later token loses against an equal logit; min-p keeps equal logits.
                if (threadIdx.x == 0) {
                    const u32 above_kth = k && c.count >= k && static_cast<u32>(least >> 32) > 1 && static_cast<u32>(least);
                    c.cut = max(c.cut, static_cast<u32>(least >> 32) + (above_kth ? 1 : 0));
                }
                __syncthreads();
            });
        __syncthreads();
        drop_others();
    }

    // Drops the candidates that min-p or top-k surely drop, unless there are too many candidates. With few candidates,
    // this function applies only min-p, and walk() applies top-k.
    __device__ __forceinline__ void drop_others() {
        auto& c = shared.candidates;
        if (c.count > CAPACITY) return;
        u64 least = least_by_min_p(from_monotone_bits(c.largest));
        if (filters.top_k && c.count > max(filters.top_k, c.FEW)) {
            const u64 kth = c.find(filters.top_k);
            least = kth > least ? kth : least;
        }
        c.compact(least);
    }

    // Writes the cumulative masses of the first `length` candidates, in the order and with the rounding of core's
    // CumulativeMass: sums the masses of a bin as integers, multiplies the sum by the weight of the bin, and adds the
    // products of earlier bins. One warp calls this.
    __device__ __forceinline__ void add_up(u32 length) {
        const u32 lane = threadIdx.x;
        u64 carried = 0;  // the sum so far in the bin of the last lane
        for (u32 base = 0; base < length; base += 32) {
            const u32 i = base + lane;
            const bool is_inside = i < length;
            const float edge = is_inside ? shared.edges[i] : 0.0f;
            const bool is_first = is_inside && (i == 0 || shared.edges[i - 1] != edge);
            const bool is_last = is_inside && (i + 1 == length || shared.edges[i + 1] != edge);
            const u64 sum = sum_to_lane<u64>(is_inside ? shared.units[i] : 0);
            // `begin` is the first lane of this lane's bin, and `before` is the sum of all earlier lanes.
            const u32 firsts = __ballot_sync(0xffffffffu, is_first) & (0xffffffffu >> (31 - lane));
            const u32 begin = firsts ? 31 - static_cast<u32>(__clz(static_cast<i32>(firsts))) : 0;
            const u64 before = __shfl_sync(0xffffffffu, sum, begin ? begin - 1 : 0);
            const u64 mass = sum - (begin ? before : 0) + (firsts ? 0 : carried);
            carried = __shfl_sync(0xffffffffu, mass, 31);
            if (!is_inside) continue;
            const double product = mul_rn(weights()[i], static_cast<double>(mass));
            cumulative()[i] = product;
            weights()[i] = is_last ? product : 0.0;
        }
        __syncwarp();
        if (lane) return;
        double done = 0.0;
#pragma unroll 8
        for (u32 i = 0; i < length; ++i) {
            const double product = cumulative()[i], of_bin = weights()[i];
            cumulative()[i] = add_rn(done, product);
            done = add_rn(done, of_bin);
        }
        shared.end = length;
    }

    // Sorts the candidates and applies the filters. Returns the number of kept tokens.
    __device__ __noinline__ u32 walk() {
        auto& c = shared.candidates;
        c.sort();
        const float largest = from_ordered_bits(c.keys[0]).score, least = filters.least(largest);
        u32 length = c.count;
        if (filters.top_k && filters.top_k < length) length = filters.top_k;
        if (filters.has_top_p()) {
            const float top = mass_edge(largest);
            for (u32 i = threadIdx.x; i < length; i += THREADS) {
                const float logit = from_ordered_bits(c.keys[i]).score, edge = mass_edge(logit);
                shared.edges[i] = edge;
                shared.units[i] = sub_rn(top, edge) < MASS_WINDOW ? static_cast<u32>(mass_units(logit, edge)) : 0;
                weights()[i] = mul_rn(::exp(static_cast<double>(edge) - static_cast<double>(top)), 1.0 / 1073741824.0);
            }
            __syncthreads();
            if (threadIdx.x < 32) add_up(length);
            __syncthreads();
            const double limit = mul_rn(static_cast<double>(filters.top_p), cumulative()[length - 1]);
            for (u32 i = threadIdx.x; i < length; i += THREADS)
                if (cumulative()[i] >= limit) atomicMin(&shared.end, i + 1);
            __syncthreads();
            length = shared.end;
            // All threads have read `end` before min-p writes it.
            __syncthreads();
        }
        if (filters.has_min_p() && filters.min_p_last) {
            if (threadIdx.x == 0) shared.end = 1;
            __syncthreads();
            for (u32 i = threadIdx.x; i < length; i += THREADS)
                if (from_ordered_bits(c.keys[i]).score >= least) atomicMax(&shared.end, i + 1);
            __syncthreads();
            length = shared.end;
        }
        return length;
    }

    // Returns the best of the first `length` candidates, as ordered bits.
    __device__ __noinline__ u64 best_of(u32 length) {
        auto& c = shared.candidates;
        const Row& row = shared.row;
        const Noise noise{row.seed, row.position};
        if (threadIdx.x == 0) shared.best = 0;
        __syncthreads();
        u64 best = 0;
        for (u32 i = threadIdx.x; i < length; i += THREADS) {
            const u32 token = from_ordered_bits(c.keys[i]).token;
            const float logit = mul_rn(from_ordered_bits(c.keys[i]).score, filters.rescale);
            const float score = add_rn(logit, noise.gumbel(Domain::Token, row.draw, token));
            best = max(best, to_ordered_bits(Winner::of(score, token)));
        }
        best = largest_of_warp(best);
        if (best && threadIdx.x % 32 == 0) atomicMax(&shared.best, best);
        __syncthreads();
        return shared.best;
    }

    // Returns the transformed logit of a token, as in the draw.
    __device__ __forceinline__ float logit_of(u32 token) const {
        const float raw = static_cast<const float*>(logits.logits)[token - logits.first_token];
        const float logit = shared.row.transform().apply(raw, token);
        return filters.rescale != 1.0f ? mul_rn(logit, filters.rescale) : logit;
    }

    // Returns the best token that precedes the logit `limit` and the token `token_limit` in the order, as ordered bits;
    // 0 = none.
    __device__ __noinline__ u64 best_before(float limit, u32 token_limit) {
        if (threadIdx.x == 0) {
            shared.best = 0;
            shared.cut = to_monotone_bits(-bits_to_f32(0x7f7fffffu));
        }
        __syncthreads();
        KeepBefore keep{&shared.cut, limit, token_limit, 0};
        const u32 begin = logits.begin_part() + threadIdx.x / 32, end = logits.end_part();
        const RowParts<Element::F32> parts(logits);
        Raw<Element::F32> start{};
        if (begin < end) start = parts.load(begin);
        scan(parts, shared.row, shared.scans[threadIdx.x / 32], begin, end, WARPS, start, &shared.invalid, keep);
        if (keep.best) atomicMax(&shared.best, keep.best);
        __syncthreads();
        const u64 best = shared.best;
        __syncthreads();
        return best;
    }

    // Copies the keys of a list to the candidates. All threads call this.
    __device__ __forceinline__ void copy_list(const u64* list, u32 count) {
        auto& c = shared.candidates;
        c.begin();
        __syncthreads();
        u32 top = 0;
        for (u32 i = threadIdx.x; i < count; i += THREADS) {
            const u64 key = list[i];
            c.keys[i] = key;
            top = max(top, static_cast<u32>(key >> 32));
        }
        end_copy(top, count);
    }

    // Ends the copy of `count` candidates. `top` is the largest logit of this thread, as monotone bits. All threads
    // call this.
    __device__ __forceinline__ void end_copy(u32 top, u32 count) {
        auto& c = shared.candidates;
        top = __reduce_max_sync(0xffffffffu, top);
        if (threadIdx.x % 32 == 0) atomicMax(&c.largest, top);
        if (threadIdx.x == 0) c.count = count;
        __syncthreads();
    }

    // Returns the smallest key that min-p keeps if it is the first filter; 1 if it is not.
    __device__ __forceinline__ u64 least_by_min_p(float largest) const {
        return filters.is_min_p_first() ? static_cast<u64>(to_monotone_bits(filters.least(largest))) << 32 : 1;
    }

    // Copies a shard's list to the candidates, without the tokens that the row drops for any lists of the other shards.
    // `largest` is the row's largest logit. Returns the counters to send. If there are more than `room` candidates, the
    // counters have no tokens, and their cutoff leaves the row undecided. All threads call this.
    __device__ __forceinline__ ListCounters shorten(const u64* list, const ListCounters& counters, float largest, u32 room) {
        const ListCounters lost{0, 0xffffffffu};
        if (counters.count > CAPACITY) return lost;
        copy_list(list, counters.count);
        auto& c = shared.candidates;
        // A top-k list with fewer than k tokens drops nothing. Then min-p is applied after the merge of all lists.
        u64 least = filters.is_listed_by_min_p() ? least_by_min_p(largest) : 1;
        if (filters.top_k && counters.count > filters.top_k) {
            const u64 kth = c.find(filters.top_k);
            least = kth > least ? kth : least;
        }
        c.compact(least);
        return c.count > room ? lost : ListCounters{c.count, counters.cut};
    }

    // Returns the draw of a row from its list; undecided if the list may lack a kept token. All threads call this;
    // `row` is in shared memory.
    __device__ __forceinline__ Draw draw_listed(const u64* list, const ListCounters& counters) {
        const Draw undecided{0, 0.0f, 0.0f, Status::Undecided};
        const u32 count = counters.count;
        if (count == 0 || count > RowLists::ROOM) return undecided;
        auto& c = shared.candidates;
        c.begin();
        for (u32 digit = threadIdx.x; digit < 1u << DIGIT_BITS; digit += THREADS) c.histogram[digit] = 0;
        constexpr u32 NONE = ~0u;
        if (threadIdx.x == 0) c.digit = NONE;
        __syncthreads();
        u32 top = 0;
        for (u32 i = threadIdx.x; i < count; i += THREADS) top = max(top, static_cast<u32>(list[i] >> 32));
        end_copy(top, 0);
        u64 least = least_by_min_p(from_monotone_bits(c.largest));
        if (filters.top_k) {
            // Finds the interval of the k-th largest logit, of 2^DIGIT_BITS equal intervals between the cutoff and the
            // largest logit.
            const u32 low = max(counters.cut, static_cast<u32>(least >> 32)), range = c.largest > low ? c.largest - low : 0;
            const u32 bits = 32 - static_cast<u32>(__clz(static_cast<i32>(range))), shift = bits > DIGIT_BITS ? bits - DIGIT_BITS : 0;
            for (u32 i = threadIdx.x; i < count; i += THREADS) {
                const u32 logit = static_cast<u32>(list[i] >> 32);
                if (logit >= low) atomicAdd(&c.histogram[(logit - low) >> shift], 1u);
            }
            __syncthreads();
            if (threadIdx.x < 32) find_digit(c, filters.top_k);
            __syncthreads();
            const u32 digit = c.digit;
            // Fewer than k tokens reach both limits, so the row may keep tokens below the cutoff. The list may lack
            // these.
            if (digit == NONE && counters.cut > static_cast<u32>(least >> 32)) return undecided;
            if (digit != NONE) least = max(least, static_cast<u64>(low + (digit << shift)) << 32);
        }
        for (u32 i = threadIdx.x; i < count; i += THREADS)
            if (list[i] >= least) c.push(list[i]);
        __syncthreads();
        if (c.count > CAPACITY) return undecided;
        if (filters.top_k && c.count > max(2 * filters.top_k, c.FEW)) {
            const u64 kth = c.find(filters.top_k);
            c.compact(max(kth, least));
        }
        return draw_kept();
    }

    // Returns the draw from at least one candidate. The candidates contain every token whose monotone bits reach the
    // cutoff.
    __device__ __forceinline__ Draw draw_copied(u32 cut) {
        const Draw undecided{0, 0.0f, 0.0f, Status::Undecided};
        auto& c = shared.candidates;
        const u32 count = c.count;
        u64 least = least_by_min_p(from_monotone_bits(c.largest));
        if (filters.top_k && count >= filters.top_k) {
            // With exactly k candidates, all are kept.
            const u64 kth = count > filters.top_k ? c.find(filters.top_k) : 1;
            const u64 reached = count > filters.top_k ? kth : smallest();
            if (static_cast<u32>(reached >> 32) < cut) return undecided;
            least = kth > least ? kth : least;
        } else if (cut > 0) {
            return undecided;
        }
        c.compact(least);
        return draw_kept();
    }

    // Returns the draw from the candidates that min-p and top-k may keep. All threads call this.
    __device__ __forceinline__ Draw draw_kept() {
        const Draw undecided{0, 0.0f, 0.0f, Status::Undecided};
        const auto& c = shared.candidates;
        if (c.count == 0 || c.count > KEPT) return undecided;
        const u64 best = best_of(walk());
        if (best == 0) return undecided;
        const Winner winner = from_ordered_bits(best);
        for (u32 i = threadIdx.x; i < c.count; i += THREADS)
            if (from_ordered_bits(c.keys[i]).token == winner.token)
                shared.cut = f32_to_bits(from_ordered_bits(c.keys[i]).score);
        __syncthreads();
        const float found = bits_to_f32(shared.cut), logit = filters.rescale != 1.0f ? mul_rn(found, filters.rescale) : found;
        // The host reports logits that a temperature after the filters makes infinite.
        if (!is_finite(logit)) return undecided;
        return {winner.token, winner.score, logit, Status::Drawn};
    }

    // Returns the smallest candidate. All threads call this.
    __device__ __noinline__ u64 smallest() {
        const auto& c = shared.candidates;
        if (threadIdx.x == 0) shared.best = ~0ull;
        __syncthreads();
        for (u32 i = threadIdx.x; i < c.count; i += THREADS) atomicMin(&shared.best, c.keys[i]);
        __syncthreads();
        const u64 found = shared.best;
        __syncthreads();
        return found;
    }

    // Returns the draw of the row, whose candidates are gathered. All threads call this.
    __device__ __forceinline__ Draw draw() {
        const Draw undecided{0, 0.0f, 0.0f, Status::Undecided};
        const auto& c = shared.candidates;
        u64 best = 0;
        if (c.count > CAPACITY || c.count > KEPT) {
            // Too many candidates: with min-p alone, one more pass draws from all tokens above its limit.
            if (filters.top_k || filters.has_top_p() || filters.rescale != 1.0f) return undecided;
            best = best_before(filters.least(from_monotone_bits(c.largest)), 0xffffffffu);
        } else {
            best = best_of(walk());
        }
        if (best == 0) return undecided;
        const Winner winner = from_ordered_bits(best);
        const float logit = logit_of(winner.token);
        // The host reports logits that a temperature after the filters makes infinite.
        if (!is_finite(logit)) return undecided;
        return {winner.token, winner.score, logit, Status::Drawn};
    }
};

}  // namespace flash_sampling

#endif
