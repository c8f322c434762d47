// What filter_list.cu and filter_list_ranks.cu are given.
#pragma once

#include "row_lists.cuh"

namespace flash_sampling {

struct FilterListCall {
    RowLists lists;   // as the fused kernel leaves them; its counters and posts are zeros again afterwards
    const Row* rows;  // [rows]
    Draw* draws;      // [rows] of the fused kernel, and then with filters; Undecided where the list does not tell
};
FS_LAYOUT(FilterListCall, 48, FS_AT(lists, 0) && FS_AT(rows, 32) && FS_AT(draws, 40));

}  // namespace flash_sampling
