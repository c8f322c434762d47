// Log-probabilities of a draw, and the tokens that its filters keep, from the row's logits in memory. One block per row.
//
// A token's place is an integer, as in exact_filters.cuh: a larger logit, then a lower token, has a larger place. Filters keep the
// tokens at and above some place. So filters change neither the rank of the drawn token nor the order of the most probable tokens.
// Only log Z, the list of kept tokens and the end of the most probable tokens depend on this place.
#pragma once

#include "../scan/stored.cuh"
#include "exact_filters.cuh"
#include "granule_candidates.cuh"
#include "logprob_columns.cuh"

namespace flash_sampling {

struct LogprobCall {
    // Null filters: no row has filters. For the raw law, `is_transformed` is 1, so that no transform changes the raw logits.
    FilterCall filtered;
    const u32* invalid;              // [draws] 0 = the row's parameters are valid
    const double* weights;           // [MASS_BINS] core's weights of the bins below the highest
    const SummaryResult* summaries;  // [draws] of all tokens before filters
    const KeptToken* top;            // [draws, top_n] the largest logits of the summaries
    const u32* before;               // [draws] tokens before the drawn one; written if ranks are needed
    u64* least;                      // [draws] the lowest place of a kept token
    u32* kept;                       // [draws] the number of tokens that filters keep, 0 without filters; null = not needed
    LogprobColumns columns;
    u32 first_row;
    u32 is_complete;                 // `top_tokens` has other tokens instead of -1
};
FS_LAYOUT(LogprobCall, 216,
          FS_AT(filtered, 0) && FS_AT(invalid, 88) && FS_AT(weights, 96) && FS_AT(summaries, 104) && FS_AT(top, 112) &&
          FS_AT(before, 120) && FS_AT(least, 128) && FS_AT(kept, 136) && FS_AT(columns, 144) && FS_AT(first_row, 208) &&
          FS_AT(is_complete, 212));

struct KeptCall {
    FilterCall filtered;
    const u64* least;  // [draws] as in LogprobCall
    const u32* kept;   // [draws] as in LogprobCall
    KeptColumns columns;
    u32 first_row;
    u32 padding;
};
FS_LAYOUT(KeptCall, 136,
          FS_AT(filtered, 0) && FS_AT(least, 88) && FS_AT(kept, 96) && FS_AT(columns, 104) && FS_AT(first_row, 128) &&
          FS_AT(padding, 132));

#ifdef __CUDACC__

// Writes the log-probabilities of a row, and counts its kept tokens.
struct RowLogprobs {
    static constexpr u32 THREADS = FilterRow::THREADS, WARPS = FilterRow::WARPS;

    struct Shared {
        FilterRow::Shared row;
        u64 top[LogprobColumns::TOP_N_MAX];  // ordered bits of the largest logits
        u32 counts[WARPS];
        u32 listed;                          // number of elements of `top`
        double log_z;
    };
    static_assert(sizeof(Shared) <= 99 * 1024, "the least of compute capability 8.0 and up");
    static_assert(THREADS == MASS_BINS, "each thread has one bin");

    const LogprobCall& call;
    ExactFilters& exact;
    Shared& shared;

    static __device__ __forceinline__ RowFilters no_filters() {
        return {-static_cast<double>(f32_infinity()), 1.0f, 0, 1.0f, 0};
    }

    static __device__ __forceinline__ float log_prob(float logit, double log_z) {
        const double nats = static_cast<double>(logit) - log_z;
        // Log Z of a single token can round below its logit.
        return nats > 0.0 ? 0.0f : static_cast<float>(nats);
    }

    // Returns the sum of `own` over all threads of the block. All threads call this.
    static __device__ __forceinline__ u32 sum_of_block(u32 own, u32 (&of_warps)[WARPS]) {
        own = __reduce_add_sync(0xffffffffu, own);
        if (threadIdx.x % 32 == 0) of_warps[threadIdx.x / 32] = own;
        __syncthreads();
        u32 sum = 0;
#pragma unroll
        for (u32 warp = 0; warp < WARPS; ++warp) sum += of_warps[warp];
        __syncthreads();
        return sum;
    }

    // Returns the number of tokens at and above the place `least`. All threads call this.
    __device__ __noinline__ u32 count_from(u64 least) {
        u32 own = 0;
        exact.each(least, [&](u64, float) { ++own; });
        return sum_of_block(own, shared.counts);
    }

