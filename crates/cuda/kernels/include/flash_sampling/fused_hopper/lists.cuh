// The variant for rows with filters. For each row, it writes a short list of the tokens that min-p or top-k may keep.
//
// A listed row runs as a greedy row: its best score is the largest logit that any block has found, without noise. For min-p, the
// threshold is below the best score by min-p's distance. For top-k, the threshold is a cutoff that the first tiles estimate.
// Every token above the threshold is listed once.
//
// A bad cutoff cannot make a result wrong. The counters keep the largest cutoff that a block has used, and every token above it
// is listed. filter_list.cu decides a row only if all its kept tokens are above this cutoff.
//
// With a shadow of the weight, upper bounds of logits are compared and listed, and estimates of logits take the place of the best
// score and of the posts: candidates.cuh.
#pragma once

#include "../perturb.cuh"
#include "../selection/row_filters.cuh"
#include "../selection/row_lists.cuh"

namespace flash_sampling::fused_hopper {

// The threshold of a row without further candidates: the largest finite float. No finite dot product exceeds it.
constexpr u32 NO_MORE_TOKENS = 0x7f7fffffu;

// The kinds of listed rows, as values of `greedy` in the shared copy of a row.
[[maybe_unused]] constexpr u32 LISTED_BY_MIN_P = 2, LISTED_BY_TOP_K = 3;

// The shared memory for lists.
template <int COLUMNS, bool LISTS>
struct ListShared {
    static constexpr bool HAS_LISTS = false;
};
template <int COLUMNS>
struct ListShared<COLUMNS, true> {
    static constexpr bool HAS_LISTS = true;
    float cut[COLUMNS];  // min-p: the distance below the best; top-k: a logit
    RowLists lists;
};

// Whether a row has a list, in an instance with lists.
template <class Shared>
__device__ __forceinline__ bool is_listed(const Shared& shared, u32 column) {
    if constexpr (Shared::HAS_LISTS) return shared.rows[column].greedy > 1;
    return false;
}

// Sets the kinds of the copied rows; a barrier must follow.
template <class Shared>
__device__ __forceinline__ void prepare_lists(const Call& call, const RowLists& lists, Shared& shared, u32 worker,
                                              u32 workers) {
    if (worker == 0) shared.lists = lists;
    for (u32 i = worker; i < call.row_count; i += workers) {
        const RowFilters& filters = lists.filters[i];
        if (shared.rows[i].greedy) continue;
        if (filters.is_listed_by_min_p()) {
            shared.rows[i].greedy = LISTED_BY_MIN_P;
            shared.cut[i] = filters.min_p_cut();
        } else if (filters.top_k) {
            shared.rows[i].greedy = LISTED_BY_TOP_K;
            shared.cut[i] = -f32_infinity();
        }
    }
}

// Whether the list of a row has overflowed, so that it takes no more tokens.
template <class Shared>
__device__ __forceinline__ bool is_full(const Shared& shared, u32 column) {
    return *const_cast<volatile u32*>(&shared.lists.counters[column].count) > RowLists::ROOM;
}

// Returns the threshold of a listed row, before the head's soft-cap.
template <class Shared>
__device__ __forceinline__ float listed_capped_threshold(const Call& call, const Shared& shared, u32 column, u64 key) {
    const Row& row = shared.rows[column];
    if (row.greedy == LISTED_BY_TOP_K) return capped_threshold(shared.cut[column], 0.0f, call.head, row);
    return key ? capped_threshold(from_ordered_bits(key).score, shared.cut[column], call.head, row) : -f32_infinity();
}

// Publishes the largest logit of a block's first tile, or slightly less (the score of `key`), for some blocks only. One thread
// per row.
template <class Shared>
__device__ __forceinline__ void post(const Shared& shared, u32 column, u64 key) {
    const u32 every = gridDim.x / RowLists::POSTS, at = every ? blockIdx.x / every : RowLists::POSTS;
    if (shared.rows[column].greedy != LISTED_BY_TOP_K || at >= RowLists::POSTS || blockIdx.x % every) return;
    // 1: the tile has no finite logit.
    const u32 largest = key ? static_cast<u32>(key >> 32) : 1;
    *const_cast<volatile u32*>(&shared.lists.posted[column * RowLists::POSTS + at]) = largest;
}

// Sets the cutoff of a row from the published logits, after a short wait for late blocks. One thread per row.
template <class Shared>
__device__ __forceinline__ void estimate_cut(const Call& call, Shared& shared, u32 column, u32 tile_tokens) {
    if (shared.rows[column].greedy != LISTED_BY_TOP_K) return;
    // With few tokens or few blocks, all tokens are listed.
    if (call.tokens <= RowLists::WHOLE || gridDim.x < RowLists::POSTS) return;
    const u32 k = shared.lists.filters[column].top_k;
    const volatile u32* const posted = shared.lists.posted + column * RowLists::POSTS;
    u32 cut = 0;
#pragma unroll 1
    for (u32 turn = 0; turn < 64 && cut == 0; ++turn) {
        u32 seen[RowLists::POSTS];
#pragma unroll
        for (u32 i = 0; i < RowLists::POSTS; ++i) seen[i] = posted[i];
        cut = estimated_cut(seen, k, tile_tokens, call.tokens);
    }
    if (cut <= 1) return;
    shared.cut[column] = from_monotone_bits(cut);
    atomicMax(&shared.lists.counters[column].cut, cut);
}

// Lists a token of a listed row.
template <class Shared>
__device__ __forceinline__ void list(Shared& shared, u32 column, u32 token, float logit) {
    const u32 at = atomicAdd(&shared.lists.counters[column].count, 1u);
    if (at < RowLists::ROOM)
        shared.lists.keys[static_cast<u64>(column) * RowLists::ROOM + at] = to_ordered_bits(Winner::of(logit, token));
}

}  // namespace flash_sampling::fused_hopper
