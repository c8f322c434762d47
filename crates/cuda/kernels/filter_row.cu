// The entry point of draws with filters from all logits, with one block per draw.
#include "flash_sampling/selection/exact_filters.cuh"
#include "flash_sampling/selection/granule_candidates.cuh"

using namespace flash_sampling;

// For the host's launch: bytes of dynamic shared memory, threads per block.
extern "C" {
__constant__ u32 filter_row_launch[2] = {sizeof(FilterRow::Shared), FilterRow::THREADS};
}

// Draws for rows with min-p or top-k first. With `weights`, it then decides all undecided rows without a temperature after
// their filters; without (null), the host decides them.
extern "C" __global__ void __launch_bounds__(FilterRow::THREADS, 2)
    filter_row(const __grid_constant__ FilterCall call, const double* weights) {
    extern __shared__ __align__(16) u8 memory[];
    if (call.skip_if.holds()) return;
    FilterRow::Shared& shared = *reinterpret_cast<FilterRow::Shared*>(memory);
    const u32 i = blockIdx.x;
    const RowFilters filters = call.filters[i];
    const Status plain = call.draws[i].status;
    // Invalid rows stay invalid.
    const bool gathers = plain == Status::Drawn && filters.is_any() && !filters.is_by_mass();
    if (!gathers && plain != Status::Undecided) return;
    call.begin(i, shared.row);
    FilterRow select{filters, call.row(i), shared};
    Draw draw{0, 0.0f, 0.0f, Status::Undecided};
    if (gathers) {
        gather_candidates(select, call.maxima(i));
        draw = select.draw();
        __syncthreads();
    }
    if (draw.status == Status::Undecided && weights && filters.rescale == 1.0f) draw = ExactFilters{select, weights}.draw();
    if (threadIdx.x == 0) call.draws[i] = draw;
}