    // Returns the lowest place of a kept token. All threads call this.
    __device__ __noinline__ u64 find_least() {
        FilterRow& row = exact.row;
        if (!exact.filters.is_by_mass()) {
            gather_candidates(row, call.filtered.maxima(blockIdx.x));
            const u32 count = shared.row.candidates.count;
            if (count <= FilterRow::KEPT) {
                const u32 length = row.walk();
                const Winner end = from_ordered_bits(shared.row.candidates.keys[length - 1]);
                // All threads have read the key before sums overwrite it.
                __syncthreads();
                return exact.place(end.score, end.token);
            }
            __syncthreads();
        }
        return exact.find_least();
    }

    // Returns log Z over the tokens at and above the place `least`, summed in the order of core's sum. `top` is the edge of the bin
    // of the largest logit. Only the first thread's result is complete. All threads call this.
    __device__ __noinline__ double log_z_from(u64 least, float top) {
        auto& sums = exact.sums;
        exact.add_masses(least, top);
        const u32 bin = threadIdx.x;
        const u64 mass = (static_cast<u64>(sums.high[bin]) << 32) + sums.low[bin];
        double* const terms = reinterpret_cast<double*>(sums.of_threads[0]);
        terms[bin] = mul_rn(mul_rn(static_cast<double>(mass), 1.0 / ExactFilters::ONE), exact.weights[bin]);
        __syncthreads();
        if (bin) return 0.0;
        double sum = 0.0;
        for (u32 i = 0; i < MASS_BINS; ++i) sum = add_rn(sum, terms[i]);
        return add_rn(static_cast<double>(top), ::log(sum));
    }

    // Writes the largest logits of the row, at most `limit`, to shared memory in descending order, and returns their number. Rows
    // whose summary lost its list of largest logits need this. All threads call this.
    __device__ __noinline__ u32 list_largest(u32 limit, float top) {
        const u64 nth = exact.find_nth(limit, exact.lowest(), add_rn(top, 0.125f));
        if (threadIdx.x == 0) shared.listed = 0;
        __syncthreads();
        exact.each(nth, [&](u64 at, float logit) {
            const u32 token = exact.last - static_cast<u32>(at & ((u64{1} << exact.token_width) - 1));
            // No two tokens have the same place, so at most `limit` tokens come here.
            shared.top[atomicAdd(&shared.listed, 1u)] = to_ordered_bits(Winner::of(logit, token));
        });
        __syncthreads();
        const u32 listed = shared.listed;
        const u64 key = threadIdx.x < listed ? shared.top[threadIdx.x] : 0;
        u32 rank = 0;
        for (u32 i = 0; i < listed; ++i) rank += shared.top[i] > key;
        __syncthreads();
        if (key) shared.top[rank] = key;
        __syncthreads();
        return listed;
    }

    // Replaces each -1 by the lowest tokens that the list does not have. All threads call this.
    static __device__ __noinline__ void complete(i32* tokens, u32 count) {
        static_assert(LogprobColumns::TOP_N_MAX <= THREADS, "each thread has one token");
        __syncthreads();
        const u32 t = threadIdx.x;
        const bool is_missing = t < count && tokens[t] < 0;
        i32 token = 0;
        if (is_missing) {
            u32 listed = 0;
            while (tokens[listed] >= 0) ++listed;
            // The smallest token with t - listed other tokens below it.
            const i32 rank = static_cast<i32>(t - listed);
            for (i32 next = rank, last = -1; next != last;) {
                token = last = next, next = rank;
                for (u32 i = 0; i < listed; ++i) next += tokens[i] <= last;
            }
        }
        __syncthreads();
        if (is_missing) tokens[t] = token;
    }

