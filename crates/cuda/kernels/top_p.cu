// The entry points of draws with top-p first, from all logits.
//
//   top_p            a cluster of 1, 2, 4 or 8 blocks per draw, or one block on GPUs without clusters
//   top_p_resolve    decides the rows that `top_p` leaves undecided, with as many blocks as the GPU holds, at least one per draw
//   top_p_block_max  replaces both for calls with block maxima besides the logits, in a cooperative launch of as many blocks as
//                    the GPU holds. Rows with top-p first have top-p alone. No row has a mask or biases. The first token is a
//                    multiple of 4, because only RowLines reads undecided rows
#include "flash_sampling/selection/top_p_block_max.cuh"

using namespace flash_sampling;

static_assert(TopPBlockMax::THREADS == TopPSearch::THREADS && TopPResolve<NoRanks>::THREADS == TopPSearch::THREADS,
              "the host launches all three with as many threads");

// For the host's launches: threads per block, tokens per step of a block of `top_p`, and the bytes of dynamic shared memory of
// the other two.
extern "C" {
__constant__ u32 top_p_launch[4] = {TopPSearch::THREADS, TopPSearch::STEP, sizeof(TopPResolve<NoRanks>::Shared),
                                         sizeof(TopPBlockMax::Shared)};
}

// Draws for rows that TopPFirstPass does not support.
static __device__ __noinline__ void draw_by_turns(const FilterCall& call, TopPSearch::Shared& shared, u32 i, const Draw& plain) {
    const RowFilters filters = call.filters[i];
    call.begin(i, shared.row);
    TopPSearch select{filters, call.row(i), shared};
    const Draw draw = select.draw(plain);
    // No block ends before the other blocks have read its share.
    Team::sync_relaxed();
    if (threadIdx.x == 0 && Team::rank() == 0) call.draws[i] = draw;
}

extern "C" __global__ void __launch_bounds__(TopPSearch::THREADS, 2)
    top_p(const __grid_constant__ FilterCall call, const __grid_constant__ UndecidedRows open) {
    __shared__ TopPSearch::Shared shared;
    if (call.skip_if.holds()) return;
    const u32 i = blockIdx.x / Team::size();
    const bool has_lines = TopPSearch::Lines::takes(call.row(i)) && !call.is_transformed;
    // Without lines, the pass loads nothing.
    TopPFirstPass pass(has_lines ? call.row(i) : ExistingRow{nullptr, 0, 0});
    const RowFilters filters = call.filters[i];
    const Draw plain = call.draws[i];
    // Invalid rows stay invalid.
    if (plain.status != Status::Drawn || !filters.is_by_mass()) return;
    if (!has_lines || !TopPFirstPass::takes(filters, call.rows[i])) return draw_by_turns(call, shared, i, plain);
    const TopPSearch::Masses sums = pass.masses(shared, plain.logit, plain.token, call.rows[i].inv_temperature);
    Team::sync_relaxed();
    if (threadIdx.x != 0 || Team::rank() != 0) return;
    const double limit = filters.top_p * sums.all, error = TopPSearch::error_of(pass.lines.most());
    if (sums.before * (1.0 + error) < limit * (1.0 - error)) return;
    const Row& row = call.rows[i];
    if (sums.before * (1.0 - error) > limit * (1.0 + error))
        return open.add({sums.before, sums.all, row.seed, row.position, plain.logit, plain.token, row.inv_temperature,
                         filters.top_p, static_cast<float>(error) * 1.000001f, row.draw, i, 0});
    // The host decides rows in doubt.
    call.draws[i] = {0, 0.0f, 0.0f, Status::Undecided};
}

extern "C" __global__ void __launch_bounds__(TopPBlockMax::THREADS, 2)
    top_p_block_max(const __grid_constant__ FilterCall call, const __grid_constant__ UndecidedRows open) {
    extern __shared__ __align__(16) u8 memory[];
    if (call.skip_if.holds()) return;
    TopPBlockMax{call, open, *reinterpret_cast<TopPBlockMax::Shared*>(memory)}.run();
}

extern "C" __global__ void __launch_bounds__(TopPResolve<NoRanks>::THREADS, 2)
    top_p_resolve(const __grid_constant__ FilterCall call, const __grid_constant__ UndecidedRows open) {
    extern __shared__ __align__(16) u8 memory[];
    using Select = TopPResolve<NoRanks>;
    Select{call, open, NoRanks{}, *reinterpret_cast<Select::Shared*>(memory)}.run();
}
