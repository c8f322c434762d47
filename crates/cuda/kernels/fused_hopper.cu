// Entry points of the fused Hopper kernel. FS_COLUMNS, FS_UNITS, FS_CLUSTER and FS_OPERAND are given by the build.
#include "flash_sampling/kernels/fused_hopper.cuh"

using namespace flash_sampling;

extern "C" __global__ void __cluster_dims__(FS_CLUSTER, 1, 1) __launch_bounds__(384, 1)
    fused_hopper(const __grid_constant__ Call call, const __grid_constant__ ptx::TensorMap weight,
                 const __grid_constant__ ptx::TensorMap hidden) {
    extern __shared__ u8 memory[];
    FusedHopper<FS_COLUMNS, FS_UNITS, FS_CLUSTER>::block<ptx::Operand::FS_OPERAND>(call, weight, hidden, memory);
}