    // Writes the most probable tokens at and above the place `least`. All threads call this.
    __device__ __forceinline__ void write_top(u64 row, u64 least, const SummaryResult& summary) {
        const LogprobColumns& to = call.columns;
        const KeptToken* const top = call.top + static_cast<u64>(blockIdx.x) * to.top_n;
        const bool is_lost = summary.listed == SummaryResult::LOST;
        const u32 listed = is_lost ? list_largest(to.top_n, summary.max) : summary.listed;
        for (u32 t = threadIdx.x; t < to.top_n; t += THREADS) {
            const u64 key = t >= listed ? 0 : is_lost ? shared.top[t] : top[t].key;
            const Winner winner = from_ordered_bits(key);
            const bool is_kept = key && exact.place(winner.score, winner.token) >= least;
            if (to.top_tokens) to.top_tokens[row * to.top_n + t] = is_kept ? static_cast<i32>(winner.token) : -1;
            if (to.top_log_probs)
                to.top_log_probs[row * to.top_n + t] = is_kept ? log_prob(winner.score, shared.log_z) : -f32_infinity();
        }
        if (call.is_complete && to.top_tokens) complete(to.top_tokens + row * to.top_n, to.top_n);
    }

    // Writes the results of a row with a draw. All threads call this.
    __device__ __forceinline__ void write(const Draw& draw) {
        const LogprobColumns& to = call.columns;
        const u64 row = call.first_row + blockIdx.x;
        const bool is_filtered = exact.filters.is_any();
        const bool needs_log_z = to.log_z || to.log_probs || to.top_n || to.token_count;
        const float logit = exact.row.logit_of(draw.token);
        u64 least = exact.lowest();
        if (is_filtered && (needs_log_z || call.kept)) least = find_least();
        if (call.kept) {
            const u32 kept = is_filtered ? count_from(least) : 0;
            if (threadIdx.x == 0) call.least[blockIdx.x] = least, call.kept[blockIdx.x] = kept;
        }
        // Filters do not change ranks.
        if (threadIdx.x == 0 && to.ranks) to.ranks[row] = static_cast<i32>(1 + call.before[blockIdx.x]);
        if (!needs_log_z) return;
        const SummaryResult summary = call.summaries[blockIdx.x];
        double log_z = 0.0;
        if (is_filtered)
            log_z = log_z_from(least, summary.max);
        else
            log_z = add_rn(static_cast<double>(summary.max), ::log(summary.sum));
        if (threadIdx.x == 0) {
            shared.log_z = log_z;
            if (to.log_z) to.log_z[row] = log_z;
            if (to.log_probs) to.log_probs[row] = log_prob(logit, log_z);
        }
        __syncthreads();
        if (to.top_n) write_top(row, least, summary);
        for (u32 t = threadIdx.x; t < to.token_count; t += THREADS) {
            const u64 at = row * to.token_count + t, place = static_cast<u64>(to.token_ids[at]) - call.filtered.first_token;
            float found = -f32_infinity();
            if (place < call.filtered.tokens) {
                const u32 token = call.filtered.first_token + static_cast<u32>(place);
                const float own = exact.row.logit_of(token);
                if (exact.place(own, token) >= least) found = log_prob(own, shared.log_z);
            }
            to.token_log_probs[at] = found;
        }
    }

    // Returns the request for the summary of a draw's row.
    static __device__ __forceinline__ SummaryRequest request(const FilterCall& call, u32 i, u32 limit) {
        const Draw& draw = call.draws[i];
        if (draw.status != Status::Drawn) return {limit, 0, 0, 0, f32_infinity()};
        const u32 place = draw.token - call.first_token;
        const float raw = static_cast<const float*>(call.row(i).logits)[place];
        return {limit, 0, 0, place, call.is_transformed ? raw : call.rows[i].apply(raw, draw.token)};
    }

    // Writes the results of a row without a draw.
    static __device__ __forceinline__ void write_none(const LogprobCall& call) {
        const LogprobColumns& to = call.columns;
        const u64 row = call.first_row + blockIdx.x;
        for (u32 t = threadIdx.x; t < to.top_n; t += THREADS) {
            if (to.top_tokens) to.top_tokens[row * to.top_n + t] = call.is_complete ? static_cast<i32>(t) : -1;
            if (to.top_log_probs) to.top_log_probs[row * to.top_n + t] = -f32_infinity();
        }
        for (u32 t = threadIdx.x; t < to.token_count; t += THREADS) to.token_log_probs[row * to.token_count + t] = -f32_infinity();
        if (threadIdx.x) return;
        if (to.log_z) to.log_z[row] = -static_cast<double>(f32_infinity());
        if (to.log_probs) to.log_probs[row] = -f32_infinity();
        if (to.ranks) to.ranks[row] = 0;
        if (call.kept) call.kept[blockIdx.x] = 0;
    }

