// The entry point of draws with filters from lists of the largest logits: one block per row.
#include "flash_sampling/selection/filter_row.cuh"

using namespace flash_sampling;

// For the host's launch: bytes of dynamic shared memory, threads per block.
extern "C" {
__constant__ u32 filter_list_launch[2] = {sizeof(FilterRow::Shared), FilterRow::THREADS};
}

extern "C" __global__ void __launch_bounds__(FilterRow::THREADS, 2) filter_list(const __grid_constant__ FilterListCall call) {
    extern __shared__ __align__(16) u8 memory[];
    if (call.passes && *call.passes == FilterPasses::Logits) return;
    FilterRow::Shared& shared = *reinterpret_cast<FilterRow::Shared*>(memory);
    const u32 i = blockIdx.x;
    const RowFilters filters = call.lists.filters[i];
    const ListCounters counters = call.lists.counters[i];
    const Draw plain = call.draws[i];
    const Row* const given = call.rows + i;
    const bool is_greedy = given->greedy;
    copy_row(&shared.row, given);
    // All threads have read the counters. Clears the counters and posts.
    __syncthreads();
    if (threadIdx.x == 0) call.lists.counters[i] = {0, 0};
    if (threadIdx.x < RowLists::POSTS) call.lists.posted[i * RowLists::POSTS + threadIdx.x] = 0;
    // Invalid rows stay invalid.
    if (plain.status != Status::Drawn || is_greedy || !filters.is_any()) return;
    Draw draw{0, 0.0f, 0.0f, Status::Undecided};
    if (filters.is_listed()) {
        FilterRow select{filters, ExistingRow{nullptr, 0, 0}, shared};
        draw = select.draw_listed(call.lists.keys + static_cast<u64>(i) * RowLists::ROOM, counters);
    }
    if (threadIdx.x != 0) return;
    call.draws[i] = draw;
    if (call.passes && draw.status == Status::Undecided) *call.passes = FilterPasses::Both;
}
