// Lists of the largest logits of rows: an output of the fused kernel, and the input of filter_list.cu.
#pragma once

#include "row_filters.cuh"
#include "../summary/winner.cuh"

namespace flash_sampling {

// The counters of a row; zeros between launches.
struct ListCounters {
    u32 count;  // the number of listed tokens; if more than ROOM, the list lacks tokens
    u32 cut;    // the largest cutoff that a block has used, as monotone bits; 0 = none
};
FS_LAYOUT(ListCounters, 8, FS_AT(count, 0) && FS_AT(cut, 4));

struct RowLists {
    static constexpr u32 ROOM = 8192;  // tokens of a list
    static constexpr u32 POSTS = 16;   // the posted logits of a row, each the largest of a block
    // With top-k, up to this number of tokens are all listed. A rank cannot shorten a longer list.
    static constexpr u32 WHOLE = 4096;

    const RowFilters* filters;  // [row_count]
    ListCounters* counters;     // [row_count]
    u32* posted;                // [row_count, POSTS] largest logits of blocks, as monotone bits; zeros between launches
    u64* keys;                  // [row_count, ROOM] logits and tokens
};
FS_LAYOUT(RowLists, 32, FS_AT(filters, 0) && FS_AT(counters, 8) && FS_AT(posted, 16) && FS_AT(keys, 24));

// The passes of a call with filters that does not wait, as a word in device memory.
enum class FilterPasses : u32 {
    Lists = 0,   // so far, lists decide all rows
    Logits = 1,  // the filters of a row need all logits: no lists are made, and the second pass stores all logits
    Both = 2,    // a list does not decide its row: the second pass stores all logits
};

// The argument of filter_list.cu and filter_list_ranks.cu.
struct FilterListCall {
    RowLists lists;   // in: from the fused kernel; out: counters and posts are zeros
    const Row* rows;  // [rows]
    Draw* draws;      // [rows] in: from the fused kernel; out: Undecided if the list does not decide a row with filters
    FilterPasses* passes;  // null: a call that waits
};
FS_LAYOUT(FilterListCall, 56, FS_AT(lists, 0) && FS_AT(rows, 32) && FS_AT(draws, 40) && FS_AT(passes, 48));

// Returns the minimum over groups of SIZE posts of each group's maximum.
template <u32 SIZE>
FS_FUNCTION u32 least_of_groups(const u32 (&posted)[RowLists::POSTS]) {
    u32 least = ~0u;
    for (u32 i = 0; i + SIZE <= RowLists::POSTS; i += SIZE) {
        u32 largest = 0;
        for (u32 j = 0; j < SIZE; ++j) largest = posted[i + j] > largest ? posted[i + j] : largest;
        least = largest < least ? largest : least;
    }
    return least;
}

// Estimates a cutoff that `k` of `tokens` tokens reach, and few more. The input is the largest logits of 16 parts
// with `part` tokens each. Returns 0 if too few parts have posted their largest logit. A missing part (0) lowers the
// maximum of its group.
//
// The estimate is the minimum over some groups of parts of each group's maximum. If a group would contain too many of
// the k largest logits, the estimate is the minimum over all parts.
//
// The estimate is too high if every group contains one of the k largest logits; filter_list.cu detects this. With
// tokens in random order, G groups of S parts have a probability of at most (S part k / tokens)^G for it. There are
// four groups of four parts, or five groups of three for a larger k. For k = 50 of 151936 tokens and parts of 128, five
// groups have a probability of 3e-5 instead of 8e-4, with a list 1.5 times as long. If four groups would contain too
// many, there are eight groups of two, if each contains at most a quarter of the k (2e-5). With half as many tokens,
// the minimum over all parts makes a list longer than 4096 in one row of 60.
//
// A block that reads the posts before all parts have posted has a lower cutoff, and lists more tokens. With a ROOM of
// 4096, one to four rows of a thousand overflowed in replays of graphs with k = 50.
FS_FUNCTION u32 estimated_cut(const u32 (&posted)[RowLists::POSTS], u32 k, u32 part, u32 tokens) {
    u32 of_all = ~0u;
    for (u32 i = 0; i < RowLists::POSTS; ++i) of_all = posted[i] < of_all ? posted[i] : of_all;
    if (16ull * part * k > tokens) return 8ull * part * k > tokens ? of_all : least_of_groups<2>(posted);
    return k > 32 ? least_of_groups<3>(posted) : least_of_groups<4>(posted);
}

}  // namespace flash_sampling