    // Writes the results of the block's row. All threads call this.
    static __device__ __forceinline__ void run(const LogprobCall& call, Shared& shared) {
        const u32 i = blockIdx.x;
        const Draw draw = call.filtered.draws[i];
        if (call.invalid[i] || draw.status != Status::Drawn) return write_none(call);
        const RowFilters filters = call.filtered.filters ? call.filtered.filters[i] : no_filters();
        call.filtered.begin(i, shared.row.row);
        FilterRow row{filters, call.filtered.row(i), shared.row};
        ExactFilters exact{row, call.weights};
        RowLogprobs{call, exact, shared}.write(draw);
    }
};

// Writes the tokens of a row that filters keep, in CSR form.
struct KeptRow {
    using Shared = RowLogprobs::Shared;
    static constexpr u32 THREADS = RowLogprobs::THREADS, WARPS = RowLogprobs::WARPS;

    // Returns the index of the row's first kept token: the number of kept tokens of all earlier rows. All threads call this.
    static __device__ __forceinline__ u64 begin(const KeptCall& call, u32 (&counts)[WARPS]) {
        // For a later launch than the first, the launch before has written the index of this launch's first row.
        const u64 first = call.first_row ? static_cast<u64>(call.columns.begin[call.first_row]) : 0;
        // A launch of several rows has at most 2^26 logits, so no sum overflows.
        const u32 before = RowLogprobs::sum_of_block(threadIdx.x < blockIdx.x ? call.kept[threadIdx.x] : 0, counts);
        return first + before;
    }

    // All threads call this.
    static __device__ __forceinline__ void run(const KeptCall& call, Shared& shared) {
        const u32 i = blockIdx.x, lane = threadIdx.x % 32, warp = threadIdx.x / 32, kept = call.kept[i];
        const u64 begin_at = begin(call, shared.counts), row_number = call.first_row + i;
        if (threadIdx.x == 0) {
            if (row_number == 0) call.columns.begin[0] = 0;
            call.columns.begin[row_number + 1] = static_cast<long long>(begin_at + kept);
        }
        if (kept == 0 || !call.columns.tokens) return;
        const RowFilters filters = RowLogprobs::no_filters();
        call.filtered.begin(i, shared.row.row);
        FilterRow row{filters, call.filtered.row(i), shared.row};
        ExactFilters exact{row, nullptr};
        const u64 least = call.least[i];
        u64 at = begin_at;
        // Of a step: the first token of the warp's part, the bits of the lane's kept tokens, and the numbers of kept tokens in lower
        // lanes (`before`) and in the part (`halves`). Low 16 bits: the part's first half; high 16 bits: its second half.
        u32 first = 0, bits = 0, before = 0, halves = 0;
        if (lane == 0) shared.counts[warp] = 0;
        row.stream(
            [&](u32 part, const float (&l)[8]) {
                first = part, bits = 0;
                // The place of a logit of -inf is below `least`.
#pragma unroll
                for (u32 t = 0; t < 8; ++t)
                    if (exact.place(l[t], row.token_of(part, t)) >= least) bits |= 1u << t;
                const u32 own = __popc(bits & 15) | __popc(bits >> 4) << 16;
                const u32 sum = sum_to_lane(own);
                before = sum - own, halves = __shfl_sync(0xffffffffu, sum, 31);
                if (lane == 0) shared.counts[warp] = (halves & 0xffff) + (halves >> 16);
            },
            [&] {
                __syncthreads();
                u32 of_step = 0, of_warps = 0;
#pragma unroll
                for (u32 w = 0; w < WARPS; ++w) of_step += shared.counts[w], of_warps += w < warp ? shared.counts[w] : 0;
                // All threads have read the counts of this step before any warp writes those of the next.
                __syncthreads();
                const u64 of_halves[2] = {at + of_warps + (before & 0xffff), at + of_warps + (halves & 0xffff) + (before >> 16)};
                for (u32 half = 0; half < 2; ++half) {
                    u64 to = of_halves[half];
                    for (u32 t = 4 * half; t < 4 * half + 4; ++t) {
                        if (!(bits >> t & 1)) continue;
                        if (to < call.columns.capacity) call.columns.tokens[to] = static_cast<i32>(row.token_of(first, t));
                        ++to;
                    }
                }
                at += of_step;
                bits = 0;
                if (lane == 0) shared.counts[warp] = 0;
            });
    }
};

#endif

}  // namespace flash_sampling
