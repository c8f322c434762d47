// The entry point of the fused Hopper kernel. The build gives FS_COLUMNS, FS_SLABS, FS_CLUSTER and FS_OPERAND,
// FS_MASKS_PENALTIES for the instance that takes rows with penalties and keeps the raw logits on request, and FS_LISTS for the one
// that takes rows with penalties, and rows with filters, whose largest logits it lists. FS_LOG_Z is for the instance that
// computes log Z of rows with neither masks nor biases, of a head without soft-cap. FS_FAN_OUT is for the one whose draws leave
// for the other ranks from here. FS_STORE_LOGITS is for rows with top-p alone: it stores the raw logits, and the largest of each
// granule.
#if defined(FS_LISTS) && !defined(FS_MASKS_PENALTIES)
#define FS_MASKS_PENALTIES
#endif
#ifndef FS_MASKS_PENALTIES
#define FS_NO_PENALTIES
#endif
#include "flash_sampling/fused_hopper/kernel.cuh"

using namespace flash_sampling;
using fused_hopper::FusedVariant;
#if defined(FS_LISTS)
constexpr FusedVariant VARIANT = FusedVariant::Lists;
#elif defined(FS_MASKS_PENALTIES)
constexpr FusedVariant VARIANT = FusedVariant::MasksPenalties;
#elif defined(FS_LOG_Z)
constexpr FusedVariant VARIANT = FusedVariant::LogZ;
#elif defined(FS_FAN_OUT)
constexpr FusedVariant VARIANT = FusedVariant::FanOut;
#elif defined(FS_STORE_LOGITS)
constexpr FusedVariant VARIANT = FusedVariant::StoreLogits;
#else
constexpr FusedVariant VARIANT = FusedVariant::Plain;
#endif
using Tile = fused_hopper::Tile<FS_COLUMNS, FS_SLABS, FS_CLUSTER, VARIANT>;

// For the launch: dynamic shared memory in bytes, and threads of a block.
extern "C" {
__constant__ u32 fused_hopper_launch[2] = {fused_hopper::Ring<Tile>::SHARED_BYTES, Tile::THREADS};
}

#ifdef FS_LISTS
extern "C" __global__ void __cluster_dims__(FS_CLUSTER, 1, 1) __launch_bounds__(Tile::THREADS, 1)
    fused_hopper(const __grid_constant__ Call call, const __grid_constant__ fused_hopper::Maps maps,
                 const __grid_constant__ RowLists lists) {
    extern __shared__ u8 memory[];
    fused_hopper::block<Tile, ptx::Operand::FS_OPERAND>(call, maps, LogitStore{}, lists, Masses{}, Peers{}, memory);
}
#elif defined(FS_MASKS_PENALTIES)
extern "C" __global__ void __cluster_dims__(FS_CLUSTER, 1, 1) __launch_bounds__(Tile::THREADS, 1)
    fused_hopper(const __grid_constant__ Call call, const __grid_constant__ fused_hopper::Maps maps,
                 const __grid_constant__ LogitStore stored) {
    extern __shared__ u8 memory[];
    fused_hopper::block<Tile, ptx::Operand::FS_OPERAND>(call, maps, stored, RowLists{}, Masses{}, Peers{}, memory);
}
#elif defined(FS_LOG_Z)
extern "C" __global__ void __cluster_dims__(FS_CLUSTER, 1, 1) __launch_bounds__(Tile::THREADS, 1)
    fused_hopper(const __grid_constant__ Call call, const __grid_constant__ fused_hopper::Maps maps,
                 const __grid_constant__ Masses masses) {
    extern __shared__ u8 memory[];
    fused_hopper::block<Tile, ptx::Operand::FS_OPERAND>(call, maps, LogitStore{}, RowLists{}, masses, Peers{}, memory);
}
#elif defined(FS_FAN_OUT)
extern "C" __global__ void __cluster_dims__(FS_CLUSTER, 1, 1) __launch_bounds__(Tile::THREADS, 1)
    fused_hopper(const __grid_constant__ Call call, const __grid_constant__ fused_hopper::Maps maps,
                 const __grid_constant__ Peers peers) {
    extern __shared__ u8 memory[];
    fused_hopper::block<Tile, ptx::Operand::FS_OPERAND>(call, maps, LogitStore{}, RowLists{}, Masses{}, peers, memory);
}
#elif defined(FS_STORE_LOGITS)
extern "C" __global__ void __cluster_dims__(FS_CLUSTER, 1, 1) __launch_bounds__(Tile::THREADS, 1)
    fused_hopper(const __grid_constant__ Call call, const __grid_constant__ fused_hopper::Maps maps,
                 const __grid_constant__ LogitStore stored) {
    extern __shared__ u8 memory[];
    fused_hopper::block<Tile, ptx::Operand::FS_OPERAND>(call, maps, stored, RowLists{}, Masses{}, Peers{}, memory);
}
#else
extern "C" __global__ void __cluster_dims__(FS_CLUSTER, 1, 1) __launch_bounds__(Tile::THREADS, 1)
    fused_hopper(const __grid_constant__ Call call, const __grid_constant__ fused_hopper::Maps maps) {
    extern __shared__ u8 memory[];
    fused_hopper::block<Tile, ptx::Operand::FS_OPERAND>(call, maps, LogitStore{}, RowLists{}, Masses{}, Peers{}, memory);
}
#endif
