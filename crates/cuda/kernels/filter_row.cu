// The entry points of draws with filters from all logits.
#include "flash_sampling/selection/exact_filters.cuh"
#include "flash_sampling/selection/granule_candidates.cuh"
#include "flash_sampling/selection/find_block_maxima.cuh"

using namespace flash_sampling;

// For the host's launch: bytes of dynamic shared memory, threads per block.
extern "C" {
__constant__ u32 filter_row_launch[2] = {sizeof(FilterRow::Shared), FilterRow::THREADS};
__constant__ u32 find_block_maxima_launch[2] = {FindBlockMaxima::TOKENS, FindBlockMaxima::THREADS};
}

// Writes the maxima that filter_row reads as `call.block_maxima`. blockIdx.y is the draw.
extern "C" __global__ void __launch_bounds__(FindBlockMaxima::THREADS)
    find_block_maxima(const __grid_constant__ FilterCall call, u16* maxima) {
    if (call.skip_if.holds()) return;
    FindBlockMaxima{call, maxima}.block(blockIdx.x, blockIdx.y);
}

// One block per draw. Draws for rows with min-p or top-k first. With `weights`, it then decides all undecided rows with filters,
// unless a temperature follows the filters. Without (null), the host decides them.
extern "C" __global__ void __launch_bounds__(FilterRow::THREADS, 2)
    filter_row(const __grid_constant__ FilterCall call, const double* weights) {
    extern __shared__ __align__(16) u8 memory[];
    if (call.skip_if.holds()) return;
    FilterRow::Shared& shared = *reinterpret_cast<FilterRow::Shared*>(memory);
    const u32 i = blockIdx.x;
    const RowFilters filters = call.filters[i];
    const Status plain = call.draws[i].status;
    // Invalid rows stay invalid.
    if (!filters.is_any()) return;
    const bool gathers = plain == Status::Drawn && !filters.is_by_mass();
    if (!gathers && plain != Status::Undecided) return;
    call.begin(i, shared.row);
    FilterRow select{filters, call.row(i), shared};
    Draw draw{0, 0.0f, 0.0f, Status::Undecided};
    if (gathers) {
        const bool is_bare = !shared.row.mask && !shared.row.biases;
        gather_candidates(select, is_bare ? call.maxima(i) : nullptr);
        draw = select.draw();
        __syncthreads();
    }
    if (draw.status == Status::Undecided && weights && filters.rescale == 1.0f) draw = ExactFilters{select, weights}.draw();
    if (threadIdx.x == 0) call.draws[i] = draw;
}
