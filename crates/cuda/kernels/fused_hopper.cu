// The entry point of the fused Hopper kernel. FS_COLUMNS, FS_UNITS, FS_SLABS, FS_CLUSTER and FS_OPERAND are given by the build.
#include "flash_sampling/kernels/fused_hopper.cuh"

using namespace flash_sampling;
using Kernel = FusedHopper<FS_COLUMNS, FS_UNITS, FS_SLABS, FS_CLUSTER>;

// What the host must know to launch it: dynamic shared memory in bytes, and threads of a block.
extern "C" {
__constant__ u32 fused_hopper_launch[2] = {Kernel::SHARED_BYTES, Kernel::THREADS};
}

extern "C" __global__ void __cluster_dims__(FS_CLUSTER, 1, 1) __launch_bounds__(Kernel::THREADS, 1)
    fused_hopper(const __grid_constant__ Call call, const __grid_constant__ Kernel::Maps maps) {
    extern __shared__ u8 memory[];
    Kernel::block<ptx::Operand::FS_OPERAND>(call, maps, memory);
}
