// The entry point of the fused Hopper kernel. The build defines FS_COLUMNS, FS_SLABS, FS_CLUSTER, FS_UNITS and
// FS_OPERAND. For a weight of 8-bit elements, the build also defines its type, FS_WEIGHT. The build defines at most one
// variant, except as stated:
//
//   FS_MASKS_PENALTIES  takes rows with penalties, and stores raw logits on request
//   FS_LISTS            takes rows with penalties, and lists the largest logits of rows with filters
//   FS_LOG_Z            computes log Z of rows with neither masks nor biases, for heads without soft-cap
//   FS_FAN_OUT          sends its draws to the other ranks
//   FS_STORE_LOGITS     stores the raw logits, and the largest of each granule, of rows with top-p alone
//   FS_CANDIDATES       takes rows with penalties, and lists the tokens that can win, by a shadow of the weight; with
//                       FS_LISTS, also the largest logits of rows with filters
#if !defined(FS_LISTS) && !defined(FS_MASKS_PENALTIES) && !defined(FS_CANDIDATES)
#define FS_NO_PENALTIES
#endif
#include "flash_sampling/fused_hopper/kernel.cuh"

using namespace flash_sampling;

// The variant, its parameter, and the block's arguments: the other variants' outputs are empty.
#if defined(FS_LISTS) && defined(FS_CANDIDATES)
#define FS_VARIANT ListedCandidates
#define FS_PARAMETER , const __grid_constant__ Candidates candidates, const __grid_constant__ RowLists lists
#define FS_OUTPUTS LogitStore{}, lists, Masses{}, Peers{}, candidates
#elif defined(FS_LISTS)
#define FS_VARIANT Lists
#define FS_PARAMETER , const __grid_constant__ RowLists lists
#define FS_OUTPUTS LogitStore{}, lists, Masses{}, Peers{}, Candidates{}
#elif defined(FS_MASKS_PENALTIES)
#define FS_VARIANT MasksPenalties
#define FS_PARAMETER , const __grid_constant__ LogitStore stored
#define FS_OUTPUTS stored, RowLists{}, Masses{}, Peers{}, Candidates{}
#elif defined(FS_LOG_Z)
#define FS_VARIANT LogZ
#define FS_PARAMETER , const __grid_constant__ Masses masses
#define FS_OUTPUTS LogitStore{}, RowLists{}, masses, Peers{}, Candidates{}
#elif defined(FS_FAN_OUT)
#define FS_VARIANT FanOut
#define FS_PARAMETER , const __grid_constant__ Peers peers
#define FS_OUTPUTS LogitStore{}, RowLists{}, Masses{}, peers, Candidates{}
#elif defined(FS_STORE_LOGITS)
#define FS_VARIANT StoreLogits
#define FS_PARAMETER , const __grid_constant__ LogitStore stored
#define FS_OUTPUTS stored, RowLists{}, Masses{}, Peers{}, Candidates{}
#elif defined(FS_CANDIDATES)
#define FS_VARIANT Candidates
#define FS_PARAMETER , const __grid_constant__ Candidates candidates
#define FS_OUTPUTS LogitStore{}, RowLists{}, Masses{}, Peers{}, candidates
#else
#define FS_VARIANT Plain
#define FS_PARAMETER
#define FS_OUTPUTS LogitStore{}, RowLists{}, Masses{}, Peers{}, Candidates{}
#endif
constexpr auto VARIANT = fused_hopper::FusedVariant::FS_VARIANT;
#ifndef FS_WEIGHT
#define FS_WEIGHT BF16
#endif
using Tile = fused_hopper::Tile<FS_COLUMNS, FS_SLABS, FS_CLUSTER, VARIANT, Element::FS_WEIGHT, FS_UNITS>;

// For the host's launch: bytes of dynamic shared memory, threads per block.
extern "C" {
__constant__ u32 fused_hopper_launch[2] = {fused_hopper::Ring<Tile>::SHARED_BYTES, Tile::THREADS};
}

extern "C" __global__ void __cluster_dims__(FS_CLUSTER, 1, 1) __launch_bounds__(Tile::THREADS, 1)
    fused_hopper(const __grid_constant__ Call call, const __grid_constant__ fused_hopper::Maps maps FS_PARAMETER) {
    extern __shared__ u8 memory[];
    fused_hopper::block<Tile, ptx::Operand::FS_OPERAND>(call, maps, FS_OUTPUTS, memory);
}
