// The entry points of draws with filters from all logits, with one block per draw.
//
//   filter_row     draws with min-p or top-k first
//   decide_row     draws that the other kernels leave undecided, unless a temperature follows the filters
#include "flash_sampling/selection/exact_filters.cuh"
#include "flash_sampling/selection/granule_candidates.cuh"

using namespace flash_sampling;

// For the host's launch: bytes of dynamic shared memory, threads per block.
extern "C" {
__constant__ u32 filter_row_launch[2] = {sizeof(FilterRow::Shared), FilterRow::THREADS};
__constant__ u32 decide_row_launch[2] = {sizeof(FilterRow::Shared), FilterRow::THREADS};
}

extern "C" __global__ void __launch_bounds__(FilterRow::THREADS, 2) filter_row(const __grid_constant__ FilterCall call) {
    extern __shared__ __align__(16) u8 memory[];
    if (call.skip_if.holds()) return;
    FilterRow::Shared& shared = *reinterpret_cast<FilterRow::Shared*>(memory);
    const u32 i = blockIdx.x;
    const RowFilters filters = call.filters[i];
    const Draw plain = call.draws[i];
    // Invalid rows stay invalid.
    if (plain.status != Status::Drawn || !filters.is_any() || filters.is_by_mass()) return;
    call.begin(i, shared.row);
    FilterRow select{filters, call.row(i), shared};
    gather_candidates(select, call.maxima(i));
    const Draw draw = select.draw();
    if (threadIdx.x == 0) call.draws[i] = draw;
}

extern "C" __global__ void __launch_bounds__(FilterRow::THREADS, 2)
    decide_row(const __grid_constant__ FilterCall call, const double* weights) {
    extern __shared__ __align__(16) u8 memory[];
    FilterRow::Shared& shared = *reinterpret_cast<FilterRow::Shared*>(memory);
    const u32 i = blockIdx.x;
    if (call.draws[i].status != Status::Undecided) return;
    const RowFilters filters = call.filters[i];
    if (filters.rescale != 1.0f) return;
    call.begin(i, shared.row);
    FilterRow select{filters, call.row(i), shared};
    const Draw draw = ExactFilters{select, weights}.draw();
    if (threadIdx.x == 0) call.draws[i] = draw;
}
