// Draws (paper Alg. 1): for each row, finds the token with the largest perturbed score. Stores the logits on request.
//
// The plain version scores every token of the tile, and keeps the best score. The deviations, and why each keeps the result:
//
// 1. A granule's word bounds the noise of its tokens, and so gives a limit: no token of the granule with a dot product at or
//    below the limit wins (see `ThresholdLine`). All threads first compute the limits of a tile.
// 2. The limits come from the best winner of all blocks. An outdated winner only causes more tokens to be scored.
// 3. In a block's first tile, the leaders of granules give estimates, because their scores have cheap lower bounds. The best
//    estimate of all blocks sets the limits.
// 4. The remaining tokens enter the warp's queue, so that full warps score them exactly.
//
// CandidatesEpilogue gets upper bounds of dot products, from a shadow (shadow/pass.cuh), in place of dot products. Transforms grow
// with the dot product, so they give upper bounds of scores. The best score of a row is a *lower* bound, and the limits follow from it.
// Every token whose upper bound reaches the best lower bound so far is listed once, so the winner is listed. exact_winners draws
// from the lists.
#pragma once

#include "../shadow/bounds.cuh"
#include "sample.cuh"
#include "store.cuh"

namespace flash_sampling {

// A token that may win.
struct Waiting {
    float dot;  // with the head's bias
    u32 place;  // row of the batch in the low half, token within the tile in the high half
};

template <bool CANDIDATES>
struct DrawArguments {
    using Type = LogitStore;
};
template <>
struct DrawArguments<true> {
    using Type = Candidates;
};

template <int COLUMNS, bool CANDIDATES = false>
struct DrawEpilogue {
    static constexpr u32 GRANULE = 16;
    using Arguments = typename DrawArguments<CANDIDATES>::Type;
    static_assert(COLUMNS <= 32 * WARPS, "a lane keeps the best of one row");
    struct Shared {
        Winners<COLUMNS> winners;
        ThresholdLine lines[COLUMNS];          // a row's limits, as a function of a granule's noise bound
        u64 estimates[PART_COLUMNS<COLUMNS>];  // a lower bound of the tile's best score, as ordered bits; 0 = none
        float limits[PART_COLUMNS<COLUMNS>][TILE_GRANULES];
        Waiting queue[WARPS][32];
        u8 queued[EPILOGUE_THREADS];  // tokens in the warp's queue; a copy per thread, so that no lane reads another's write
    };
    const Call& call;
    const Arguments& arguments;
    const Run& run;
    Shared& shared;

    __device__ __forceinline__ void begin() {
        shared.winners.begin();
        shared.queued[threadIdx.x] = 0;
    }

    // Sets a row's limits for tokens from `next_token` on, from the ordered bits of the best winner of all blocks.
    __device__ __forceinline__ void set_limits(u32 column, u64 best, u32 next_token) {
        ThresholdLine line = ThresholdLine::of_best(best, next_token, call.head, call.rows[column]);
        if constexpr (CANDIDATES) {
            // A lower bound of another block also limits the candidates of this block.
            if (best) shared.winners.best[column].winner = from_ordered_bits(best);
            // A row that the shadow cannot decide lists no more tokens.
            if (__ldcg(&arguments.counts[column]) > Candidates::ROOM) line = ThresholdLine::flat(bits_to_f32(0x7f7fffffu));
        }
        shared.lines[column] = line;
    }

    // Publishes the block's best winner of a row, and sets the row's limits from the best winner of all blocks.
    __device__ __forceinline__ void refresh_limits(u32 column, u32 next_token) {
        const u64 mine = shared.winners.key(column), theirs = __ldcg(&call.best[column]);
        if (mine > theirs) atomicMax(&call.best[column], mine);
        set_limits(column, max(mine, theirs), next_token);
    }

