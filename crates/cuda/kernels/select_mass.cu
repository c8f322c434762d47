// The entry point of the draws with top-p first, from all logits: a cluster of blocks a draw, or one block where there are no
// clusters. The launch says how many: 1, 2, 4 or 8.
#include "flash_sampling/select_mass.cuh"

using namespace flash_sampling;

// What the host must know to launch it: threads of a block, and of how many tokens each of several blocks should have some.
extern "C" {
__constant__ u32 select_mass_launch[2] = {SelectMass::THREADS, SelectMass::STEP};
}

extern "C" __global__ void __launch_bounds__(SelectMass::THREADS, 2) select_mass(const __grid_constant__ SelectRows call) {
    __shared__ SelectMass::Shared shared;
    const u32 i = blockIdx.x / Team::size();
    const RowFilters filters = call.filters[i];
    const Draw plain = call.draws[i];
    // What is invalid stays so.
    if (plain.status != Status::Drawn || !filters.is_by_mass()) return;
    call.begin(i, shared.row, shared.philox);
    SelectMass select{filters, call.row(i), shared};
    const Draw draw = select.draw(plain);
    // Nobody leaves before all have read its share.
    Team::part();
    if (threadIdx.x == 0 && Team::rank() == 0) call.draws[i] = draw;
}
