// The entry points of the draws with top-p first, from all logits. The first is launched with a cluster of blocks a draw, or one
// block where there are no clusters: 1, 2, 4 or 8. `top_p_resolve` decides what it leaves open, with as many blocks as multiprocessors
// hold, and one a draw at least. In place of both `top_p_block_max` takes calls whose rows have top-p alone, if any filter, and
// neither masks nor biases, where BlockMaxima lie beside the logits and the first token is a multiple of 4: in a cooperative launch
// of as many blocks as multiprocessors hold. Open rows are read by RowLines alone.
#include "flash_sampling/selection/top_p_block_max.cuh"

using namespace flash_sampling;

static_assert(TopPBlockMax::THREADS == TopPSearch::THREADS && TopPResolve<NoRanks>::THREADS == TopPSearch::THREADS,
              "the host launches all three with as many threads");

// What the host must know to launch them: threads of a block, of how many tokens each of several blocks should have some, and
// the second's bytes of shared memory.
extern "C" {
__constant__ u32 top_p_launch[4] = {TopPSearch::THREADS, TopPSearch::STEP, sizeof(TopPResolve<NoRanks>::Shared),
                                         sizeof(TopPBlockMax::Shared)};
}

// Rows that one pass does not take.
static __device__ __noinline__ void draw_by_turns(const FilterCall& call, TopPSearch::Shared& shared, u32 i, const Draw& plain) {
    const RowFilters filters = call.filters[i];
    call.begin(i, shared.row);
    TopPSearch select{filters, call.row(i), shared};
    const Draw draw = select.draw(plain);
    // Nobody leaves before all have read its share.
    Team::sync_relaxed();
    if (threadIdx.x == 0 && Team::rank() == 0) call.draws[i] = draw;
}

extern "C" __global__ void __launch_bounds__(TopPSearch::THREADS, 2)
    top_p(const __grid_constant__ FilterCall call, const __grid_constant__ UndecidedRows open) {
    __shared__ TopPSearch::Shared shared;
    const u32 i = blockIdx.x / Team::size();
    const bool has_lines = TopPSearch::Lines::takes(call.row(i)) && !call.is_transformed;
    // No lines: the loads do not come to pass.
    TopPFirstPass pass(has_lines ? call.row(i) : ExistingRow{nullptr, 0, 0});
    const RowFilters filters = call.filters[i];
    const Draw plain = call.draws[i];
    // What is invalid stays so.
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
    // The host names what is in doubt.
    call.draws[i] = {0, 0.0f, 0.0f, Status::Undecided};
}

extern "C" __global__ void __launch_bounds__(TopPBlockMax::THREADS, 2)
    top_p_block_max(const __grid_constant__ FilterCall call, const __grid_constant__ UndecidedRows open) {
    extern __shared__ __align__(16) u8 memory[];
    TopPBlockMax{call, open, *reinterpret_cast<TopPBlockMax::Shared*>(memory)}.run();
}

extern "C" __global__ void __launch_bounds__(TopPResolve<NoRanks>::THREADS, 2)
    top_p_resolve(const __grid_constant__ FilterCall call, const __grid_constant__ UndecidedRows open) {
    extern __shared__ __align__(16) u8 memory[];
    using Select = TopPResolve<NoRanks>;
    Select{call, open, NoRanks{}, *reinterpret_cast<Select::Shared*>(memory)}.run();
}