    // Computes the first limits of a part's rows. All threads of the block call this function.
    __device__ __forceinline__ void estimate(const DotTile& tile, u32 thread) {
        if (thread < tile.columns) shared.estimates[thread] = 0;
        __syncthreads();
        const u32 first = call.first_token + tile.first;
        each_granule(call, tile, thread, [&](u32 c, u32 place, u32 word) {
            // The index of a token before the tile wraps to a large number.
            const u32 token = (first / Granule::TOKENS + place) * Granule::TOKENS + word % Granule::TOKENS, t = token - first;
            if (t >= tile.tokens) return;
            const Row& row = call.rows[tile.column + c];
            const float dot = tile.dots[c * tile.stride + t];
            float biased = call.bias ? add_rn(dot, call.bias[tile.first + t]) : dot;
            if constexpr (CANDIDATES) biased = least_dot(tile.column + c, tile.first + t, biased);
            const float logit = row.apply(call.head.apply(biased, 0.0f, false), token);
            if (!is_finite(logit)) return;
            const u32 bits = Granule::minimum_bits(word);
            const float score = row.greedy ? logit : leader_score_at_least(logit, noise_bound(bits), bits);
            if (score == -f32_infinity()) return;
            atomicMax(&shared.estimates[c], to_ordered_bits(Winner::of(score, token)));
        });
        __syncthreads();
        // The block scores the token itself. So an estimate remains a row's winner only if it equals the token's score.
        if (thread < tile.columns && shared.estimates[thread]) {
            const u32 column = tile.column + thread;
            const u64 mine = shared.estimates[thread], theirs = atomicMax(&call.best[column], mine);
            set_limits(column, max(mine, theirs), 0);
        }
        __syncthreads();
    }

    __device__ __forceinline__ void tile(const DotTile& tile) {
        const u32 thread = thread_index(), warp = thread / 32, lane = thread % 32;
        // Refreshes all rows in the first part of a tile, so that the tile waits for this read only once.
        if (tile.column == 0) {
            for (u32 column = thread; column < call.row_count; column += EPILOGUE_THREADS)
                refresh_limits(column, call.first_token + tile.first);
            __syncthreads();
        }
        if (tile.first == run.first) estimate(tile, thread);
        each_granule(call, tile, thread, [&](u32 c, u32 place, u32 word) {
            const ThresholdLine line = shared.lines[tile.column + c];
            shared.limits[c][place] = line.dot_threshold(noise_bound(Granule::minimum_bits(word)), call.head);
        });
        __syncthreads();
        u32 queued = shared.queued[thread];
        for (u32 c = warp; c < tile.columns; c += WARPS) {
            if constexpr (!CANDIDATES) {
                if (arguments.logits) store_row(call, arguments, tile, c);
            }
            filter_row(tile, c, lane, shared.queue[warp], queued);
        }
        if (tile.column + tile.columns == call.row_count) score_queue(tile, lane, shared.queue[warp], queued);
        shared.queued[thread] = static_cast<u8>(queued);
    }

    // Filters a row by a warp. Each lane takes four tokens of a granule, and queues the tokens above its limit.
    __device__ __forceinline__ void filter_row(const DotTile& tile, u32 c, u32 lane, Waiting* queue, u32& queued) {
        const u32 first = call.first_token + tile.first;
        // Quads have global token ids, and a shard may begin within a quad.
        const u32 shift = first & 3;
#pragma unroll 1
        for (u32 begin = 0; begin < shift + tile.tokens; begin += TILE_TOKENS) {
            const u32 t = begin + 4 * lane - shift;  // wraps for tokens before the tile
            float d[4];
            read_quad(tile, c, t, shift == 0, d);
            const float limit = shared.limits[c][granule_of_tile(first, first + t)];
            // A token beyond the tile has -inf. It passes only a limit of NaN, and then its score cannot win.
            u32 left = 0;
#pragma unroll
            for (u32 j = 0; j < 4; ++j) left |= d[j] <= limit ? 0 : 1u << j;
#pragma unroll 1
            while (const u32 lanes = __ballot_sync(0xffffffffu, left)) {
                if (queued + __popc(lanes) > 32) score_queue(tile, lane, queue, queued);
                if (left) {
                    const u32 j = __ffs(static_cast<int>(left)) - 1, place = (tile.column + c) | (t + j) << 16;
                    const float dot = j & 2 ? (j & 1 ? d[3] : d[2]) : (j & 1 ? d[1] : d[0]);
                    queue[queued + __popc(lanes & ((1u << lane) - 1))] = Waiting{dot, place};
                    left &= left - 1;
                }
                queued += __popc(lanes);
            }
        }
    }

    // Returns a lower bound of the dot product of row `at` of the weight, with the head's bias, from the upper bound `upper`.
    __device__ __forceinline__ float least_dot(u32 column, u32 at, float upper) const {
        return lower_dot(call, arguments, arguments.bounds[column], at, upper, LOWER_DISTANCE);
    }

