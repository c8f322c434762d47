// The entry point of draws from groups: one block per row.
#include "flash_sampling/selection/groups.cuh"

using namespace flash_sampling;

extern "C" __global__ void __launch_bounds__(Select::THREADS, 1) select_groups(const __grid_constant__ Selection selection) {
    __shared__ Select::Shared shared;
    const u32 row = blockIdx.x;
    const Partial* const partials = selection.partials + static_cast<u64>(row) * selection.groups.slots();
    Select{selection, selection.rows[row], partials, shared}.block(row);
}
