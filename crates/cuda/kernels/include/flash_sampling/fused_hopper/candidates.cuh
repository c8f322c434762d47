// The variant for a shadow of the weight. For each row, it lists the tokens that can win: the candidates.
//
// The weight of this variant is the shadow's 8-bit codes, and a row of the batch is two columns of 8-bit digits. Their sums are
// exact integers. `upper_dots` turns the sums into upper bounds of the dot products with the weight. The later steps use these
// bounds as dot products. Transforms grow with the dot product, so an upper bound of it gives an upper bound of the score.
//
// The best key of a row is a *lower* bound of a score, and determines the thresholds. The kernel lists a token once if the upper
// bound of its score reaches the best lower bound so far. So the winner is listed. If the list of a row overflows, or the row has
// no finite bounds, no more tokens of the row are listed.
//
// For a row with filters (lists.cuh), the kernel lists every token whose upper bound of the logit reaches the row's threshold. The
// threshold follows from *estimates* of logits: an estimate is the upper bound minus the error bound and minus a share of the
// error bound. Errors of many elements add up to much less than their bound, so the estimates are nearly exact. exact_lists checks
// the thresholds against exact logits. The blocks count the estimates of rows with a top-k, and raise the cutoffs with each tile.
#pragma once

#include "../shadow/bounds.cuh"
#include "lists.cuh"

