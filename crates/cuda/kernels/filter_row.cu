// The entry point of draws with min-p or top-k first, from all logits: one block per draw.
#include "flash_sampling/selection/filter_row.cuh"

using namespace flash_sampling;

// For the host's launch: bytes of dynamic shared memory, threads per block.
extern "C" {
__constant__ u32 filter_row_launch[2] = {sizeof(FilterRow::Shared), FilterRow::THREADS};
}

extern "C" __global__ void __launch_bounds__(FilterRow::THREADS, 2) filter_row(const __grid_constant__ FilterCall call) {
    extern __shared__ __align__(16) u8 memory[];
    FilterRow::Shared& shared = *reinterpret_cast<FilterRow::Shared*>(memory);
    const u32 i = blockIdx.x;
    const RowFilters filters = call.filters[i];
    const Draw plain = call.draws[i];
    // Invalid rows stay invalid.
    if (plain.status != Status::Drawn || !filters.is_any() || filters.is_by_mass()) return;
    call.begin(i, shared.row);
    FilterRow select{filters, call.row(i), shared};
    const Draw draw = select.draw();
    if (threadIdx.x == 0) call.draws[i] = draw;
}