    // Returns the score of a token; none if its logit is -inf or invalid. An invalid logit is recorded for the row. `dot` includes
    // the head's bias. With CANDIDATES, `dot` is an upper bound. Then returns a lower bound of the score, and sets `most` to an upper
    // bound of the score.
    __device__ __forceinline__ Candidate score(u32 column, u32 token, float dot, Winner& most) const {
        const Row& row = call.rows[column];
        const Noise noise{row.seed, row.position};
        const float gumbel = row.greedy ? 0.0f : noise.gumbel(Domain::Token, row.draw, token);
        const float raw = call.head.apply(dot, 0.0f, false);
        float logit;
        if constexpr (CANDIDATES) {
            logit = row.apply(raw, token);
            // Leaves the row to the full kernel, which reports an error if the row has an invalid logit.
            if (!(raw < f32_infinity() && logit < f32_infinity())) atomicMax(&arguments.counts[column], Candidates::OPEN);
            if (!is_finite(logit)) return Candidate::none();
            most = Winner::of(add_rn(logit, gumbel), token);
            logit = row.apply(call.head.apply(least_dot(column, token - call.first_token, dot), 0.0f, false), token);
        } else {
            logit = checked_logit(raw, row, token, &call.invalid[column]);
        }
        return logit > -f32_infinity() ? Candidate{Winner::of(add_rn(logit, gumbel), token), logit} : Candidate::none();
    }

    // Lists a token with an upper bound of its score.
    __device__ __forceinline__ void list(u32 column, const Winner& most) const {
        const u32 at = atomicAdd(&arguments.counts[column], 1u);
        if (at < Candidates::ROOM) arguments.keys[static_cast<u64>(column) * Candidates::ROOM + at] = to_ordered_bits(most);
    }

    // Scores the warp's queue, and clears it.
    __device__ __forceinline__ void score_queue(const DotTile& tile, u32 lane, const Waiting* queue, u32& queued) {
        __syncwarp();
        u32 column = 0;
        Candidate candidate = Candidate::none();
        Winner most = Winner::none();
        if (lane < queued) {
            const Waiting& waiting = queue[lane];
            column = waiting.place & 0xffff;
            candidate = score(column, call.first_token + tile.first + (waiting.place >> 16), waiting.dot, most);
        }
        // The lane that has a row's best candidate merges the better candidates one by one, without a lock.
        const bool beats = !candidate.winner.is_none() && candidate.winner.beats(shared.winners.best[column].winner);
        __syncwarp();
#pragma unroll 1
        for (u32 lanes = __ballot_sync(0xffffffffu, beats); lanes; lanes &= lanes - 1) {
            const u32 from = __ffs(static_cast<int>(lanes)) - 1, of = __shfl_sync(0xffffffffu, column, from);
            const Winner winner{__shfl_sync(0xffffffffu, candidate.winner.score, from),
                                __shfl_sync(0xffffffffu, candidate.winner.token, from)};
            const float logit = __shfl_sync(0xffffffffu, candidate.logit, from);
            if (of / WARPS == lane) shared.winners.best[of] = shared.winners.best[of].merge({winner, logit});
        }
        __syncwarp();
        if constexpr (CANDIDATES) {
            if (!most.is_none() && most.score >= shared.winners.best[column].winner.score) list(column, most);
        }
        queued = 0;
    }

    // Reads four dot products of a row of the tile, with the head's bias; -inf beyond the tile.
    __device__ __forceinline__ void read_quad(const DotTile& tile, u32 c, u32 t, bool is_aligned, float (&d)[4]) {
        const float* const dots = tile.dots + c * tile.stride;
        if (is_aligned) {
            const float4 quad = *reinterpret_cast<const float4*>(dots + t);
            d[0] = quad.x;
            d[1] = quad.y;
            d[2] = quad.z;
            d[3] = quad.w;
        }
#pragma unroll
        for (u32 j = 0; j < 4; ++j) {
            const bool is_token = t + j < tile.tokens;
            if (!is_aligned && is_token) d[j] = dots[t + j];
            if (is_token && call.bias) d[j] = add_rn(d[j], call.bias[tile.first + t + j]);
            if (!is_token) d[j] = -f32_infinity();
        }
    }

    __device__ __forceinline__ void end() {
        if constexpr (CANDIDATES) {
            for (u32 column = threadIdx.x; column < call.row_count; column += EPILOGUE_THREADS)
                if (const u64 key = shared.winners.key(column)) atomicMax(&call.best[column], key);
        } else {
            shared.winners.conclude_rows(call, run, GRANULE);
        }
    }
};

template <int COLUMNS>
using CandidatesEpilogue = DrawEpilogue<COLUMNS, true>;

}  // namespace flash_sampling