namespace flash_sampling::fused_hopper {

// The shared memory for candidates.
template <int COLUMNS, bool CANDIDATES>
struct CandidateShared {};
template <int COLUMNS>
struct CandidateShared<COLUMNS, true> {
    // The bounds of the rows, one array per number; zeros beyond the batch.
    float hidden_scale[COLUMNS], error_factor[COLUMNS], norm_factor[COLUMNS], constant[COLUMNS];
    // The bins of EstimateCounts.
    float bin_base[COLUMNS], bin_width[COLUMNS];
    Candidates candidates;
    // The token whose lower bound is refined, and parts of its dot product: refine.cuh.
    u32 refined;
    float dot_parts[3];
};

// The first lower bound of every row. The full kernel draws the rows without a larger score.
constexpr float LEAST_SCORE = -1e30f;

// Returns the distance from upper bounds to estimates, as a multiple of the error bound. An error of `width` independent parts has
// a standard deviation of about the bound divided by the square root of `width`. An estimate allows eight standard deviations.
__device__ __forceinline__ float estimate_distance(u32 width) {
    return fminf(1.0f + 8.0f / sqrtf(u32_to_f32(width)), LOWER_DISTANCE);
}

// Copies the bounds of the rows; a barrier must follow.
template <class Shared>
__device__ __forceinline__ void prepare_candidates(const Call& call, const Candidates& candidates, Shared& shared, u32 columns,
                                                   u32 worker, u32 workers) {
    if (worker == 0) shared.candidates = candidates;
    for (u32 i = worker; i < columns; i += workers) {
        const HiddenBound bound = i < call.row_count ? candidates.bounds[i] : HiddenBound{};
        shared.hidden_scale[i] = bound.scale;
        shared.error_factor[i] = bound.error;
        shared.norm_factor[i] = bound.norm;
        shared.constant[i] = bound.constant;
    }
}

// Returns whether the shadow leaves a row undecided.
template <class Shared>
__device__ __forceinline__ bool is_open(const Shared& shared, u32 column) {
    return *const_cast<volatile u32*>(&shared.candidates.counts[column]) > Candidates::ROOM;
}

// Returns a lower bound of a token's dot product plus the head's bias. `upper` is an upper bound of this sum, or a smaller value.
// Returns an estimate for rows with lists.
template <class Shared>
__device__ __forceinline__ float lower_dot(const Call& call, const Shared& shared, u32 column, u32 token, float upper) {
    const u32 at = token - call.first_token;
    const HiddenBound bound{0.0f, shared.error_factor[column], shared.norm_factor[column], shared.constant[column]};
    const float distance = is_listed(shared, column) ? estimate_distance(call.hidden) : LOWER_DISTANCE;
    return flash_sampling::lower_dot(call, shared.candidates, bound, at, upper, distance);
}

// Sets the bins of a row with a top-k, unless another block has set the bins. The first bin begins at this block's cutoff. The
// width of a bin is a small part of the error bound of `key`'s token, as a logit. Narrower bins would help little: all tokens up
// to one error bound below the cutoff are listed in any case. One thread per row calls this.
template <class Shared>
__device__ __forceinline__ void set_bins(const Call& call, Shared& shared, u32 column, u64 key) {
    shared.bin_width[column] = 0.0f;
    if (shared.rows[column].greedy != LISTED_BY_TOP_K) return;
    constexpr float BINS_OF_A_BOUND = 6.0f;
    const Candidates& candidates = shared.candidates;
    const float base = shared.cut[column];
    u64 bins = 0;
    if (key && is_finite(base)) {
        const u32 at = from_ordered_bits(key).token - call.first_token;
        const float bound = candidates.bounds[column].of(candidates.errors[at], candidates.norms[at]);
        const float width = bound / BINS_OF_A_BOUND * call.head.scale * shared.rows[column].inv_temperature;
        if (width > 0.0f && is_finite(width)) bins = static_cast<u64>(f32_to_bits(width)) << 32 | f32_to_bits(base);
    }
    const u64 earlier = atomicCAS(reinterpret_cast<unsigned long long*>(candidates.estimated + column), 0ull, bins);
    if (earlier) bins = earlier;
    shared.bin_base[column] = bits_to_f32(static_cast<u32>(bins));
    shared.bin_width[column] = bits_to_f32(static_cast<u32>(bins >> 32));
}

// Counts the estimate of a listed token.
template <class Shared>
__device__ __forceinline__ void count_estimate(Shared& shared, u32 column, float estimate) {
    const float width = shared.bin_width[column], above = estimate - shared.bin_base[column];
    if (!(width > 0.0f && above >= 0.0f)) return;
    const u32 bin = static_cast<u32>(fminf(above / width, static_cast<float>(EstimateCounts::BINS - 1)));
    atomicAdd(&shared.candidates.estimated[column].counts[bin], 1u);
}

// Raises the cutoff of a row with a top-k to the highest edge that k estimates of all blocks have reached. One thread per row calls
// this function.
template <class Shared>
__device__ __forceinline__ void raise_cut(Shared& shared, u32 column) {
    if (shared.rows[column].greedy != LISTED_BY_TOP_K || !(shared.bin_width[column] > 0.0f)) return;
    const u32 k = shared.lists.filters[column].top_k;
    const uint4* const words = reinterpret_cast<const uint4*>(shared.candidates.estimated + column);
    constexpr u32 NONE = ~0u, FIRST = 2;  // the words before the counts
    u32 bin = NONE, reached = 0;
#pragma unroll
    for (u32 i = sizeof(EstimateCounts) / sizeof(uint4); i-- > 0;) {
        const uint4 four = __ldcg(words + i);
        const u32 counts[4] = {four.x, four.y, four.z, four.w};
#pragma unroll
        for (u32 e = 4; e-- > 0;) {
            if (4 * i + e < FIRST) continue;
            reached += counts[e];
            if (bin == NONE && reached >= k) bin = 4 * i + e - FIRST;
        }
    }
    if (bin == NONE) return;
    const float base = shared.bin_base[column], above = u32_to_f32(bin) * shared.bin_width[column];
    const float cut = lowered(base + above, fabsf(base) + above);
    if (!(cut > shared.cut[column])) return;
    shared.cut[column] = cut;
    atomicMax(&shared.lists.counters[column].cut, to_monotone_bits(add_rn(cut, 0.0f)));
}

// Lists a candidate. Returns its place in the lists, or ~0 if the list is full.
template <class Shared>
__device__ __forceinline__ u64 list_candidate(Shared& shared, u32 column, u64 key) {
    const u32 at = atomicAdd(&shared.candidates.counts[column], 1u);
    if (at >= Candidates::ROOM) return ~0ull;
    const u64 place = static_cast<u64>(column) * Candidates::ROOM + at;
    shared.candidates.keys[place] = key;
    return place;
}

}  // namespace flash_sampling::fused_hopper
